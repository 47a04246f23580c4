"""``python -m engine.bench``: how fast a model reads a prompt and generates, in the manner of llama-bench.

One row per test: ``pp512`` reads a prompt of 512 random tokens, ``tg128`` generates 128 tokens one at a time, and
``@ d4096`` does so after 4096 tokens that are already in the cache.  Each test runs ``-r`` times after a warm-up, and
kernels are compiled before that.  Generation is bound by memory, so its rate is also given in bytes: the weights and
the cached keys and values that one token reads, and their share of the rate of a plain read on the same device with
the same number of threads.
"""

import argparse
import csv
import gc
import io
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cli.flags import CACHE_TYPES, Parser
from engine.cli.report import Report
from engine.devices import check_batch_size, parse_device
from engine.errors import EngineError, UsageError
from engine.hub import catalog
from engine.hub.resolve import resolve
from engine.synthetic.model import make_model
from engine.synthetic.shapes import parse_shape

if TYPE_CHECKING:
    from engine.llm import LLM

# --- tests -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One test: ``n_prompt`` or ``n_gen`` tokens at depth ``n_depth``, once per entry of ``samples_ns``."""

    model: str
    model_size: int
    model_n_params: int
    backend: str
    n_threads: int
    cache_type: str
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    samples_ns: tuple[int, ...]
    bytes_per_token: float
    """Bytes of weights, keys and values that a token reads; 0 for a prompt, whose tokens share the weights they read."""
    memory_bandwidth: float
    """Bytes per second of a plain read on the same device, with the same number of threads."""
    gpu_info: str = ""
    """The name of the GPU; "" for the CPU."""

    @property
    def name(self) -> str:
        """llama-bench's name of the test, e.g. ``tg128 @ d4096``."""
        test = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return test + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second of each run."""
        return [1e9 * (self.n_prompt + self.n_gen) / ns for ns in self.samples_ns]

    @property
    def avg_ts(self) -> float:
        """Mean tokens per second."""
        return statistics.fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        """Standard deviation over the runs, 0 for one run."""
        return statistics.stdev(self.samples_ts) if len(self.samples_ns) > 1 else 0.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes that generation reads per second, at the mean rate."""
        return self.bytes_per_token * self.avg_ts

    def fields(self) -> dict[str, Any]:
        """The fields of csv and json, with llama-bench's names where it has them; times in ns, rates per second."""
        return {
            "cpu_info": cpu_name(),
            "gpu_info": self.gpu_info,
            "backend": self.backend,
            "model": self.model,
            "model_size": self.model_size,
            "model_n_params": self.model_n_params,
            "n_threads": self.n_threads,
            "cache_type": self.cache_type,
            "n_prompt": self.n_prompt,
            "n_gen": self.n_gen,
            "n_depth": self.n_depth,
            "test": self.name,
            "test_time": self.test_time,
            "avg_ns": round(statistics.fmean(self.samples_ns)),
            "stddev_ns": round(statistics.stdev(self.samples_ns)) if len(self.samples_ns) > 1 else 0,
            "avg_ts": round(self.avg_ts, 6),
            "stddev_ts": round(self.stddev_ts, 6),
            "bytes_per_token": round(self.bytes_per_token),
            "bytes_per_second": round(self.bytes_per_second),
            "memory_bandwidth": round(self.memory_bandwidth),
        }


def rewind(llm: "LLM", depth: int, tokens: Callable[[int], np.ndarray]) -> None:
    """Leave exactly ``depth`` tokens in the cache: by truncating it if that is enough, by a snapshot of that depth, or by
    filling it again."""
    snapshot = llm.snapshots.best(depth)
    if llm.cache.length >= depth and llm.cache.can_truncate(depth):
        llm.cache.truncate(depth)
    elif snapshot is not None and snapshot.length == depth:
        llm.model.restore(snapshot)
    else:
        llm.reset()
        read_prompt(llm, tokens(depth))
        if llm.slot_bytes and depth:
            llm.snapshots.add(llm.model.save())


def read_prompt(llm: "LLM", tokens: np.ndarray) -> None:
    """Read a prompt in batches; logits are computed for its last token only."""
    first, done = llm.cache.length, 0
    while done < tokens.size:
        batch = tokens[done : done + llm.model.ops.next_rows(tokens.size - done)]
        positions = np.arange(first + done, first + done + batch.size, dtype=np.int32)
        done += batch.size
        llm.model.forward(batch, positions, int(done == tokens.size))


def generate_tokens(llm: "LLM", tokens: np.ndarray) -> None:
    """Run one step per token, as in an answer: where the device chooses tokens, each step takes the token of the one before,
    else each token is one forward pass with its logits."""
    from engine.decode.sampler import Sampler, SamplingParams
    from engine.speculative.loop import follow
    from engine.speculative.params import SpeculationParams

    first = llm.cache.length
    greedy = Sampler(SamplingParams(temperature=0.0, seed=0), llm.config.n_vocab)
    if llm.can_sample(greedy):
        history = np.resize(tokens, first + 1).tolist()
        for _ in follow(llm.model.ops.steps(llm.model, greedy, SpeculationParams()), history, tokens.size, None):
            pass
        return
    for i in range(tokens.size):
        llm.model.forward(tokens[i : i + 1], np.array([first + i], np.int32), 1)


