"""Which models several devices can share layer by layer, and what each of them then owns."""

from typing import NamedTuple

from engine.models.config import ModelConfig
from engine.shares import STEP, even_cut, share

Range = tuple[int, int]
"""Elements [first, last)."""


class Owned(NamedTuple):
    """What one of several devices owns of a model.

    heads: of each layer, the heads of keys and values, or the key heads, with all heads that belong to them; None: the layer
        has no mixer.
    columns: the elements of the residual stream that it computes.
    tokens: the tokens whose logits it computes.
    """

    heads: tuple[Range | None, ...]
    columns: Range
    tokens: Range


def owned(config: ModelConfig, n_owners: int) -> tuple[Owned, ...]:
    """What each of several devices owns of a model, for which :func:`why_not_shared` must give no reason."""
    mixers = [layer.mixer for layer in config.all_layers]
    columns, tokens = (even_cut(size, n_owners) for size in (config.n_embd, config.n_vocab))
    assert columns is not None and tokens is not None
    found = []
    for i in range(n_owners):
        heads = tuple(share(mixer.most_owners, i, n_owners) if mixer.exists else None for mixer in mixers)
        found.append(Owned(heads, columns.runs[i][0], tokens.runs[i][0]))
    return tuple(found)


def why_not_shared(config: ModelConfig, n_owners: int, can_be_shared: bool = True) -> str:
    """Why this number of devices cannot share a model, as a clause that says what to do; "" if they can.

    can_be_shared: whether its architecture allows it (``Model.can_be_shared``).
    """
    one = "use one device, or give each of them some of its layers"
    if not can_be_shared or config.streams is not None or config.n_shared:
        return f"several devices cannot share the layers of a {config.architecture} model; {one}"
    if not config.causal or config.pooling:
        return "several devices cannot share the layers of a model that reads whole texts; use one device"
    for layer in config.all_layers:
        mixer, network = layer.mixer, layer.network
        if not mixer.most_owners:
            return f"several devices cannot share the mixers of a {config.architecture} model; {one}"
        if not network.can_be_shared:
            return f"several devices cannot share the mixtures of a {config.architecture} model; {one}"
    heads = min(layer.mixer.most_owners for layer in config.all_layers)
    if heads < n_owners:
        shared = f"the {heads} heads" if heads > 1 else "the one head"
        return f"{n_owners} devices cannot share {shared} of keys of a layer; use {_at_most(heads)}"
    shortest = min(config.n_embd, config.n_vocab)
    if even_cut(shortest, n_owners) is None:
        return f"{n_owners} devices cannot share rows of {shortest} elements; use {_at_most(-(-shortest // STEP))}"
    return ""


def _at_most(n: int) -> str:
    return f"at most {n} devices" if n > 1 else "one device"
