"""``bitmirror bench``: how fast a model reads a prompt and generates, in the manner of llama-bench.

One row per test: ``pp512`` reads a prompt of 512 random tokens, ``tg128`` generates 128 tokens one at a time, and
``@ d4096`` does so after 4096 tokens that are already in the cache.  Each test runs ``-r`` times after a warm-up, and
kernels are compiled before that.  ``--sweep`` does so at growing depths of one text (``engine/cli/sweep.py``).

Generation is bound by memory, so its rate is also given in bytes: the weights and the cached keys and values that one
token reads, and their share of the rate of a plain read on the same device with the same number of threads.
"""

import argparse
import csv
import gc
import io
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from engine.checks import shown
from engine.cli import entry, llama_cpp, shared, users
from engine.cli.parser import Choice, Numbers, Parser, listed, real, whole
from engine.cli.report import Report
from engine.cli.runs import Measurement, generate_tokens, measure, read_prompt, rewind
from engine.cli.sweep import EXAMPLES, Sweep, depths
from engine.cli.terminal import printable
from engine.errors import UsageError
from engine.hub import catalog
from engine.hub.resolve import resolve
from engine.limits import MOST_PARALLEL
from engine.machine import trust
from engine.machine.cpu import cpu_name
from engine.synthetic.model import make_model
from engine.synthetic.shapes import parse_shape
from engine.version import ARITHMETIC

if TYPE_CHECKING:
    from engine.llm import LLM

R = TypeVar("R")

__all__ = ["Result", "cpu_name", "generate_tokens", "measure", "random_model", "read_prompt", "rewind"]

