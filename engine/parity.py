"""``python -m engine.parity MODEL``: does this model give the same bits on the GPU as on the CPU?

Three questions, each answered by counting bits that differ:

* every kernel: the prompt is read operation by operation on both (``engine/verify/lockstep.py``), in passes of 1 to 16 rows, and in
  few passes of many;
* whole passes, as they run in use: the logits of the prompt, the cache it leaves, the logits of greedy tokens, passes of k
  rows against k single steps, tokens chosen on the device against the CPU's sampler, and answers of ``LLM.generate``;
* where a whole pass differs although every kernel is right by itself: which launch of the captured graph is the first.
"""

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from engine.arrays import Pass
from engine.cli.flags import CACHE_TYPES, Document, Parser, whole
from engine.devices import check_batch_size, parse_device
from engine.errors import EngineError, UsageError
from engine.limits import STEP_ROWS
from engine.verify.tally import Tally

if TYPE_CHECKING:
    from engine.cli.report import Report
    from engine.cuda.backend import Backend
    from engine.cuda.runtime.tensor import Tensor
    from engine.llm import LLM
    from engine.verify.lockstep import Check

DESCRIPTION = """\
Runs a model on the CPU and on a GPU and compares every bit: of each kernel's output, of the
logits of a prompt and of greedy tokens, of the key-value cache, of passes of 1 to 16 rows and of
as many as a prompt is read in."""

EPILOG = """\
Exit status: 0 all bits equal, 1 some differ (the first kernel is named, with both values),
2 something to mend (one sentence on stderr says what)."""

MOST_SAMPLED = 32
"""Tokens of the comparisons that draw tokens with noise."""

GREEDY: dict[str, Any] = {"temperature": 0.0}
NOISY: dict[str, Any] = {"temperature": 0.8}
PENALIZED: dict[str, Any] = {
    "temperature": 1.1,
    "top_k": 20,
    "top_p": 0.9,
    "repeat_penalty": 1.2,
    "frequency_penalty": 0.1,
}


def parser() -> Parser:
    """The command line."""
    top = Parser(
        prog="python -m engine.parity",
        usage="python -m engine.parity [-m] MODEL [flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Document,
        allow_abbrev=False,
    )
    add = top.add_argument
    add("-m", "--model", default="", metavar="MODEL", help="path or name; the bundled one if left out")
    add("-p", "--n-prompt", type=whole, default=200, metavar="N", help="random tokens of the prompt")
    add("-n", "--n-gen", type=whole, default=200, metavar="N", help="greedy tokens")
    add("--text", metavar="TEXT", help="read this text instead of random tokens")
    add("-c", "--ctx-size", type=whole, default=0, metavar="N", help="context, 0: as much as is needed")
    add("-b", "--batch-size", type=whole, default=0, metavar="N", help="rows of the largest pass, 0: the GPU's own")
    add("-ct", "--cache-type", choices=CACHE_TYPES, default="f16", help="type of keys and values")
    add("-s", "--seed", type=whole, default=0, metavar="N", help="of the prompt's tokens and of sampling")
    add("-t", "--threads", type=whole, default=0, metavar="N", help="CPU threads, 0: all cores")
    add("--device", default="cuda", metavar="DEVICE", help="the GPU: cuda, cuda:1 and so on")
    add("-v", "--verbose", action="store_true", help="a line per layer, and the traceback of an error")
    return top


def sizes(n: int) -> list[int]:
    """Row counts of the passes that read n tokens: 16, 1, 15, 2, ... until all have been, and over again."""
    counts = [k for pair in zip(range(16, 8, -1), range(1, 9), strict=True) for k in pair]
    found: list[int] = []
    while sum(found) < n:
        found.append(min(counts[len(found) % 16], n - sum(found)))
    return found


