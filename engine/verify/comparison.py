"""Whole passes, choices of tokens and answers on the CPU and on a GPU, compared bit by bit."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from engine.arrays import Batch
from engine.cuda.backend import Backend
from engine.cuda.runtime.tensor import Tensor
from engine.decode.device_params import edits
from engine.decode.device_sampler import DeviceSampler, Rows
from engine.decode.evaluate import evaluate
from engine.limits import DECODE_ROWS, MOST_LOGITS
from engine.llm import LLM
from engine.sampling.sampler import Sampler, SamplerParams
from engine.speculative.params import SpeculationParams
from engine.verify.caches import cache_checks
from engine.verify.check import Check, Difference, Site
from engine.verify.graph import first_of_graph
from engine.verify.lockstep import Lockstep
from engine.verify.passes import in_steps_of, passes, sizes, wide_sizes
from engine.verify.tally import Tally

MOST_SAMPLED = 32
"""The number of tokens in comparisons that draw tokens at random."""

GREEDY: dict[str, Any] = {"temperature": 0.0}
NOISY: dict[str, Any] = {"temperature": 0.8}
PENALIZED: dict[str, Any] = {
    "temperature": 1.1,
    "top_k": 20,
    "top_p": 0.9,
    "repeat_penalty": 1.2,
    "frequency_penalty": 0.1,
}


class Comparison:
    """The comparison of two loaded models.  Its methods raise ``engine.verify.check.Difference`` at the first bit that
    differs."""

    def __init__(self, cpu: LLM, gpu: LLM, ids: Sequence[int], seed: int, tally: Tally) -> None:
        self.cpu, self.gpu, self.ids, self.seed, self.tally = cpu, gpu, list(ids), seed, tally
        self.sequence = list(ids)
        #: The backend of the GPU, with its methods beyond ``engine.ops.operations.Operations``.
        self._ops = cast(Backend, gpu.model.ops)

    # --- kernels -----------------------------------------------------------------------------------------------

    def kernels(self, ids: Sequence[int], note: Callable[[Site, Check], None]) -> None:
        """Compare every operation of every pass over ``ids``."""
        both = Lockstep(self.cpu.model, self.gpu.model, note)
        for _, counts in self._readings(len(ids)):
            self._reset()
            for tokens, positions in passes(ids, counts):
                both.forward(tokens, positions, min(tokens.size, DECODE_ROWS))
        if self.cpu.model.drafter is not None:
            places = range(len(ids), min(len(ids) + 2, self.cpu.n_ctx))
            for number, position in enumerate(places):
                both.draft(ids[-1], position, number, len(places))

    # --- whole passes ------------------------------------------------------------------------------------------

    def _readings(self, n: int) -> list[tuple[str, list[int]]]:
        """Ways to read n tokens on the GPU: (name, rows of each pass).  The way with few passes comes first, if possible."""
        few = wide_sizes(self.gpu.batch_size, n)
        return [*([("passes of many rows", few)] if few else []), ("passes of 1 to 16 rows", sizes(n))]

    def prompt(self) -> None:
        """Compare logits of the prompt and the cache after it.  The GPU reads the prompt in passes of many rows and in passes
        of 1 to 16 rows, the CPU in large passes."""
        self._reset()
        expected = self.cpu.logits(self.ids)
        for how, counts in self._readings(len(self.ids)):
            self.gpu.reset()
            for tokens, positions in passes(self.ids, counts):
                n_logits = min(tokens.size, MOST_LOGITS)
                logits = evaluate(self.gpu.model, tokens, positions, n_logits, self.gpu.model.sequence)
                found = expected[positions[-n_logits:]]
                self._same("logits of the prompt", how, found, logits, tokens, positions)
            self.caches()

    def caches(self) -> None:
        """Compare the keys, values and states that the next token can see."""
        for check in cache_checks(self.cpu, self.gpu):
            self.tally.whole("cache", "what is visible after the prompt", check)
            if check.differing.any():
                raise Difference(None, check, "Compare with fewer tokens (-p) to find the pass that stored it.")

    def greedy(self, n: int) -> tuple[list[int], np.ndarray]:
        """Generate n tokens, each chosen by the CPU, and compare the GPU's logits.  Returns the tokens and the logits after
        each but the last, float32 [n - 1, n_vocab]."""
        sampler = Sampler(SamplerParams(**GREEDY, logit_bias=self._no_end()), self.cpu.config.n_vocab)
        history = self.sequence = list(self.ids)
        rows = []
        logits = self.cpu.prefill(self.ids)[0]
        for step in range(n):
            history.append(sampler.sample(logits, len(history), history))
            if step == n - 1:
                break
            tokens, positions = np.array(history[-1:], np.int32), np.array([len(history) - 1], np.int32)
            logits = self.cpu.step(history[-1])
            found = evaluate(self.gpu.model, tokens, positions, 1, self.gpu.model.sequence)
            self._same("logits of greedy tokens", "a row at a time", logits[None], found, tokens, positions)
            rows.append(logits.copy())
            if self.cpu.model.drafter is not None:
                last = (history[-1], len(history))
                models = [llm.model for llm in (self.cpu, self.gpu)]
                drafted = [m.drafter.forward(*last, m.sequence, 0)[None] for m in models if m.drafter is not None]
                check = Check(f"logits of a draft after position {last[1]}: ", *drafted)
                self.tally.whole("logits of drafts", "by the layer or network that drafts", check)
                if check.differing.any():
                    raise Difference(
                        None, check, "Compare with fewer tokens (-n) to find the first draft that differs."
                    )
        return history[len(self.ids) :], np.array(rows, np.float32).reshape(-1, self.cpu.config.n_vocab)

    def rows(self, tokens: Sequence[int], expected: np.ndarray) -> None:
        """Compare passes of k rows after the prompt with single steps over the same tokens."""
        self._reset()
        for batch, positions in passes(self.ids, in_steps_of(16, len(self.ids))):
            evaluate(self.gpu.model, batch, positions, 0, self.gpu.model.sequence)
        first = len(self.ids)
        for k in range(2, min(16, expected.shape[0]) + 1):
            batch, positions = np.array(tokens[:k], np.int32), np.arange(first, first + k, dtype=np.int32)
            logits = evaluate(self.gpu.model, batch, positions, k, self.gpu.model.sequence)
            self._same(
                "k rows = k single steps",
                f"k = 2 to {min(16, expected.shape[0])}",
                expected[:k],
                logits,
                batch,
                positions,
            )
            self.gpu.sequence.truncate(first)

    def _same(
        self, what: str, how: str, expected: np.ndarray, found: np.ndarray, tokens: np.ndarray, positions: np.ndarray
    ) -> None:
        """Compare the logits of a pass; if they differ, search for the kernel that causes it."""
        check = Check(f"{what}, logits of positions {positions[0]} to {positions[-1]}: ", expected, found)
        self.tally.whole(what, how, check)
        if check.differing.any():
            raise Difference(None, check, self._search(tokens, int(positions[0])))

    def _search(self, tokens: np.ndarray, first: int) -> str:
        """A text that names the kernel that makes a pass of ``tokens`` at position ``first`` differ."""
        ops, model = self._ops, self.gpu.model
        model.sequence.truncate(first)
        self.cpu.reset()
        for batch, positions in passes(self.sequence[:first], in_steps_of(self.cpu.batch_size, first)):
            evaluate(self.cpu.model, batch, positions, 0, self.cpu.model.sequence)
        for check in cache_checks(self.cpu, self.gpu):
            if check.differing.any():
                return f"the cache that the pass begins with differs already: {check.show()}"
        positions = np.arange(first, first + tokens.size, dtype=np.int32)
        n, n_logits = tokens.size, min(tokens.size, DECODE_ROWS)
        try:
            Lockstep(self.cpu.model, model, lambda site, check: None).forward(tokens, positions, n_logits)
        except Difference as difference:
            return f"operation by operation the first that differs is:\n{difference}"
        ops.device.write(ops.tokens.address, tokens)
        ops.device.write(ops.positions.address, positions)
        ops.device.write(ops.sequences.address, np.full(n, model.sequence.slot, np.int32))
        rows = Batch(ops.tokens[:n], ops.positions[:n], ops.sequences[:n])
        return first_of_graph(ops, ops.record(lambda: cast(Tensor, model.compute(rows, n_logits))))

    # --- choosing ----------------------------------------------------------------------------------------------

    def sampling(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        """Compare tokens chosen on the device with those of the CPU's sampler, greedy and at random with penalties."""
        ops, n_vocab = self._ops, self.cpu.config.n_vocab
        machine = DeviceSampler(ops.device, n_vocab, self.gpu.n_ctx)
        for how, options in (("greedy", GREEDY), ("with noise", NOISY), ("with penalties", PENALIZED)):
            sampler = Sampler(SamplerParams(**options, seed=self.seed), n_vocab)
            machine.begin(sampler)
            for step, row in enumerate(logits[:MOST_SAMPLED]):
                history = [*self.ids, *tokens[: step + 1]]
                last = len(history) - 1
                memory = np.zeros(self.gpu.n_ctx, np.int32)
                memory[: len(history)] = history
                inputs = [np.full(DECODE_ROWS, value, np.int32) for value in (history[-1], last, 0)]
                starts, at = np.array([0, 1], np.int32), np.array([last], np.int32)
                held = [ops.upload(array) for array in (row, *inputs, starts, memory, at)]
                given, *addresses, place = (tensor.address for tensor in held)
                kind = sampler.params.greedy, edits(sampler.params)
                machine.launch(given, n_vocab, 1, Rows(*addresses), place, *kind)
                ops.device.synchronize("the choice of a token")
                self._tokens("tokens chosen on the GPU", how, [sampler.sample(row, last + 1, history)], machine.take())

    def answers(self, tokens: Sequence[int]) -> None:
        """Compare the answers of ``LLM.generate``, with and without drafts looked up in the answer itself."""
        found = self.gpu.complete(self.ids, max_tokens=len(tokens), ignore_eos=True, **GREEDY).ids
        self._tokens("answer of LLM.generate", "greedy", list(tokens), found)
        options: dict[str, Any] = {"max_tokens": min(len(tokens), MOST_SAMPLED), "ignore_eos": True, "seed": self.seed}
        for how, changes in (("with noise", NOISY), ("with penalties", PENALIZED)):
            both = [llm.complete(self.ids, **options, **changes).ids for llm in (self.cpu, self.gpu)]
            self._tokens("answer of LLM.generate", how, *both)
            drafted = self.gpu.complete(self.ids, **options, **changes, speculation=SpeculationParams(lookup=True)).ids
            self._tokens("answer of LLM.generate", f"{how} and drafts", both[0], drafted)

    def _tokens(self, what: str, how: str, expected: list[int], found: list[int]) -> None:
        check = Check.of_tokens(f"{what}, {how}: token", expected, found)
        self.tally.whole(what, how, check)
        if check.differing.any():
            raise Difference(
                None, check, "The logits were equal, so it is the choice that differs (engine/cuda/sample.py)."
            )

    def _no_end(self) -> dict[int, float]:
        tokenizer = self.cpu.tokenizer
        return dict.fromkeys(tokenizer.eog_ids | tokenizer.suppressed_ids, float("-inf"))

    def _reset(self) -> None:
        self.cpu.reset()
        self.gpu.reset()
