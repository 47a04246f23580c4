"""An assistant of the target as a source of drafts (``engine/models/assistant.py``)."""

from collections.abc import Sequence
from typing import cast

from engine.arrays import Array
from engine.cache.sequence import Sequence as TokenSequence
from engine.models.assistant import Assistant
from engine.ops.operations import Ops
from engine.sampling.sampler import Sampler
from engine.speculative.mtp import MTPDraft
from engine.speculative.proposal import Proposal


class AssistantDraft(MTPDraft):
    """A chain of drafts by a model of its own that reads what the target remembers."""

    name = "assistant"
    behind = 1

    @property
    def _assistant(self) -> Assistant:
        return cast(Assistant, self.llm.model.drafter)

    @property
    def ops(self) -> Ops:
        """The backend that computes the drafts, possibly on another GPU."""
        return self._assistant.ops

    def propose(
        self,
        known: Sequence[int],
        count: int,
        sampler: Sampler,
        p_min: float,
        with_distributions: bool,
        sequence: TokenSequence,
    ) -> Proposal:
        """Up to ``count`` tokens that may follow ``known``, at least two tokens, of which the target's ``sequence`` holds all
        but the last."""
        self._assistant.stand(len(known) - 1)
        return super().propose(known, count, sampler, p_min, with_distributions, sequence)

    def reserve(self, length: int) -> None:
        """Prepare the rotation angles of positions [0, length)."""
        self._assistant.reserve(length)

    @property
    def anchor(self) -> Array:
        """The memory that holds the positions at which drafts are made."""
        return self._assistant.anchor