def wide_sizes(most: int, n: int) -> list[int]:
    """Row counts of passes of at most ``most`` rows that read n tokens: a long one, one just beyond a step, and the rest;
    nothing where no pass has more rows than a step."""
    if min(most, n) <= STEP_ROWS:
        return []
    first = min(most, max(STEP_ROWS + 1, 3 * n // 5))
    second = min(STEP_ROWS + 1, most, n - first)
    return [count for count in (first, second, *in_steps_of(most, n - first - second)) if count]


def in_steps_of(most: int, n: int) -> list[int]:
    """Row counts of the fewest passes that read n tokens."""
    return [min(most, n - first) for first in range(0, n, most)]


class Comparison:
    """Two loaded models and what has been compared so far.  Methods raise ``lockstep.Difference`` at the first bit."""

    def __init__(self, cpu: "LLM", gpu: "LLM", ids: Sequence[int], seed: int, tally: Tally) -> None:
        self.cpu, self.gpu, self.ids, self.seed, self.tally = cpu, gpu, list(ids), seed, tally
        self.sequence = list(ids)
        #: The backend of the GPU, with what it has beside ``engine.ops.Operations``.
        self._ops = cast("Backend", gpu.model.ops)

    # --- kernels -----------------------------------------------------------------------------------------------

    def kernels(self, ids: Sequence[int], note: Callable[[Any, Any], None]) -> None:
        """Every operation of every pass over ``ids``."""
        from engine.verify.lockstep import Lockstep

        both = Lockstep(self.cpu.model, self.gpu.model, note)
        for _, counts in self._readings(len(ids)):
            self._reset()
            for tokens, positions in passes(ids, counts):
                both.forward(tokens, positions, min(tokens.size, STEP_ROWS))
        if self.cpu.model.mtp is not None:
            for position in range(len(ids), min(len(ids) + 2, self.cpu.n_ctx)):
                both.draft(ids[-1], position)

    # --- whole passes ------------------------------------------------------------------------------------------

    def _readings(self, n: int) -> list[tuple[str, list[int]]]:
        """Ways to read n tokens on the GPU, each with the rows of its passes; that of few passes, if it can be, first."""
        few = wide_sizes(self.gpu.batch_size, n)
        return [*([("passes of many rows", few)] if few else []), ("passes of 1 to 16 rows", sizes(n))]

    def prompt(self) -> None:
        """Logits of rows of the prompt, and the cache it leaves: the GPU in passes of many rows, and of 1 to 16, the CPU in
        large ones."""
        from engine.llm import MOST_LOGITS

        self._reset()
        expected = self.cpu.logits(self.ids)
        for how, counts in self._readings(len(self.ids)):
            self.gpu.reset()
            for tokens, positions in passes(self.ids, counts):
                n_logits = min(tokens.size, MOST_LOGITS)
                logits = self.gpu.model.forward(tokens, positions, n_logits)
                found = expected[positions[-n_logits:]]
                self._same("logits of the prompt", how, found, logits, tokens, positions)
            self.caches()

    def caches(self) -> None:
        """Keys, values and states that the next token could see."""
        from engine.verify.lockstep import Difference

        for check in self._cache_checks():
            self.tally.whole("cache", "what is visible after the prompt", check)
            if check.differing.any():
                raise Difference(None, check, "Compare with fewer tokens (-p) to find the pass that stored it.")

    def _cache_checks(self) -> "Iterator[Check]":
        from engine.cache.recurrent import RecurrentLayer
        from engine.verify.layout import cached, remembered
        from engine.verify.lockstep import Check

        download = self.gpu.model.ops.download
        both = (remembered(llm.model.ops, llm.model, self.gpu.cache.length) for llm in (self.cpu, self.gpu))
        for (what, mine), (_, theirs) in zip(*both, strict=True):
            yield Check(f"{what}: ", mine, theirs)
        for il, (a, b) in enumerate(zip(self.cpu.cache.layers, self.gpu.cache.layers, strict=True)):
            if isinstance(a, RecurrentLayer):
                continue
            rings = (a, replace(b, keys=download(b.keys), values=download(b.values)))
            arrays = [cached(ring, self.gpu.cache.length) for ring in rings]
            for what, mine, theirs in zip(("keys", "values"), *arrays, strict=True):
                yield Check(f"{what} of layer {il}, among the visible positions", mine, theirs)

    def greedy(self, n: int) -> tuple[list[int], np.ndarray]:
        """n tokens, each the CPU's choice: (tokens, the logits after each but the last), after checking the GPU's logits."""
        from engine.decode.sampler import Sampler, SamplingParams
        from engine.verify.lockstep import Check, Difference

        sampler = Sampler(SamplingParams(**GREEDY, logit_bias=self._no_end()), self.cpu.config.n_vocab)
        history = self.sequence = list(self.ids)
        rows = []
        logits = self.cpu.prefill(self.ids)[0]
        for step in range(n):
            history.append(sampler.sample(logits, len(history), history))
            if step == n - 1:
                break
            tokens, positions = np.array(history[-1:], np.int32), np.array([len(history) - 1], np.int32)
            logits = self.cpu.step(history[-1])
            found = self.gpu.model.forward(tokens, positions, 1)
            self._same("logits of greedy tokens", "a row at a time", logits[None], found, tokens, positions)
            rows.append(logits.copy())
            if self.cpu.model.mtp is not None:
                last = (history[-1], len(history))
                drafters = [llm.model.mtp for llm in (self.cpu, self.gpu)]
                drafted = [drafter.forward(*last)[None] for drafter in drafters if drafter is not None]
                check = Check(f"logits of a draft after position {last[1]}: ", *drafted)
                self.tally.whole("logits of drafts", "by the model's own layer", check)
                if check.differing.any():
                    raise Difference(
                        None, check, "Compare with fewer tokens (-n) to find the first draft that differs."
                    )
        return history[len(self.ids) :], np.array(rows, np.float32).reshape(-1, self.cpu.config.n_vocab)

    def rows(self, tokens: Sequence[int], expected: np.ndarray) -> None:
        """Passes of k rows after the prompt against the same tokens one by one."""
        self._reset()
        for batch, positions in passes(self.ids, in_steps_of(16, len(self.ids))):
            self.gpu.model.forward(batch, positions, 0)
        first = len(self.ids)
        for k in range(2, min(16, expected.shape[0]) + 1):
            batch, positions = np.array(tokens[:k], np.int32), np.arange(first, first + k, dtype=np.int32)
            logits = self.gpu.model.forward(batch, positions, k)
            self._same(
                "k rows = k single steps",
                f"k = 2 to {min(16, expected.shape[0])}",
                expected[:k],
                logits,
                batch,
                positions,
            )
            self.gpu.cache.truncate(first)

    def _same(
        self, what: str, how: str, expected: np.ndarray, found: np.ndarray, tokens: np.ndarray, positions: np.ndarray
    ) -> None:
        """Compares the logits of a pass, and where they differ looks for the kernel."""
        from engine.verify.lockstep import Check, Difference

        check = Check(f"{what}, logits of positions {positions[0]} to {positions[-1]}: ", expected, found)
        self.tally.whole(what, how, check)
        if check.differing.any():
            raise Difference(None, check, self._search(tokens, int(positions[0])))

    def _search(self, tokens: np.ndarray, first: int) -> str:
        """Which kernel makes a pass of ``tokens`` at position ``first`` differ."""
        from engine.verify.lockstep import Difference, Lockstep

        ops, model = self._ops, self.gpu.model
        model.cache.truncate(first)
        self.cpu.reset()
        for batch, positions in passes(self.sequence[:first], in_steps_of(self.cpu.batch_size, first)):
            self.cpu.model.forward(batch, positions, 0)
        for check in self._cache_checks():
            if check.differing.any():
                return f"the cache that the pass begins with differs already: {check.show()}"
        positions = np.arange(first, first + tokens.size, dtype=np.int32)
        n, n_logits = tokens.size, min(tokens.size, STEP_ROWS)
        try:
            Lockstep(self.cpu.model, model, lambda site, check: None).forward(tokens, positions, n_logits)
        except Difference as difference:
            return f"operation by operation the first that differs is:\n{difference}"
        ops.device.write(ops.tokens.address, tokens)
        ops.device.write(ops.positions.address, positions)
        rows = Pass(ops.tokens[:n], ops.positions[:n])
        return first_of_graph(ops, ops.record(lambda: cast("Tensor", model.compute(rows, n_logits))))

    # --- choosing ----------------------------------------------------------------------------------------------

    def sampling(self, tokens: Sequence[int], logits: np.ndarray) -> None:
        """Tokens chosen on the device, without and with noise and penalties, against those of the CPU's sampler."""
        from engine.cuda.accept import MOST_ROWS
        from engine.cuda.sample import DeviceSampler, edits
        from engine.decode.sampler import Sampler, SamplingParams

        ops, n_vocab = self._ops, self.cpu.config.n_vocab
        machine = DeviceSampler(ops.device, n_vocab, self.gpu.n_ctx)
        for how, options in (("greedy", GREEDY), ("with noise", NOISY), ("with penalties", PENALIZED)):
            sampler = Sampler(SamplingParams(**options, seed=self.seed), n_vocab)
            machine.begin(sampler)
            for step, row in enumerate(logits[:MOST_SAMPLED]):
                history = [*self.ids, *tokens[: step + 1]]
                last = len(history) - 1
                memory = np.zeros(self.gpu.n_ctx, np.int32)
                memory[: len(history)] = history
                inputs = [np.full(MOST_ROWS, value, np.int32) for value in (history[-1], last)]
                held = [ops.upload(array) for array in (row, *inputs, memory)]
                given, token, position, past = (tensor.address for tensor in held)
                machine.launch(given, n_vocab, 1, token, position, past, sampler.params.greedy, edits(sampler.params))
                ops.device.synchronize("the choice of a token")
                self._tokens("tokens chosen on the GPU", how, [sampler.sample(row, last + 1, history)], machine.take())

    def answers(self, tokens: Sequence[int]) -> None:
        """What ``LLM.generate`` answers, also with drafts looked up in the answer itself."""
        from engine.speculative.params import SpeculationParams

        found = self.gpu.complete(self.ids, max_tokens=len(tokens), ignore_eos=True, **GREEDY).ids
        self._tokens("answer of LLM.generate", "greedy", list(tokens), found)
        options = {"max_tokens": min(len(tokens), MOST_SAMPLED), "ignore_eos": True, "seed": self.seed}
        for how, changes in (("with noise", NOISY), ("with penalties", PENALIZED)):
            both = [llm.complete(self.ids, **options, **changes).ids for llm in (self.cpu, self.gpu)]
            self._tokens("answer of LLM.generate", how, *both)
            drafted = self.gpu.complete(self.ids, **options, **changes, speculation=SpeculationParams(lookup=True)).ids
            self._tokens("answer of LLM.generate", f"{how} and drafts", both[0], drafted)

    def _tokens(self, what: str, how: str, expected: list[int], found: list[int]) -> None:
        from engine.verify.lockstep import Check, Difference

        n = max(len(expected), len(found))
        a, b = (np.array(ids + [-1] * (n - len(ids)), np.int32) for ids in (expected, found))
        check = Check(f"{what}, {how}: token", a, b)
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


def passes(ids: Sequence[int], counts: Sequence[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens, positions) of passes of so many rows, from position 0 on."""
    first = 0
    for count in counts:
        yield np.array(ids[first : first + count], np.int32), np.arange(first, first + count, dtype=np.int32)
        first += count


def first_of_graph(ops: Any, plan: Any) -> str:
    """Which launch of a pass writes something else in a captured graph than when each waits for the one before it."""
    from engine.cuda.runtime.tensor import Plan
    from engine.verify.lockstep import Check, Difference, Site

    alone = []
    for launch in plan.launches:
        ops.device.launch(launch.kernel, launch.grid, launch.block, launch.arguments)
        ops.device.synchronize(f"the kernel {launch.kernel.name}")
        alone.append([ops.download(out) for out in launch.outputs])

    def checks(n: int) -> list[Check]:
        """Of the last of the first n + 1 launches, captured and run."""
        part = Plan(plan.launches[: n + 1], None)
        ops.capture(part)
        assert part.graph
        part.graph.launch()
        found = [ops.download(out) for out in plan.launches[n].outputs]
        pairs = zip(alone[n], found, strict=True)
        return [Check("output, alone (CPU) and in the graph (GPU): ", a, b) for a, b in pairs]

    low, high = 0, len(plan.launches) - 1
    if not any(check.differing.any() for check in checks(high)):
        return (
            "operation by operation every kernel is right, and so is the same pass when it is captured again: "
            "the result changes from run to run."
        )
    while low < high:
        middle = (low + high) // 2
        if any(check.differing.any() for check in checks(middle)):
            high = middle
        else:
            low = middle + 1
    kernel = plan.launches[high].kernel
    site = Site(None, f"launch {high + 1} of {len(plan.launches)}", "", kernel.kernel.name, kernel.name)
    wrong = [check for check in checks(high) if check.differing.any()]
    shown = str(Difference(site, wrong[0], "")) if wrong else f"{site}: different in one of two runs."
    return (
        "operation by operation every kernel is right; run as a graph, where a kernel begins before the one before it has "
        f"ended, the first that differs is:\n{shown}"
    )


# --- command line ----------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """The comparison that the flags ask for: 0 or 1.  Raises EngineError for what the user can mend."""
    if args.n_prompt < 1 or args.n_gen < 0:
        raise UsageError(f"-p must be at least 1 and -n at least 0, not {args.n_prompt} and {args.n_gen}.")
    check_batch_size(args.batch_size)
    index = parse_device(args.device)
    if index is None:
        raise UsageError(f"--device is the GPU to compare with the CPU, such as cuda or cuda:1, not {args.device!r}.")
    args.device = f"cuda:{index}"
    import engine

    load = engine.load  # before any kernel is imported: this chooses the folder where compiled ones are kept
    from engine.cli.report import Report
    from engine.devices import open_device

    open_device(args.device)  # that there is no GPU is told before a model is read
    with Report(args.verbose) as report:
        return compare(args, load, report)


def compare(args: argparse.Namespace, load: Callable[..., "LLM"], report: "Report") -> int:
    """Loads both models and compares them; prints as it goes."""
    from engine.gguf.file import read_gguf
    from engine.hub.resolve import resolve
    from engine.limits import MOST_DRAFTS
    from engine.models.read_config import read_config
    from engine.text.tokenizer import Tokenizer
    from engine.verify.lockstep import Difference

    path = resolve(args.model, report.progress)
    gguf = read_gguf(path)
    if args.text is not None:
        ids = Tokenizer.from_gguf(gguf).encode(args.text, add_special=True, parse_special=True)
    else:
        n_vocab = read_config(gguf).n_vocab
        ids = np.random.default_rng(args.seed).integers(0, n_vocab, args.n_prompt).tolist()
    needed = len(ids) + args.n_gen
    if args.ctx_size and args.ctx_size < needed:
        raise UsageError(f"{len(ids)} tokens of prompt and {args.n_gen} more need a context of {needed} (-c).")
    options: dict[str, Any] = {
        "n_ctx": args.ctx_size or needed,
        "cache_type": args.cache_type,
        "draft_max": MOST_DRAFTS,  # so that a state from before any pass is still there after it
        "progress": report.progress,
    }
    gpu = load(path, device=args.device, batch_size=args.batch_size, **options)
    # Both can make the same passes.
    cpu = load(path, device="cpu", n_threads=max(args.threads, 0), batch_size=gpu.batch_size, **options)
    for llm in (gpu, cpu):
        llm.compile(report.progress)
    config = cpu.config
    size = f"{config.n_layer} layers, {args.cache_type} cache, {len(ids)} + {args.n_gen} tokens"
    print(f"{path.name}: {config.architecture}, {size}")
    print(f"CPU, {cpu.n_threads} threads, and {gpu.model.ops.label}\n", flush=True)

    tally = Tally(args.verbose)
    both = Comparison(cpu, gpu, ids, args.seed, tally)
    error = None
    try:
        report.line("every operation on both devices ...")
        both.kernels(ids, tally.note)
        report.line("the prompt in whole passes ...")
        both.prompt()
        if args.n_gen:
            report.line("greedy tokens ...")
            tokens, logits = both.greedy(args.n_gen)
            both.rows(tokens, logits)
            both.sampling(tokens, logits)
            report.line("answers ...")
            both.answers(tokens)
    except Difference as difference:
        error = difference
    for line in tally.table():
        print(line)
    if error:
        print(f"\nDIFFERENT: {error}")
        return 1
    print(f"\nall {tally.values} values compared are equal, bit for bit.")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """One command line; every expected failure is one sentence on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "-m")
    try:
        return run(parser().parse_args(words))
    except KeyboardInterrupt:
        return 130
    except EngineError as error:
        if {"-v", "--verbose"} & set(words):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
    except MemoryError:
        print("error: not enough memory: choose fewer tokens (-p, -n) or a smaller model.", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or ''} {error.strerror or error}".replace("  ", " "), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