def measure(llm: "LLM", n_prompt: int, n_gen: int, depth: int, repetitions: int, warmup: bool = True) -> list[int]:
    """Nanoseconds of each run of one test; either ``n_prompt`` or ``n_gen`` is 0."""
    rng = np.random.default_rng(0)

    def tokens(n: int) -> np.ndarray:
        return rng.integers(0, llm.config.n_vocab, n, dtype=np.int32)

    run, n = (read_prompt, n_prompt) if n_prompt else (generate_tokens, n_gen)
    if warmup:
        rewind(llm, depth, tokens)
        run(llm, tokens(n if n_prompt else 1))
    samples = []
    for _ in range(repetitions):
        rewind(llm, depth, tokens)
        drawn = tokens(n)
        start = time.perf_counter_ns()
        run(llm, drawn)
        samples.append(time.perf_counter_ns() - start)
    return samples


def run_tests(args: argparse.Namespace, name: str, path: Path) -> Iterator[Result]:
    """Every test of one model file, for each number of threads in turn; on a GPU, which uses none, they run once."""
    import engine
    from engine.models import traffic as bandwidth

    tests = [(n, 0, d) for d in args.n_depth for n in args.n_prompt if n]
    tests += [(0, n, d) for d in args.n_depth for n in args.n_gen if n]
    n_ctx = max(p + g + d for p, g, d in tests)
    for n_threads in args.threads:
        report = Report()
        llm = engine.load(
            path,
            device=args.device,
            n_ctx=n_ctx,
            n_threads=n_threads,
            batch_size=args.batch_size,
            cache_type=args.cache_type,
            mtp=False,  # only plain steps are measured
            progress=report.progress,
        )
        llm.compile(report.progress)
        report.close()
        if llm.n_ctx < n_ctx:
            raise UsageError(f"{name} takes {llm.n_ctx} tokens and a test needs {n_ctx}: lower -p, -n or -d.")
        ops = llm.model.ops
        weights = llm.n_bytes_read
        for p, g, d in tests:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            samples = measure(llm, p, g, d, args.repetitions, not args.no_warmup)
            read = weights + bandwidth.cache_bytes_per_token(bandwidth.memories(llm), d, g) if g else 0.0
            yield Result(
                model=name,
                model_size=llm.n_bytes,
                model_n_params=llm.n_params,
                backend=ops.name,
                n_threads=llm.n_threads,
                cache_type=args.cache_type,
                n_prompt=p,
                n_gen=g,
                n_depth=d,
                test_time=now,
                samples_ns=tuple(samples),
                bytes_per_token=read,
                memory_bandwidth=ops.bandwidth(),
                gpu_info=ops.gpu_name,
            )
        threaded = llm.n_threads > 0
        # A GPU's memory is freed when nothing refers to it: no reference cycle may hold it while the next model is loaded.
        del llm, ops
        gc.collect()
        if not threaded:
            break


# --- output ----------------------------------------------------------------------------------------------------