# --- tests -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One test: ``n_prompt`` or ``n_gen`` tokens at depth ``n_depth``, once per entry of ``samples_ns``."""

    model: str
    model_size: int
    model_n_params: int
    backend: str
    n_threads: int
    type_k: str
    type_v: str
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    samples_ns: tuple[int, ...]
    bytes_per_token: float
    """Bytes of weights, keys and values that a token reads; 0 for a prompt, whose tokens share the weights they read, and for
    an answer with drafts."""
    memory_bandwidth: float
    """Bytes per second of a plain read on the same device, with the same number of threads."""
    gpu_info: str = ""
    """The name of the GPU; "" for the CPU."""
    drafts: str = ""
    """Where the drafts of an answer came from; "" if it had none."""
    acceptance: float = 0.0
    """The share of drafts that was kept."""

    @property
    def name(self) -> str:
        """llama-bench's name of the test, e.g. ``tg128 @ d4096``, and ``tg128+mtp`` with drafts."""
        test = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        drafts = f"+{self.drafts}" if self.drafts else ""
        return test + drafts + (f" @ d{self.n_depth}" if self.n_depth else "")

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
        """The fields of a result, with llama-bench's names where it has them; times in ns, rates per second."""
        return {
            "cpu_info": cpu_name(),
            "gpu_info": self.gpu_info,
            "backend": self.backend,
            "model": self.model,
            "model_size": self.model_size,
            "model_n_params": self.model_n_params,
            "n_threads": self.n_threads,
            "type_k": self.type_k,
            "type_v": self.type_v,
            "arithmetic": ARITHMETIC,
            "n_prompt": self.n_prompt,
            "n_gen": self.n_gen,
            "n_depth": self.n_depth,
            "drafts": self.drafts,
            "acceptance": round(self.acceptance, 4),
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


def run_tests(args: argparse.Namespace, name: str, path: Path) -> Iterator[Result]:
    """Every test of one model file, for each number of threads in turn; on a GPU, which uses none, they run once."""
    from engine.models import traffic as bandwidth

    tests = [(n, 0, d) for d in args.n_depth for n in args.n_prompt if n]
    tests += [(0, n, d) for d in args.n_depth for n in args.n_gen if n]
    n_ctx = max(p + g + d for p, g, d in tests)
    sweep, text = None, _read(args.file)
    if args.sweep:
        sweep = Sweep(
            args.sweep, args.n_prompt[0], args.n_gen[0], args.repetitions, not args.no_warmup, args.acceptance
        )
        n_ctx = sweep.n_tokens
        _check_context(args, name, path, n_ctx)
    for n_threads in args.threads:
        # Elsewhere only plain steps are measured.
        llm = _load(args, path, n_ctx, n_threads, sweep is not None and not args.no_mtp)
        if llm.n_ctx < n_ctx:
            raise UsageError(
                f"the context of {name} is {llm.n_ctx} tokens and a test needs {n_ctx}: lower -p, -n or -d"
            )
        ops = llm.model.ops
        devices = llm.model.devices if llm.model.stages else [ops]
        weights = llm.n_bytes_read
        now = datetime.now(UTC)
        for test in sweep.run(llm, _tokens(args, llm, text, n_ctx)) if sweep else _plain(args, llm, tests):
            p, g, d, counts = test.n_prompt, test.n_gen, test.n_depth, test.n_gen > 0 and not test.drafts
            read = weights + bandwidth.cache_bytes_per_token(bandwidth.memories(llm), d, g) if counts else 0.0
            yield Result(
                model=name,
                model_size=llm.n_bytes,
                model_n_params=llm.n_params,
                backend="+".join(dict.fromkeys(device.name for device in reversed(devices))),
                n_threads=max(device.n_threads for device in devices) if llm.model.stages else llm.n_threads,
                type_k=llm.cache_types[0],
                type_v=llm.cache_types[1],
                n_prompt=p,
                n_gen=g,
                n_depth=d,
                test_time=now.isoformat(timespec="seconds"),
                samples_ns=test.samples_ns,
                bytes_per_token=read,
                memory_bandwidth=ops.bandwidth(),
                gpu_info=ops.gpu_name,
                drafts=test.drafts,
                acceptance=test.acceptance,
            )
            now = datetime.now(UTC)
        threaded = llm.n_threads > 0 or (bool(llm.model.stages) and any(device.n_threads for device in devices))
        # A GPU's memory is freed when nothing refers to it: no reference cycle may hold it while the next model is loaded.
        del llm, ops, devices
        gc.collect()
        if not threaded:
            break


def _load(args: argparse.Namespace, path: Path, n_ctx: int, n_threads: int, mtp: bool, parallel: int = 1) -> "LLM":
    """The model of a file, with all kernels compiled."""
    import engine

    report = Report()
    llm = engine.load(
        path,
        device=args.device,
        gpu_memory=args.gpu_memory,
        n_ctx=n_ctx,
        n_threads=n_threads,
        batch_size=args.batch_size,
        cache_type=args.cache_type,
        cache_type_k=args.cache_type_k,
        cache_type_v=args.cache_type_v,
        draft_model=args.draft_model,
        **shared.division_options(args),
        mtp=mtp,
        parallel=parallel,
        progress=report.progress,
    )
    llm.check_generates()
    llm.compile(report.progress)
    report.close()
    return llm


def _plain(args: argparse.Namespace, llm: "LLM", tests: Iterable[tuple[int, int, int]]) -> Iterator[Measurement]:
    """Tests of prompts and answers without drafts, each (tokens of a prompt, tokens of an answer, depth)."""
    for p, g, d in tests:
        yield Measurement(p, g, d, tuple(measure(llm, p, g, d, args.repetitions, not args.no_warmup)))


def _check_context(args: argparse.Namespace, name: str, path: Path, n_ctx: int) -> None:
    """Raises UsageError if a sweep leaves the context that a model was trained with."""
    from engine.gguf.file import read_gguf
    from engine.models.registry import read_config

    trained = read_config(read_gguf(path)).n_ctx_train
    if n_ctx > trained:
        last = trained - (n_ctx - args.sweep[-1])
        advice = f"end --sweep at {last} or before" if last >= args.sweep[0] else "lower --sweep, -p or -n"
        raise UsageError(f"the context of {name} is {trained} tokens and the sweep needs {n_ctx}: {advice}")


def _read(file: str | None) -> str | None:
    """The contents of the file of -f, if there is one.  Raises UsageError."""
    try:
        return None if file is None else Path(file).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8: give a text with -f") from None
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _tokens(args: argparse.Namespace, llm: "LLM", text: str | None, n_tokens: int) -> np.ndarray:
    """The tokens of a sweep, int32 [n_tokens]: those of a text, or random ones.  Raises UsageError if it is too short."""
    if args.acceptance is not None and llm.draft is None:
        raise UsageError("--acceptance is about drafts and this model makes none: give a draft model with -md")
    if text is None:
        return np.random.default_rng(0).integers(0, llm.config.n_vocab, n_tokens, dtype=np.int32)
    ids = llm.tokenize(text, special=False)
    if len(ids) < n_tokens:
        raise UsageError(
            f"{args.file} has too few tokens, {len(ids)} of the {n_tokens} that the sweep needs: give a longer text or lower "
            "--sweep"
        )
    return np.array(ids[:n_tokens], np.int32)


# --- output ----------------------------------------------------------------------------------------------------


# Heading, format (alignment and width) and text of each column.
_COLUMNS: tuple[tuple[str, str, Callable[[Result], str]], ...] = (
    ("model", "<30", lambda r: r.model),
    ("size", ">10", lambda r: _scaled(r.model_size, 1024, ("MiB", "GiB"))),
    ("params", ">10", lambda r: _scaled(r.model_n_params, 1000, ("M", "B"))),
    ("backend", "<7", lambda r: r.backend),
    ("threads", ">7", lambda r: str(r.n_threads or "")),
    ("test", ">19", lambda r: r.name),
    ("t/s", ">16", lambda r: f"{r.avg_ts:.2f} ± {r.stddev_ts:.2f}"),
    ("GB/s", ">7", lambda r: f"{r.bytes_per_second / 1e9:.2f}" if r.bytes_per_token else ""),
    ("of memory", ">9", lambda r: f"{r.bytes_per_second / r.memory_bandwidth:.0%}" if r.bytes_per_token else ""),
)


def _scaled(value: float, base: int, units: tuple[str, str]) -> str:
    power, unit = (3, units[1]) if value >= base**3 else (2, units[0])
    return f"{value / base**power:.2f} {unit}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def markdown(results: Iterable[Result]) -> Iterator[str]:
    """A table, each row as soon as its test is done, followed by an explanation of the last two columns."""
    bandwidths: dict[str, float] = {}
    for i, result in enumerate(results):
        if i == 0:
            yield _row(format(name, spec) for name, spec, _ in _COLUMNS)
            yield _row("-" * (int(spec[1:]) - 1) + (":" if spec[0] == ">" else "-") for _, spec, _ in _COLUMNS)
        yield _row(format(text(result), spec) for _, spec, text in _COLUMNS)
        if result.bytes_per_token:
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


def with_samples(result: Result) -> dict[str, Any]:
    """The fields of a test, and ``samples_ns`` and ``samples_ts`` of its runs."""
    return result.fields() | {"samples_ns": result.samples_ns, "samples_ts": result.samples_ts}


def as_json(results: Iterable[Result]) -> Iterator[str]:
    """One array with an object per test."""
    yield json.dumps([with_samples(result) for result in results], indent=2)


def json_lines(results: Iterable[Result]) -> Iterator[str]:
    """One line with an object per test, as soon as it is done."""
    for result in results:
        yield json.dumps(with_samples(result))


SQL_TABLE = "bitmirror_bench"
"""The table that ``-o sql`` fills."""

_SQL_TYPES = {str: "TEXT", int: "INTEGER", float: "REAL"}


def as_sql(results: Iterable[Result]) -> Iterator[str]:
    """SQL that creates a table, unless it exists, and inserts one row per test as soon as it is done."""
    for i, result in enumerate(results):
        fields = result.fields()
        if i == 0:
            columns = ",\n".join(f"  {name} {_SQL_TYPES[type(value)]}" for name, value in fields.items())
            yield f"CREATE TABLE IF NOT EXISTS {SQL_TABLE} (\n{columns}\n);\n"
        values = ", ".join(_literal(value) for value in fields.values())
        yield f"INSERT INTO {SQL_TABLE} ({', '.join(fields)}) VALUES ({values});"


def _literal(value: str | int | float) -> str:
    """A value as SQL writes it."""
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else repr(value)


_OUTPUTS = {"csv": comma_separated, "json": as_json, "jsonl": json_lines, "md": markdown, "sql": as_sql}

# --- command line ----------------------------------------------------------------------------------------------

USAGE = """\
%(prog)s [-m MODEL] [-p N,...] [-n N,...] [-d N,...] [flags]    a model
       %(prog)s --shape qwen3-8b:Q4_K_M [flags]                        a random model
       %(prog)s [-m MODEL] -o json > results.json                      for a program"""

DESCRIPTION = """\
Measures how fast a model reads a prompt (pp) and generates tokens (tg), like llama-bench. Numbers
separated by commas are lists: every combination is measured. One row per test goes to stdout.
--sweep measures at growing depths of one text, for a plot."""

EPILOG = """\
Exit status: 0 measured, 2 user error (one sentence on stderr says what to do), 130 interrupted by
Ctrl-C, 1 a bug. `bitmirror synthetic --list` lists the shapes of random models."""

DEVICE = """\
cpu, cuda, cuda:1 and so on, several GPUs such as cuda:0,cuda:1, or auto: the first usable GPU, or the
CPU if there is none"""


SWEEP = f"""\
measure at growing depths of one text, of which every token is read once, with and without drafts;
each depth is twice the one before, or FIRST-LAST+STEP or FIRST-LAST*FACTOR: {EXAMPLES}"""

DRAFT_MODEL = """\
a smaller model with the same vocabulary that drafts, an EAGLE-3 or DFlash network, an assistant of
Gemma 4, or the model's own layer in another file; by default the model's own layer, if its file has
one"""

USERS = """\
numbers of users who ask at the same time, each with a prompt of -p tokens and an answer of -n: how
many tokens all of them get, and how long each waits, like llama-batched-bench"""

OUTPUT = f"""\
{listed(_OUTPUTS)}: the format of the results (default md; in a sweep csv)"""


def parser(prog: str = "bitmirror bench") -> Parser:
    """The command line as an argparse parser."""
    top = Parser(
        prog,
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        foreign=llama_cpp.BENCH,
        positional="name the model with -m",
        finish=settle,
    )
    numbers: dict[str, Any] = {"metavar": "N,...", "type": Numbers()}

    group = top.add_argument_group("model")
    shared.add_model(group, repeated=True)
    add = group.add_argument
    shape = "a random model of that shape and quantization; may be repeated"
    add("--shape", action="append", default=[], metavar="NAME:QUANT", help=shape)
    add("--keep", action="store_true", help="keep the files of random models in the cache, and reuse them")
    shared.add_batch_size(group, "tokens of a prompt read per pass; 0 = the default of the device")
    shared.add_cache_types(group)
    shared.add_threads(group, several=True)
    shared.add_device(group, DEVICE)
    shared.add_division(group)

    add = top.add_argument_group("tests").add_argument
    add("-np", "--parallel", metavar="N,...", type=Numbers(), dest="users", help=USERS)
    add("-p", "--n-prompt", **numbers, default=[512], help="number of prompt tokens; 0 = no prompt test")
    add("-n", "--n-gen", **numbers, help="number of tokens to generate; 0 = no such test (default 128; in a sweep 64)")
    add("-d", "--n-depth", **numbers, help="number of tokens already in the cache (default 0)")
    add("-r", "--repetitions", type=whole(1), metavar="N", help="number of runs of each test (default 5; in a sweep 1)")
    add("--no-warmup", action="store_true", help="skip the warm-up run before the measured runs")

    group = top.add_argument_group("a sweep")
    add = group.add_argument
    add("--sweep", metavar="RANGE", type=depths, help=SWEEP)
    add("-f", "--file", metavar="FILE", help="the text to read; by default random tokens, after which drafts are too")
    shared.add_draft_model(group, DRAFT_MODEL)
    accept = real(0, 1)
    add("--acceptance", metavar="P", type=accept, help="accept this share of drafts, whatever the model drafts")

    group = top.add_argument_group("other")
    kind: dict[str, Any] = {"type": Choice(tuple(_OUTPUTS)), "metavar": "FORMAT"}
    group.add_argument("-o", "--output", **kind, help=OUTPUT)
    shared.add_other(group)
    return top


def settle(args: argparse.Namespace) -> None:
    """Combines the flags that have one meaning; raises UsageError if they contradict one another."""
    shared.settle_model(args)
    shared.settle_device(args)
    in_sweep = args.sweep is not None
    if args.users is not None:
        _settle_users(args)
    if in_sweep and args.n_depth is not None:
        raise UsageError("--sweep and -d both give depths: use only one of them")
    args.n_depth = args.n_depth or [0]
    args.n_gen = args.n_gen or [64 if in_sweep else 128]
    args.repetitions = args.repetitions or (1 if in_sweep else 5)
    args.output = args.output or ("csv" if in_sweep else "md")
    for name, value in (("-f", args.file), ("-md", args.draft_model), ("--acceptance", args.acceptance)):
        if value is not None and not in_sweep and not (args.users and name == "-md"):
            raise UsageError(f"{name} is for a sweep: add --sweep 2048-65536, for example")
    if in_sweep and len(args.n_prompt) + len(args.n_gen) > 2:
        raise UsageError("a sweep measures prompts and answers of one length: give one number with -p, and one with -n")
    if not any(args.n_prompt + args.n_gen):
        raise UsageError("there is nothing to measure: give -p or -n a number above 0")


def _settle_users(args: argparse.Namespace) -> None:
    """Checks the flags of a test with users; raises UsageError for those that it does not have."""
    given = {"--sweep": args.sweep, "-d": args.n_depth, "-r": args.repetitions}
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"-np measures users who all ask once, at the beginning of a context: leave out {name}")
    args.n_gen = args.n_gen or [128]
    if args.output == "sql":
        raise UsageError("-np has no output as sql: choose md, csv, json or jsonl with -o")
    if not all(0 < n <= MOST_PARALLEL for n in args.users):
        raise UsageError(f"the numbers of users (-np) must be 1 to {MOST_PARALLEL}")
    if not all(args.n_prompt) or min(args.n_gen) < 2:
        raise UsageError("users need a prompt (-p) of at least one token, and an answer (-n) of at least two")


