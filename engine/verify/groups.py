"""A model whose layers several devices share, and the same model on one device, compared.

Whole passes are compared, as in normal use.  If one differs, both models compute the prompt again part by part, and the first
part after which the residual streams differ is named.
"""

from collections.abc import Sequence

from engine.limits import MOST_LOGITS
from engine.models.stage import Stage, StageInputs
from engine.verify.check import Check, Difference
from engine.verify.passes import passes, sizes, wide_sizes
from engine.verify.stages import StageComparison

DRAFTS = 2
"""The number of drafts that are compared."""


class GroupComparison(StageComparison):
    """The comparison of a model that several devices share with the same model on one device.  Its methods raise
    ``engine.verify.check.Difference`` at the first bit that differs."""

    equal = "The logits of the prompt were equal."

    def prompt(self) -> None:
        """Compare the logits of passes over the prompt, the cache after it, and drafts.

        The prompt is read in passes of 1 to 16 rows and in passes of many rows.
        """
        wide = wide_sizes(min(self.cpu.batch_size, self.divided.batch_size), len(self.ids))
        for how, counts in (("passes of 1 to 16 rows", sizes(len(self.ids))), ("passes of many rows", wide)):
            if counts:
                self._whole(how, counts)
                self._caches(how)
                self._drafts()

    def _whole(self, how: str, counts: Sequence[int]) -> None:
        both = self.cpu, self.divided
        for llm in both:
            llm.reset()
        for tokens, positions in passes(self.ids, counts):
            n = min(tokens.size, MOST_LOGITS)
            check = Check(
                f"logits of the last {n} rows, positions {positions[0]} to {positions[-1]}: ",
                *(llm.model.forward(tokens, positions, n, llm.sequence) for llm in both),
            )
            self._note("passes", how, check, self._part_at_fault(how, counts) if check.differing.any() else "")
            for llm in both:
                llm.sequence.commit(tokens.tolist())

    def _drafts(self) -> None:
        """Compare the logits of drafts after the prompt, if a layer of the model drafts."""
        models = [llm.model for llm in (self.cpu, self.divided)]
        position = len(self.ids)
        for number in range(min(DRAFTS, self.cpu.n_ctx - position)):
            last = self.ids[-1], position + number
            found = [m.drafter.forward(*last, m.sequence, number, DRAFTS) for m in models if m.drafter is not None]
            if found:
                check = Check(f"logits of draft {number}: ", *found)
                self._note("logits of drafts", "after the prompt", check, self.equal)

    def _part_at_fault(self, how: str, counts: Sequence[int]) -> str:
        """A sentence that names the first part of the model that makes these passes differ."""
        stages = self._parts()
        own = self._borders(stages)
        for llm in (self.cpu, self.divided):
            llm.reset()
        try:
            for tokens, positions in passes(self.ids, counts):
                self._pass(tokens, positions, how, own, stages)
        except Difference as difference:
            return f"Part by part, the first that differs is:\n{difference}"
        return "Part by part they are equal, so the passes differ as a whole, or their results change from run to run."

    def _parts(self) -> list[Stage]:
        """The parts of the model as stages."""
        model = self.divided.model
        inputs = StageInputs(model.config, model.ops, model.max_rows)
        parts = [part for part, _ in model.placement.parts(model.config)]
        return [Stage(model, inputs, [part], i == 0, i == len(parts) - 1) for i, part in enumerate(parts)]