def cpu_name() -> str:
    """The name of the processor, as reported by the system."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# Heading, width (negative: left-aligned) and text of each column.
_COLUMNS: tuple[tuple[str, int, Callable[[Result], str]], ...] = (
    ("model", -30, lambda r: r.model),
    ("size", 10, lambda r: _scaled(r.model_size, 1024, ("MiB", "GiB"))),
    ("params", 10, lambda r: _scaled(r.model_n_params, 1000, ("M", "B"))),
    ("backend", -7, lambda r: r.backend),
    ("threads", 7, lambda r: str(r.n_threads or "")),
    ("test", 15, lambda r: r.name),
    ("t/s", 16, lambda r: f"{r.avg_ts:.2f} ± {r.stddev_ts:.2f}"),
    ("GB/s", 7, lambda r: f"{r.bytes_per_second / 1e9:.2f}" if r.n_gen else ""),
    ("of memory", 9, lambda r: f"{r.bytes_per_second / r.memory_bandwidth:.0%}" if r.n_gen else ""),
)


def _scaled(value: float, base: int, units: tuple[str, str]) -> str:
    power, unit = (3, units[1]) if value >= base**3 else (2, units[0])
    return f"{value / base**power:.2f} {unit}"


def _cell(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)


def markdown(results: Iterable[Result]) -> Iterator[str]:
    """A table, each row as soon as its test is done, followed by an explanation of the last two columns."""
    bandwidths: dict[str, float] = {}
    for i, result in enumerate(results):
        if i == 0:
            yield "| " + " | ".join(_cell(name, width) for name, width, _ in _COLUMNS) + " |"
            yield "| " + " | ".join("-" * (abs(w) - 1) + (":" if w > 0 else "-") for _, w, _ in _COLUMNS) + " |"
        yield "| " + " | ".join(_cell(text(result), width) for _, width, text in _COLUMNS) + " |"
        if result.n_gen:
            where = result.gpu_info or f"{cpu_name()}, threads: {result.n_threads}"
            bandwidths[where] = result.memory_bandwidth
    if bandwidths:
        reads = "; ".join(f"{rate / 1e9:.1f} GB/s ({where})" for where, rate in bandwidths.items())
        yield ""
        yield "GB/s: weights, keys and values that a generated token reads; of memory: their share of what a plain sum"
        yield f"over memory reads on this machine, {reads}."


def comma_separated(results: Iterable[Result]) -> Iterator[str]:
    """A line of names, then one line per test as soon as it is done."""
    for i, result in enumerate(results):
        text = io.StringIO()
        writer = csv.DictWriter(text, list(result.fields()), quoting=csv.QUOTE_ALL, lineterminator="")
        if i == 0:
            writer.writeheader()
            text.write("\n")
        writer.writerow(result.fields())
        yield text.getvalue()


def as_json(results: Iterable[Result]) -> Iterator[str]:
    """One array with an object per test; ``samples_ns`` and ``samples_ts`` hold the runs."""
    yield json.dumps([r.fields() | {"samples_ns": r.samples_ns, "samples_ts": r.samples_ts} for r in results], indent=2)


_OUTPUTS = {"md": markdown, "csv": comma_separated, "json": as_json}

# --- command line ----------------------------------------------------------------------------------------------


def _numbers(least: int) -> Callable[[str], list[int]]:
    def numbers(text: str) -> list[int]:
        try:
            values = [int(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 128,512") from None
        if min(values) < least:
            raise argparse.ArgumentTypeError(f"{min(values)} is less than {least}")
        return values

    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m engine.bench",
        allow_abbrev=False,
        description="Measure how fast a model reads a prompt (pp) and generates (tg).",
        epilog="Lists are separated by commas, and every combination is measured. Shapes: python -m engine.synthetic.",
    )
    add = parser.add_argument
    add("-m", "--model", action="append", default=[], metavar="MODEL", help="path or name; default: the bundled model")
    add("--shape", action="append", default=[], metavar="NAME:QUANT", help="a random model, e.g. qwen3-8b:Q4_K_M")
    add("--keep", action="store_true", help="keep the files of random models in the cache, and reuse them")
    add("-p", "--n-prompt", type=_numbers(0), default=[512], metavar="N", help="prompt tokens, 0: none (512)")
    add("-n", "--n-gen", type=_numbers(0), default=[128], metavar="N", help="generated tokens, 0: none (128)")
    add("-d", "--n-depth", type=_numbers(0), default=[0], metavar="N", help="tokens already in the cache (0)")
    add("-r", "--repetitions", type=int, default=5, metavar="N", help="runs of each test (5)")
    add("-t", "--threads", type=_numbers(0), default=[0], metavar="N", help="CPU threads, 0: all cores (0)")
    add("-b", "--batch-size", type=int, default=0, metavar="N", help="prompt tokens per pass, 0: device default (0)")
    add(
        "-ct",
        "--cache-type",
        choices=CACHE_TYPES,
        default="f16",
        help="type of keys and values (f16)",
    )
    add("-dev", "--device", default="auto", metavar="NAME", help="auto, cpu, cuda, cuda:1 and so on (auto)")
    add("--no-warmup", action="store_true", help="no warm-up run")
    add("-o", "--output", choices=tuple(_OUTPUTS), default="md", help="output format (md)")
    return parser


@contextmanager
def random_model(shape: str, keep: bool) -> Iterator[tuple[str, Path]]:
    """Name and file of a random model ``NAME:QUANT``; the file is removed at the end unless ``keep`` is set."""
    name, quant = parse_shape(shape)
    folder = catalog.cache_dir() / "synthetic"
    if keep:
        path = folder / f"{name}-{quant}.gguf"
        yield f"{name} {quant}", path if path.exists() else make_model(path, name, quant)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=folder)
    except OSError as error:
        raise UsageError(
            f"No random model can be written to {folder}: {error.strerror}; set BITMIRROR_CACHE to another folder."
        ) from None
    with temporary as directory:
        yield f"{name} {quant}", make_model(Path(directory) / f"{name}-{quant}.gguf", name, quant)


def results_of(args: argparse.Namespace) -> Iterator[Result]:
    """The tests of every requested model, in order; of the bundled model if none is requested."""
    for model in args.model or ([] if args.shape else [None]):
        path = resolve(model, Report().progress)
        yield from run_tests(args, path.stem, path)
    for shape in args.shape:
        with random_model(shape, args.keep) as (name, path):
            yield from run_tests(args, name, path)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: returns 0, 2 for user errors, with one sentence on stderr, or 130 when interrupted."""
    try:
        args = _parser().parse_args(argv)
        if args.repetitions < 1:
            raise UsageError(f"-r must be at least 1, not {args.repetitions}.")
        if not any(args.n_prompt + args.n_gen):
            raise UsageError("There is nothing to measure: give -p or -n a number above 0.")
        check_batch_size(args.batch_size)
        parse_device(args.device)
        for line in _OUTPUTS[args.output](results_of(args)):
            print(line, flush=True)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
