"""``bitmirror bench --sweep 2048-65536``: prompts and answers at growing depths of one text, of which every token is read
once."""

import argparse
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.cache.recurrent import Snapshot
from engine.cli.runs import Measurement, read_prompt, rewind
from engine.errors import UsageError
from engine.limits import IN_FLIGHT

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.speculative.params import SpeculationParams

EXAMPLES = "2048-65536, 0-65536+8192 or 2048-65536*4"

MOST_DEPTH = 1 << 30

WARM = 8
"""Tokens of the answers that warm up, but for the first, which is a whole one: steps of every size are then prepared."""

_RANGE = re.compile(r"(\d{1,12})-(\d{1,12})(?:([+*])(\d{1,12}(?:\.\d{1,6})?))?")


def depths(text: str) -> list[int]:
    """The depths of a range as llama-bench writes them: FIRST-LAST, each twice the one before; FIRST-LAST+STEP;
    FIRST-LAST*FACTOR.  The last depth is always one of them.  Raises ArgumentTypeError."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a range of depths such as {EXAMPLES}, not {text:.40}")
    first, last, kind = int(match[1]), int(match[2]), match[3] or "*"
    if kind == "+" and "." in match[4]:
        raise argparse.ArgumentTypeError(f"must have a whole number of tokens after the +, not {match[4]}")
    growth = float(match[4] or 2)
    if first > last:
        raise argparse.ArgumentTypeError(f"must begin at its lower end: {last}-{first}, not {first}-{last}")
    if last > MOST_DEPTH:
        raise argparse.ArgumentTypeError(f"must end at {MOST_DEPTH} or before, not at {last}")
    if kind == "+" and growth < 1:
        raise argparse.ArgumentTypeError("must have a step of 1 or more after the +")
    if kind == "*" and growth <= 1:
        raise argparse.ArgumentTypeError("must have a factor above 1 after the *")
    if kind == "*" and first == 0:
        raise argparse.ArgumentTypeError(
            f"cannot grow from depth 0 by a factor: begin at 1 or more, or add a step: 0-{last}+{max(1, last // 8)}"
        )
    found, depth = [], first
    while depth < last:
        found.append(depth)
        depth = depth + int(growth) if kind == "+" else max(depth + 1, math.ceil(depth * growth))
    return [*found, last]


@dataclass(frozen=True)
class Sweep:
    """At each of some depths, an answer of ``n_gen`` tokens without drafts, one with drafts if the model has a source of
    them, and a prompt of ``n_prompt``, each ``repetitions`` times.  0 tokens: no such test.

    acceptance: the share of drafts to accept, whatever the source proposes; None: those that are right.
    """

    depths: Sequence[int]
    n_prompt: int
    n_gen: int
    repetitions: int = 1
    warmup: bool = True
    acceptance: float | None = None

    @property
    def n_tokens(self) -> int:
        """The number of positions that it needs.  An answer begins with a token of the text."""
        return self.depths[-1] + max(self.n_prompt, self.n_gen + 1)

    def run(self, llm: "LLM", text: np.ndarray) -> Iterator[Measurement]:
        """The tests, in order.  text: int32, at least ``n_tokens``.  Each depth continues from the one before it, and the
        prompt that is measured is the first part of the way, so it is shorter where the next depth is nearer.

        Raises UsageError if the cache cannot forget a test: everything would have to be read again.
        """
        # Beyond the tokens of an answer, its steps in flight may have read more.
        in_flight = IN_FLIGHT * llm.model.ops.decode_rows
        most = max(self.n_gen + in_flight if self.n_gen else 0, self.n_prompt if self.repetitions > 1 else 0)
        if most > llm.cache.rewind and not llm.snapshot_bytes:
            raise UsageError(
                f"a sweep forgets up to {most} tokens after each test, and the sliding windows of this model can forget "
                f"{llm.cache.rewind}: lower -n and -p, or read more tokens of a prompt per pass (-b)"
            )
        llm.reset()
        for i, depth in enumerate(self.depths):
            read_prompt(llm, text[llm.sequence.length : depth])
            kept = llm.model.save(llm.sequence) if llm.snapshot_bytes and depth else None
            if self.n_gen:
                yield from self._answers(llm, text, depth, self.n_gen if i == 0 else min(self.n_gen, WARM), kept)
            n_prompt = min([self.n_prompt, *(following - depth for following in self.depths[i + 1 : i + 2])])
            if n_prompt:
                yield self._prompt(llm, text, depth, n_prompt, i == 0, kept)

    def _answers(
        self, llm: "LLM", text: np.ndarray, depth: int, warm: int, kept: Snapshot | None
    ) -> Iterator[Measurement]:
        """warm: tokens of the answers that warm up; kept: a snapshot of this depth."""
        from engine.speculative.params import SpeculationParams

        known = text[: depth + 1].tolist()
        answer: list[int] = []
        for drafts in (False, True) if llm.draft is not None else (False,):
            params = SpeculationParams(enabled=drafts)
            if llm.draft is not None and drafts and self.acceptance is not None:
                llm.draft.script = _script(llm, depth + 1, answer, self.acceptance)
            samples, acceptance = [], 0.0
            for n in [*([warm] if self.warmup else []), *[self.n_gen] * self.repetitions]:
                start = time.perf_counter_ns()
                answer, acceptance = _answer(llm, known, n, params)
                samples.append(time.perf_counter_ns() - start)
                rewind(llm, depth, lambda depth: text[:depth], kept)
            source = llm.draft.name if llm.draft is not None and drafts else ""
            yield Measurement(0, self.n_gen, depth, tuple(samples[-self.repetitions :]), source, acceptance)

    def _prompt(
        self, llm: "LLM", text: np.ndarray, depth: int, n_prompt: int, first: bool, kept: Snapshot | None
    ) -> Measurement:
        samples = []
        warm = self.warmup and first and (depth == 0 or n_prompt <= llm.cache.rewind or llm.snapshot_bytes > 0)
        for _ in range(self.repetitions + warm):
            rewind(llm, depth, lambda depth: text[:depth], kept)
            start = time.perf_counter_ns()
            read_prompt(llm, text[depth : depth + n_prompt])
            samples.append(time.perf_counter_ns() - start)
        return Measurement(n_prompt, 0, depth, tuple(samples[-self.repetitions :]))


def _answer(llm: "LLM", known: list[int], n: int, params: "SpeculationParams") -> tuple[list[int], float]:
    """The ``n`` likeliest tokens after ``known``, of which the cache holds all but the last, and the share of drafts that was
    kept."""
    from engine.decode.host_steps import HostSteps
    from engine.decode.request import Request
    from engine.decode.running import Running, Steps, follow
    from engine.sampling.sampler import Sampler, SamplerParams
    from engine.speculative.speculation import Speculation

    greedy = Sampler(SamplerParams(temperature=0.0, seed=0), llm.config.n_vocab)
    model = llm.model
    speculation = Speculation(params, greedy, llm.draft, llm.n_bytes_read) if params.enabled else None
    steps: Steps = llm.device_steps(greedy.params) or HostSteps(model)
    running = Running(Request(known, greedy, n, speculation), llm.sequence, steps, params)
    tokens = [token for token, _ in follow(running)]
    return tokens, speculation.statistics.acceptance if speculation is not None else 0.0


def _script(llm: "LLM", first: int, answer: Sequence[int], acceptance: float) -> np.ndarray:
    """What to propose for each position, int32 [n_ctx], so that this share of drafts is accepted: the tokens of the plain
    answer, which begins at position ``first``, or others."""
    rng = np.random.default_rng(first)
    script = np.full(llm.n_ctx, -1, np.int32)
    right = np.array(answer, np.int32)
    wrong = (right + 1) % llm.config.n_vocab
    script[first : first + right.size] = np.where(rng.random(right.size) < acceptance, right, wrong)
    return script
