"""The trace of a token: its pass, and what is computed from what the pass returns."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np

from engine.arrays import Array
from engine.cache.sequence import Sequence as TokenSequence
from engine.decode.slot import Slot
from engine.errors import UsageError
from engine.models.attention_config import AttentionConfig
from engine.models.base import Model
from engine.models.compressed_config import CompressedConfig
from engine.models.config import LayerConfig
from engine.models.delta_net_config import DeltaNetConfig
from engine.models.kda_config import KDAConfig
from engine.models.latent_config import LatentConfig
from engine.models.mamba_config import MambaConfig
from engine.models.mixer_config import MixerConfig
from engine.models.network_config import ExpertsConfig
from engine.models.pair_config import PairConfig
from engine.models.short_conv_config import ShortConvConfig
from engine.ops.executor import Forward
from engine.sampling.sampler import token_logprob
from engine.sampling.token_logprob import TokenLogprob
from engine.speculative.draft_model import DraftModel
from engine.speculative.mtp import MTPDraft
from engine.text.tokenizer import Tokenizer
from engine.trace.attention import attention_weights
from engine.trace.capture import EMBEDDING, TracedPass
from engine.trace.drafts import drafted
from engine.trace.lens import LensPass
from engine.trace.states import delta_states
from engine.trace.trace import Trace, TracedLayer, TracedStream

R = TypeVar("R")

NAMES: dict[type[MixerConfig], str] = {
    AttentionConfig: "attention",
    LatentConfig: "latent attention",
    CompressedConfig: "compressed attention",
    DeltaNetConfig: "delta net",
    KDAConfig: "Kimi delta attention",
    MambaConfig: "Mamba-2",
    ShortConvConfig: "short convolution",
}
"""The names of mixers."""

MISSING: dict[type[MixerConfig], str] = {
    LatentConfig: "Latent attention keeps no keys of heads, so the weights of its heads are not shown.",
    CompressedConfig: "Compressed attention keeps no keys of tokens, so the weights of its heads are not shown.",
    KDAConfig: "The states of Kimi delta attention are not shown.",
    MambaConfig: "The states of Mamba-2 are not shown.",
}
"""What is not shown of a mixer."""


class TraceableModel(Protocol):
    """The interface of a loaded model that a trace uses; ``engine.llm.LLM`` implements it."""

    tokenizer: Tokenizer
    model: Model
    draft: DraftModel | MTPDraft | None

    def read_by(self, ids: Sequence[int], forward: Forward[Array], salt: str = "") -> tuple[Slot, np.ndarray]:
        """Make the cache hold exactly ``ids``, whose last token a pass of its own reads.  Returns the slot, and the result of
        this pass."""

    def with_pages(self, slot: Slot, call: Callable[[], R]) -> R:
        """The result of a function that may raise NoPages, which is called again when pages of others were freed."""


class Tracer:
    """Traces tokens of one model.  Its passes are recorded once."""

    def __init__(self, model: Model) -> None:
        """Raises UsageError if the model is divided between devices, by its layers or by its matrices."""
        if model.stages or len(model.ops.owners) > 1:
            raise UsageError(
                "a model that is divided between devices cannot be traced: keep it on one, with a smaller context, or with "
                'device="cpu".'
            )
        self._pass = TracedPass(model)
        self._lens = LensPass(model, model.config.n_layer + 1)

    def trace(self, llm: TraceableModel, ids: Sequence[int], top: int, drafts: int, salt: str = "") -> Trace:
        """The trace of the last of ``ids``, which are valid.  No other thread may use the model meanwhile.

        top: the number of tokens that the lens lists; drafts: the most drafts; salt: that of the text.
        """
        model = llm.model
        slot, row = llm.read_by(ids, self._pass, salt)
        logits = row[0, : model.config.n_vocab]
        read = _Row(self._pass, row[0])
        streams = np.stack([read.stream(EMBEDDING)[-1], *(read.stream(il)[-1] for il in range(model.config.n_layer))])
        said = [self._said(llm.tokenizer, each, top) for each in self._lens.logits(streams)]
        stream = [TracedStream(norm_of(x), likely) for x, likely in zip(streams, said, strict=True)]
        layers = []
        for il, config in enumerate(model.config.layers):
            before = streams[il]
            layers.append(self._layer(model, read, il, config, before, stream[il + 1], slot.sequence))
        token = int(logits.argmax())
        found = None
        if drafts and slot.sequence.length < model.cache.n_ctx:
            found = llm.with_pages(slot, lambda: drafted(model, llm.draft, slot.sequence, token, drafts))
        known = {*ids, *(each.id for point in stream for each in point.lens)}
        if found is not None:
            known |= {found.after, *(draft.id for draft in found.drafts)}
            known |= {draft.own for draft in found.drafts if draft.own is not None}
        texts = {id: llm.tokenizer.token_bytes(id, special=True).decode("utf-8", "replace") for id in sorted(known)}
        return Trace(list(ids), logits, stream[0], tuple(layers), found, texts)

    def _said(self, tokenizer: Tokenizer, logits: np.ndarray, top: int) -> tuple[TokenLogprob, ...]:
        """The most probable tokens by a row of logits; none if it is not finite."""
        if not np.isfinite(logits).all():
            return ()
        return token_logprob(tokenizer, np.ascontiguousarray(logits), 0, top).top

    def _layer(
        self,
        model: Model,
        read: "_Row",
        il: int,
        config: LayerConfig,
        before: np.ndarray,
        stream: TracedStream,
        sequence: TokenSequence,
    ) -> TracedLayer:
        ops, position = model.ops, sequence.length - 1
        attention = None
        if (arguments := self._pass.asked.get(il)) is not None:
            attention = attention_weights(ops, arguments, read.only(il, "query"), position, sequence.slot)
        states: tuple[float, ...] = ()
        if (net := self._pass.nets.get(il)) is not None:
            found = delta_states(ops, *net, sequence.slot, sequence.length)
            states = tuple(norm_of(each) for each in found)
        chosen: tuple[tuple[int, float], ...] = ()
        if read.has(il, "experts"):
            weights = read.only(il, "weights").tolist()
            chosen = tuple(zip(read.only(il, "experts").view(np.int32).tolist(), weights, strict=True))
        added: dict[str, float] = {}
        if model.config.streams is None:
            for part, after in zip(model.parts[il], read.stream(il), strict=True):
                name = "layer" if part.mixer and part.network else "mixer" if part.mixer else "network"
                added[name] = norm_of(after.astype(np.float64) - before)
                before = after
        return TracedLayer(
            il,
            _name_of(config.mixer),
            ("experts" if isinstance(config.network, ExpertsConfig) else "dense") if config.network.exists else "",
            stream,
            added,
            attention,
            chosen,
            states,
            " ".join(_missing(config.mixer)),
        )


class _Row:
    """What a traced pass has returned, by layer and name."""

    def __init__(self, traced: TracedPass, row: np.ndarray) -> None:
        self._found: dict[tuple[int, str], list[np.ndarray]] = {}
        for kept in traced.kept:
            self._found.setdefault((kept.layer, kept.name), []).append(row[kept.begin : kept.end])

    def has(self, layer: int, name: str) -> bool:
        return (layer, name) in self._found

    def only(self, layer: int, name: str) -> np.ndarray:
        (found,) = self._found[layer, name]
        return found

    def stream(self, layer: int) -> list[np.ndarray]:
        """The residual stream after each part of a layer, float32 [width] each."""
        return self._found[layer, "stream"]


def norm_of(x: np.ndarray) -> float:
    """The Euclidean norm of an array, computed in float64."""
    return float(np.sqrt(np.square(x, dtype=np.float64).sum()))


def _name_of(mixer: MixerConfig) -> str:
    if isinstance(mixer, PairConfig):
        return f"{_name_of(mixer.first)} and {_name_of(mixer.second)}"
    return NAMES.get(type(mixer), "")


def _missing(mixer: MixerConfig) -> list[str]:
    if isinstance(mixer, PairConfig):
        return [*_missing(mixer.first), *_missing(mixer.second)]
    return [MISSING[type(mixer)]] if type(mixer) in MISSING else []
