"""The target's own layers for drafting as a source of drafts (``engine/models/mtp.py``)."""

from collections.abc import Sequence

import numpy as np

from engine.arrays import Array
from engine.cache.sequence import Sequence as TokenSequence
from engine.models.drafter import Drafter
from engine.ops.executor import Forward
from engine.sampling.sampler import Sampler
from engine.speculative.draft_model import Judge, by_logits, drafted
from engine.speculative.proposal import Proposal, script_of
from engine.speculative.source import LoadedLLM, Source


class MTPDraft(Source):
    """A chain of drafts: the first layer continues from the trunk's output before the last sampled token, and the next
    layer, or the last one again, from the output of the one before.

    It never has to catch up or roll back: every pass of the trunk stores in its memory what the next draft needs.
    """

    name = "mtp"
    reads = 1
    reads_all = True
    cache = None

    def __init__(self, llm: LoadedLLM) -> None:
        self.llm = llm
        self.n_vocab = llm.config.n_vocab
        #: The tokens proposed instead of the model's own (``DeviceDraft.script``).
        self.script: np.ndarray | None = None

    @property
    def _drafter(self) -> Drafter:
        assert self.llm.model.drafter is not None
        return self.llm.model.drafter

    @property
    def cost(self) -> float:
        """Bytes that drafting a token reads."""
        return float(self._drafter.n_bytes)

    def sampler(self, sampler: Sampler) -> Sampler:
        """The target's sampler itself."""
        return sampler

    def propose(
        self,
        known: Sequence[int],
        count: int,
        sampler: Sampler,
        p_min: float,
        with_distributions: bool,
        sequence: TokenSequence,
    ) -> Proposal:
        """Up to ``count`` tokens that may follow ``known``, of which the target's ``sequence`` holds all but the last;
        arguments and result are those of :meth:`engine.speculative.draft_model.DraftModel.propose`."""

        def logits(history: list[int]) -> np.ndarray:
            number = len(history) - len(known)
            return self._drafter.forward(history[-1], len(history) - 1, sequence, number, count)

        return drafted(
            logits,
            known,
            count,
            sampler,
            p_min,
            with_distributions,
            script_of(self, sequence.slot),
            self._judge(known, sequence),
        )

    def _judge(self, known: Sequence[int], sequence: TokenSequence) -> Judge:
        """The probability that the target keeps a draft, by the logits that it was drawn from."""
        return by_logits

    def sequence(self, slot: int) -> None:
        """None: it reads the target's cache."""

    # --- passes on the device ------------------------------------------------------------------------------------

    @property
    def passes(self) -> Sequence[Forward[Array]]:
        """Its passes: the i-th computes the i-th draft of a step, and the last one all further drafts."""
        return self._drafter.passes

    def catch_up(self, known: Sequence[int], target: TokenSequence) -> None:
        """Does nothing: the trunk has already stored what is needed."""

    def keep(self, known: Sequence[int], count: int, tokens: Sequence[int], slot: int) -> None:
        """Does nothing: the trunk has overwritten it."""
