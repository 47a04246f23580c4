"""A divided model and the same model on the CPU, compared after each stage.

Both models compute a pass in stages with the same borders.  Each continues with its own residual stream, so the first stage
after which the streams differ is at fault.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.arrays import Batch, Role
from engine.llm import LLM
from engine.models.stage import Stage, StageInputs
from engine.speculative.params import SpeculationParams
from engine.verify.caches import cache_checks
from engine.verify.check import Check, Difference
from engine.verify.passes import passes, sizes, wide_sizes
from engine.verify.tally import Tally


class StageComparison:
    """The comparison of a divided model with the same model on the CPU.  Its methods raise
    ``engine.verify.check.Difference`` at the first bit that differs."""

    equal = "The residual streams of the prompt were equal."
    """What is known when answers differ."""

    def __init__(self, cpu: LLM, divided: LLM, ids: Sequence[int], seed: int, tally: Tally) -> None:
        """ids: the tokens of the prompt."""
        self.cpu, self.divided, self.ids, self.seed, self.tally = cpu, divided, list(ids), seed, tally
        model = cpu.model
        self._inputs = StageInputs(model.config, model.ops, model.max_rows)
        several = all(ops.name == "cpu" for ops in divided.model.devices)
        self._devices = ("one device", "several devices") if several else ("CPU", "GPU")

    def prompt(self) -> None:
        """Compare the residual stream after each stage of passes over the prompt, the logits, and the cache after it.

        The prompt is read in passes of 1 to 16 rows, stage by stage and in one recording, and in passes of many rows, with
        the weights where they are and with weights that are copied to the GPU.
        """
        model: Any = self.divided.model
        wide = wide_sizes(min(self.cpu.batch_size, self.divided.batch_size), len(self.ids))
        ways = [("passes of 1 to 16 rows", sizes(len(self.ids)), model.stages)]
        if model.joint is not None:
            ways.append(("passes of 1 to 16 rows, one recording", sizes(len(self.ids)), [model.joint]))
        if wide:
            ways.append(("passes of many rows", wide, model.stages))
            if model.streaming is not None:
                ways.append(("passes of many rows, copied weights", wide, model.streaming.stages))
        for how, counts, stages in ways:
            self.cpu.reset()
            self.divided.reset()
            own = self._borders(stages)
            for tokens, positions in passes(self.ids, counts):
                self._pass(tokens, positions, how, own, stages)
            self._caches(how)
        if model.relay is not None:
            for how, counts in (("passes of 1 to 16 rows", sizes(len(self.ids))), ("passes of many rows", wide)):
                self._without_the_host(f"{how}, from device to device", counts)

    def _without_the_host(self, how: str, counts: Sequence[int]) -> None:
        """Compare passes whose rows go from one device to the next, as in normal use."""
        if not counts:
            return
        both = self.cpu, self.divided
        for llm in both:
            llm.reset()
        for tokens, positions in passes(self.ids, counts):
            logits = [llm.model.forward(tokens, positions, 1, llm.sequence) for llm in both]
            where = f"logits of the last row, positions {positions[0]} to {positions[-1]}: "
            verdict = "The stages were equal one by one, so a copy between two devices is at fault."
            self._note("passes", how, Check(where, *logits), verdict)
            for llm in both:
                llm.sequence.commit(tokens.tolist())
        self._caches(how)

    def _caches(self, how: str) -> None:
        for check in cache_checks(self.cpu, self.divided):
            self._note("cache", how, check, "Compare with fewer tokens (-p) to find the pass that stored it.")

    def answers(self, n: int) -> None:
        """Compare answers of n tokens, greedy and at random, with and without drafts looked up in the answer itself."""
        options: dict[str, Any] = {"max_tokens": n, "ignore_eos": True, "seed": self.seed}
        for how, temperature in (("greedy", 0.0), ("with noise", 0.8)):
            expected = self.cpu.complete(self.ids, **options, temperature=temperature).ids
            for more, speculation in (("", SpeculationParams()), (" and drafts", SpeculationParams(lookup=True))):
                found = self.divided.complete(self.ids, **options, temperature=temperature, speculation=speculation).ids
                check = Check.of_tokens(f"answer, {how}{more}: token", expected, found)
                self._note("answer of LLM.generate", how + more, check, self.equal)

    def _borders(self, stages: Sequence[Stage]) -> list[Stage]:
        """Stages of the CPU with the borders of others."""
        ends = [(i == 0, stage.is_last) for i, stage in enumerate(stages)]
        pairs = zip(stages, ends, strict=True)
        return [Stage(self.cpu.model, self._inputs, stage.parts, *end) for stage, end in pairs]

    def _pass(
        self, tokens: np.ndarray, positions: np.ndarray, how: str, own: Sequence[Stage], theirs: Sequence[Stage]
    ) -> None:
        role = Role.DECODE if tokens.size <= self.cpu.model.ops.decode_rows else Role.PREFILL
        both = []
        for llm, stages in ((self.cpu, own), (self.divided, theirs)):
            llm.model.prepare(int(positions[0]), tokens.size, llm.sequence)
            batch = Batch(tokens, positions, np.zeros(tokens.size, np.int32), role=role)
            both.append(llm.model.staged_pass(batch, 1, stages))
        for stage in theirs:
            found = []
            for each in both:
                each.advance(1)
                assert each.result is not None
                found.append(each.result)
            what = "logits of the last row" if stage.is_last else "the residual stream"
            where = f"{what} after {stage}, positions {positions[0]} to {positions[-1]}: "
            self._note(f"stages on {stage.ops.name}", how, Check(where, *found), f"The stage at fault: {stage}.")
        for llm in (self.cpu, self.divided):
            llm.sequence.commit(tokens.tolist())

    def _note(self, what: str, how: str, check: Check, verdict: str) -> None:
        self.tally.whole(what, how, check)
        if check.differing.any():
            raise Difference(None, replace(check, devices=self._devices), verdict)
