"""The proposal of a draft source."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from engine.arrays import Array
from engine.cache.kv import KVCache
from engine.cache.sequence import Sequence as TokenSequence
from engine.models.drafter import BlockPass
from engine.ops.device import DeviceOperations
from engine.ops.executor import Forward
from engine.sampling.sampler import Sampler
from engine.speculative.passes import PassTimes

Distribution = tuple[np.ndarray, np.ndarray]
"""Token ids, int32 [n], and their probabilities, float32 [n]."""


class DeviceDraft(Protocol):
    """A source of drafts whose passes can run on the target's own device, as part of a step."""

    n_vocab: int
    """The number of tokens that it can propose."""

    script: np.ndarray | None
    """Proposals that replace its own token at a position, int32 [n_ctx], or [slots, n_ctx] for each sequence of the target,
    negative: not replaced; None: no replacements."""

    @property
    def ops(self) -> DeviceOperations:
        """The backend that computes its passes."""

    @property
    def n_ctx(self) -> int:
        """The number of positions of its context."""

    @property
    def reads(self) -> int:
        """The number of tokens that its first pass in a step reads."""

    @property
    def cache(self) -> KVCache | None:
        """Its own cache; None if it reads the target's."""

    def sequence(self, slot: int) -> TokenSequence | None:
        """What it has read of the target's sequence in a slot; None if it reads the target's cache."""

    @property
    def anchor(self) -> Array | None:
        """An array int32 [2, DECODE_ANSWERS] of ``ops`` for the position of the last sampled token of each request in a pass,
        and the position before it; None if it uses neither."""

    @property
    def block(self) -> BlockPass | None:
        """The pass that precedes the passes of the drafts of a step; None if there is none."""

    @property
    def passes(self) -> Sequence[Forward[Array]]:
        """Its passes: the i-th computes the i-th draft of a step, and the last one all further drafts."""

    def sampler(self, sampler: Sampler) -> Sampler:
        """The sampler that draws its tokens when ``sampler`` draws the target's."""

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""

    def catch_up(self, known: Sequence[int], target: TokenSequence) -> None:
        """Read the tokens that it needs in order to continue after ``known``, which the target has in a sequence."""

    def keep(self, known: Sequence[int], count: int, tokens: Sequence[int], slot: int) -> None:
        """Note that a step with ``count`` drafts appended ``tokens`` to ``known``, which the target has in ``slot``."""


def script_of(draft: DeviceDraft, slot: int) -> np.ndarray | None:
    """The script of a source for the target's sequence in a slot, int32 [n_ctx]."""
    script = draft.script
    return script if script is None or script.ndim == 1 else script[slot]


@dataclass
class Proposal:
    """Drafts for the positions after the last sampled token.

    tokens: the drafts.
    source: the name of their source; "" without drafts.
    resumes: whether these are the first drafts after a pause.
    distributions: the distribution each was drawn from; None for drafts that are simply proposed.
    device_draft: a draft model on the target's own device, which makes ``count`` drafts when the step starts.
    """

    tokens: list[int] = field(default_factory=list)
    distributions: list[Distribution] | None = None
    device_draft: DeviceDraft | None = None
    count: int = 0
    source: str = ""
    resumes: bool = False

    def __len__(self) -> int:
        return self.count or len(self.tokens)

    @property
    def searched(self) -> bool:
        """Whether drafts were found in earlier text, instead of made by a model, one after another."""
        return self.source in ("lookup", "history")


class Draft(DeviceDraft, Protocol):
    """A model that drafts, or a part of one, as :class:`engine.speculative.speculation.Speculation` uses it."""

    name: str
    """The name of this kind of source."""

    reads_all: bool
    """Whether it knows every token of the target."""

    behind: int
    """The number of tokens that must precede the last sampled token."""

    @property
    def most(self) -> int:
        """The most drafts that it can make in a step."""

    @property
    def cost(self) -> float:
        """Bytes that drafting a token reads."""

    def propose(
        self,
        known: Sequence[int],
        count: int,
        sampler: Sampler,
        p_min: float,
        with_distributions: bool,
        sequence: TokenSequence,
    ) -> Proposal:
        """Up to ``count`` tokens that may follow ``known``; see :meth:`engine.speculative.draft_model.DraftModel.propose`."""


class StepLimits(Protocol):
    """The limits of the steps of a model.

    ``ahead``: the most plain steps of a request in flight; ``ahead_drafted``: the most steps with drafts.
    """

    ahead: int
    ahead_drafted: int

    passes: PassTimes
    """The times of its passes."""

    @property
    def rewind(self) -> int:
        """The number of tokens that may be read before they are committed."""

    def room(self, n_known: int) -> int:
        """The most drafts that a step can read after ``n_known`` tokens."""

    def drafts_here(self, draft: DeviceDraft) -> bool:
        """Whether a source computes its drafts as part of a step."""
