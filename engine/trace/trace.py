"""What a trace has found."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.sampling.token_logprob import TokenLogprob
from engine.trace.attention import AttentionWeights

VERSION = 1
"""The version of the JSON form.  It changes when the meaning of a field does."""


@dataclass(frozen=True)
class TracedStream:
    """The residual stream of the token at one point.

    Attributes
    ----------
    norm : float
        Its Euclidean norm.
    lens : tuple of TokenLogprob
        The most probable tokens if the output head is applied here (the logit lens). Empty if it gives no finite numbers.
    """

    norm: float
    lens: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class TracedLayer:
    """What one layer has computed for the token.

    Attributes
    ----------
    index : int
        The number of the layer, from 0.
    mixer, network : str
        What they are, such as "attention" and "experts"; "" if the layer has none.
    stream : TracedStream
        The residual stream after the layer.
    added : dict of str to float
        The norms of what "mixer" and "network" have added to the stream; "layer" if both are added together. Empty if the
        model has several streams.
    attention : AttentionWeights or None
        The weights of earlier tokens, by head.
    experts : tuple of (int, float)
        The experts that were chosen, with their weights.
    states : tuple of float
        The norms of the states of a delta net after the token, by head.
    missing : str
        A sentence on what the mixer does not show; "" if nothing is missing.
    """

    index: int
    mixer: str
    network: str
    stream: TracedStream
    added: dict[str, float]
    attention: AttentionWeights | None = None
    experts: tuple[tuple[int, float], ...] = ()
    states: tuple[float, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class TracedDraft:
    """A draft after the token, with its fate.

    Attributes
    ----------
    id : int
        The draft.
    fate : str
        "kept": it is what the model says; "refused": it is not; "dropped": it follows one that was refused.
    own : int or None
        What the model says in its place; None if it was dropped.
    """

    id: int
    fate: str
    own: int | None


@dataclass(frozen=True)
class TracedDrafts:
    """Drafts, and the pass that verified them, greedily.

    Attributes
    ----------
    source : str
        What made them, such as "mtp", "model" or "lookup".
    after : int
        The model's most probable token after the traced one, which they follow.
    drafts : tuple of TracedDraft
        The drafts.
    """

    source: str
    after: int
    drafts: tuple[TracedDraft, ...]


@dataclass(frozen=True)
class Trace:
    """One token on its way through the layers, from :meth:`LLM.trace`.

    Attributes
    ----------
    ids : list of int
        The tokens that were read. The last one is traced.
    logits : ndarray
        The logits after it, float32 [n_vocab].
    embedding : TracedStream
        The residual stream before the first layer.
    layers : tuple of TracedLayer
        The layers.
    drafts : TracedDrafts or None
        Drafts after the token; None if nothing drafts.
    texts : dict of int to str
        The texts of all tokens that occur in the trace, by their ids.
    """

    ids: list[int]
    logits: np.ndarray
    embedding: TracedStream
    layers: tuple[TracedLayer, ...]
    drafts: TracedDrafts | None
    texts: dict[int, str]

    def as_json(self, top: int) -> dict[str, Any]:
        """The trace as an object for JSON, which ``docs/trace.md`` describes; top: the positions to list per head."""
        drafts = self.drafts
        return {
            "object": "trace",
            "version": VERSION,
            "position": len(self.ids) - 1,
            "tokens": [self._token(id) for id in self.ids],
            "embedding": self._stream(self.embedding),
            "layers": [self._layer(layer, top) for layer in self.layers],
            "drafts": None
            if drafts is None
            else {
                "source": drafts.source,
                "after": self._token(drafts.after),
                "drafts": [
                    self._token(draft.id)
                    | {"fate": draft.fate, "own": None if draft.own is None else self._token(draft.own)}
                    for draft in drafts.drafts
                ],
            },
        }

    def _token(self, id: int) -> dict[str, Any]:
        return {"id": id, "text": self.texts[id]}

    def _stream(self, stream: TracedStream) -> dict[str, Any]:
        lens = [{"id": each.id, "text": each.text, "logprob": _finite(each.logprob)} for each in stream.lens]
        return {"norm": _finite(stream.norm), "lens": lens}

    def _layer(self, layer: TracedLayer, top: int) -> dict[str, Any]:
        weights = layer.attention
        heads = None
        if weights is not None:
            heads = [
                {
                    "sink": float(sink),
                    "top": [{"position": at, "weight": weight} for at, weight in top_weights(weights, head, top)],
                }
                for head, sink in enumerate(weights.sinks)
            ]
        return {
            "layer": layer.index,
            "mixer": layer.mixer,
            "network": layer.network,
            **self._stream(layer.stream),
            "added": {name: _finite(norm) for name, norm in layer.added.items()},
            "heads": heads,
            "experts": [{"expert": expert, "weight": _finite(weight)} for expert, weight in layer.experts] or None,
            "states": [_finite(norm) for norm in layer.states] or None,
            "missing": layer.missing or None,
        }


def top_weights(attention: AttentionWeights, head: int, top: int) -> list[tuple[int, float]]:
    """The positions that a head gives the most weight, at most ``top``, with their weights, largest first."""
    row = attention.weights[head]
    order = np.argsort(-row, kind="stable")[:top]
    return [(attention.first + int(at), float(row[at])) for at in order]


def _finite(value: float) -> float | None:
    """The value as JSON can represent it: None if it is not finite."""
    return value if math.isfinite(value) else None