def run_users(args: argparse.Namespace, name: str, path: Path) -> Iterator[users.Users]:
    """The tests with users of one model file: each number of users with each length of prompts and answers."""
    from engine.serving.memory import freeze

    n_ctx = max(args.n_prompt) + max(args.n_gen)
    llm = _load(args, path, n_ctx, args.threads[0], not args.no_mtp, max(args.users))
    freeze()  # as the server does: a garbage collection would stop all users for 0.1 s
    for n_prompt in args.n_prompt:
        for n_gen in args.n_gen:
            for n_users in args.users:
                if not args.no_warmup:
                    users.measure(llm, name, n_users, n_prompt, n_gen, llm.draft is not None)
                yield users.measure(llm, name, n_users, n_prompt, n_gen, llm.draft is not None)
    llm.close()
    gc.unfreeze()


@contextmanager
def random_model(shape: str, keep: bool) -> Iterator[tuple[str, Path]]:
    """Name and file of a random model ``NAME:QUANT``; the file is removed at the end unless ``keep`` is set."""
    name, quant = parse_shape(shape)
    folder = catalog.cache_dir() / "synthetic"
    kept = folder / f"{name}-{quant}.gguf"
    if keep and kept.exists():
        yield f"{name} {quant}", kept
        return
    try:
        trust.make(folder)  # the same folder contains compiled kernels
        temporary = None if keep else tempfile.TemporaryDirectory(dir=folder)
    except OSError as error:
        raise UsageError(
            f"no random model can be written to {folder}: {error.strerror}; set BITMIRROR_CACHE to another folder."
        ) from None
    if temporary is None:
        yield f"{name} {quant}", make_model(kept, name, quant)
        return
    with temporary as directory:
        yield f"{name} {quant}", make_model(Path(directory) / f"{name}-{quant}.gguf", name, quant)


def results_of(args: argparse.Namespace, tests: Callable[[argparse.Namespace, str, Path], Iterator[R]]) -> Iterator[R]:
    """The results of ``tests`` of every requested model, in order; of the bundled model if none is requested."""
    for model in args.model or ([] if args.shape else [None]):
        path = resolve(model, Report().progress)
        yield from tests(args, shown(path.stem), path)
    for shape in args.shape:
        with random_model(shape, args.keep) as (name, path):
            yield from tests(args, name, path)


def run(args: argparse.Namespace) -> int:
    """Measures what the flags request and prints the results.  Returns the exit status.  Raises EngineError."""
    shown = args.output == "md" or sys.stdout.isatty()
    if args.users:
        lines = users.OUTPUTS[args.output](results_of(args, run_users))
    else:
        lines = _OUTPUTS[args.output](results_of(args, run_tests))
    for line in lines:
        print(printable(line) if shown else line, flush=True)  # a name from a file may hold control characters
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr."""
    return entry.main(parser, run, argv, memory="lower -p, -n or -d, or choose a smaller model")


if __name__ == "__main__":
    entry.program(main)
