"""``bitmirror parity MODEL``: does this model give the same bits on the GPU as on the CPU?

The tool counts the bits that differ, in three comparisons:

* every kernel: the prompt is read operation by operation on both devices (``engine/verify/lockstep.py``), in passes of 1 to
  16 rows, and in a few passes of many rows;
* whole passes, as in normal use: the logits of the prompt, the cache after it, the logits of greedy tokens, passes of k
  rows against k single steps, tokens chosen on the device against the CPU's sampler, and answers of ``LLM.generate``;
* if a whole pass differs although every kernel is correct by itself: the first launch of the captured graph that differs.

A model that is divided between the GPU and the CPU (-ngl, -ncmoe, -ot, or because it is too large), or between several GPUs,
is compared with the CPU after each stage (``engine/verify/stages.py``), and so are its cache and its answers.  If several
devices share its layers (-sm tensor), whole passes are compared (``engine/verify/groups.py``).

With --device cpu,cpu, the devices are backends of the CPU.  So both divisions are compared with one device, without a GPU.
"""

import argparse
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from engine.checks import shown
from engine.cli import entry, shared
from engine.cli.parser import Parser, filled, whole
from engine.devices import parse_device, parse_devices
from engine.errors import DeviceError, UsageError
from engine.limits import MOST_DRAFTS
from engine.version import ARITHMETIC

if TYPE_CHECKING:
    from engine.cli.report import Report
    from engine.cuda.backend import Backend
    from engine.llm import LLM
    from engine.verify.check import Difference
    from engine.verify.report import ReportFile
    from engine.verify.tally import Tally

DESCRIPTION = """\
Runs a model on the CPU and on a GPU and compares every bit: of each kernel's output, of the
logits of a prompt and of greedy tokens, of the key-value cache, of passes of 1 to 16 rows and of
the largest passes that read a prompt. A model that is divided between the GPU and the CPU is
compared with the CPU after each run of layers on one device. Without a GPU, --device cpu,cpu
compares a model that is divided between several devices on the CPU with one device."""

USAGE = """\
%(prog)s [MODEL] [flags]                          all kernels and whole passes
       %(prog)s MODEL --text "def add(a, b):" [flags]    with this prompt, not random tokens
       %(prog)s MODEL -p 16 -n 0 [flags]                 a short prompt and no answer"""

EPILOG = """\
Exit status: 0 all bits equal, 1 some differ (the first kernel is named, with both values) or a bug,
2 user error (one sentence on stderr says what to do), 130 interrupted by Ctrl-C."""

REPORT = """\
write what was compared to FILE, in JSON, with the names of the GPU and the CPU and all versions; an
existing report of this machine gets one more model. It has nothing about you: no path, no text"""


def parser(prog: str = "bitmirror parity") -> Parser:
    """The command line as an argparse parser."""
    top = Parser(
        prog,
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        positional="there is one MODEL",
        finish=settle,
    )
    group = top.add_argument_group("model")
    top.add_positional(
        "name",
        metavar="MODEL",
        type=filled("leave it out for the bundled model"),
        help="the model, as with -m",
        group=group,
    )
    shared.add_model(group)
    shared.add_network(group, "an EAGLE-3 or DFlash network, or a layer of the model, whose drafts are compared, too")
    shared.add_context(group, "context in tokens; 0 = as many as needed")
    shared.add_batch_size(group, "rows of the largest pass; 0 = as many as the GPU takes")
    shared.add_cache_types(group, separate=False)
    shared.add_ds4_rounding(group)
    shared.add_threads(group)
    devices = "the GPU: cuda, cuda:1 and so on, or several: cuda:0,cuda:1, or cpu,cpu without a GPU"
    shared.add_device(group, devices, default="cuda")
    shared.add_division(group)

    add = top.add_argument_group("comparison").add_argument
    add("-p", "--n-prompt", type=whole(1), default=200, metavar="N", help="number of random tokens of the prompt")
    add("--text", metavar="TEXT", help="read this text instead of random tokens")
    add("-n", "--n-gen", type=whole(0), default=200, metavar="N", help="number of greedy tokens")
    seed = "seed of the prompt's tokens and of sampling"
    add("-s", "--seed", type=whole(0, 2**64 - 1), default=0, metavar="N", help=seed)

    group = top.add_argument_group("other")
    group.add_argument("--report", metavar="FILE", type=filled("name a file"), help=REPORT)
    shared.add_other(group, "print a line per layer, and show the traceback of an error")
    return top


def settle(args: argparse.Namespace) -> None:
    """Combines the flags that have one meaning; raises UsageError if they contradict one another."""
    if args.name is not None:
        if args.model is not None:
            raise UsageError("MODEL and -m are both given: use only one of them")
        args.model = args.name
    shared.settle_model(args)
    if args.device == "simulator":
        raise UsageError(
            "the simulator compares a small model only, in a checkout: run python -m tests.cuda.simulated.parity"
        )
    numbers = [parse_device(name) for name in parse_devices(args.device)]
    if len(numbers) > 1 and numbers[0] is None:
        if args.report is not None:
            raise UsageError("--report describes a GPU: leave it out, or name one with --device")
        return
    if None in numbers:
        raise UsageError(f"--device is the GPU to compare with the CPU, such as cuda or cuda:1, not {args.device!r}")
    args.device = ",".join(f"cuda:{index}" for index in numbers)


# --- command line ----------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Run the comparison that the flags describe.  Returns 0 if all bits are equal, else 1.  Raises EngineError for an error
    that the user can correct."""
    import engine

    load = engine.load  # before any kernel is imported: this chooses the folder of compiled kernels
    from engine.cli.report import Report
    from engine.devices import open_device

    try:
        first = open_device(parse_devices(args.device)[0])  # so that a missing GPU is reported before a model is read
    except DeviceError as error:
        raise DeviceError(
            f"bitmirror parity compares the CPU with an NVIDIA GPU, and there is none to use: {without_cpu(error)}"
        ) from error
    file = None
    if args.report is not None:
        from engine.verify.report import ReportFile, about

        file = ReportFile(args.report, about(cast("Backend", first).device.info))
    try:
        with Report(args.verbose) as report:
            return compare(args, load, report, file)
    except DeviceError as error:
        raise DeviceError(without_cpu(error)) from error


def without_cpu(error: DeviceError) -> str:
    """The sentence of an error without its advice to use the CPU, which a comparison with a GPU cannot follow."""
    sentence = str(error).replace(" (bitmirror run --list-devices lists them), or cpu", "")
    sentence = sentence.replace(", a smaller model, or --device", " or a smaller model, or --device")
    return re.sub(r"[;,] (?:or )?(?:use )?--device cpu\.?$", "", sentence)


def compare(args: argparse.Namespace, load: Callable[..., "LLM"], report: "Report", file: "ReportFile | None") -> int:
    """Load the model on both devices, compare the two and print the results; file: where they are added to, too.  Returns the
    exit status, 0 or 1."""
    from engine.default_cache import default_types
    from engine.gguf.file import read_gguf
    from engine.hub.resolve import resolve
    from engine.models.registry import read_config
    from engine.text.tokenizer import Tokenizer
    from engine.verify.tally import Tally

    path = resolve(args.model, report.progress)
    gguf = read_gguf(path)
    if args.text is not None:
        ids = Tokenizer.from_gguf(gguf).encode(args.text, add_special=True, parse_special=True)
    else:
        n_vocab = read_config(gguf).n_vocab
        ids = np.random.default_rng(args.seed).integers(0, n_vocab, args.n_prompt).tolist()
    # Both models have the same cache, and the report names it.
    args.cache_type = args.cache_type or default_types(read_config(gguf), gguf).k.name
    needed, drafts = len(ids) + args.n_gen, MOST_DRAFTS if args.draft_model is not None else 0
    if args.ctx_size and args.ctx_size < needed + drafts:
        more = f" and {drafts} drafts" if drafts else ""
        raise UsageError(
            f"-c must be 0 or at least {needed + drafts}, for {len(ids)} + {args.n_gen} tokens{more}, not {args.ctx_size}"
        )
    begun, tally = time.perf_counter(), Tally(args.verbose)

    def write(result: str, problem: str = "") -> None:
        if file is not None:
            from engine.verify.report import about_model, outcome, without_paths

            chosen = ("cache_type", "ds4_rounding", "batch_size", "gpu_memory", "seed", "n_gen", "verbose")
            division = ("gpu_layers", "n_cpu_moe", "override_tensor", "split_mode", "tensor_split")
            options = {"n_prompt": len(ids), **{name: getattr(args, name) for name in (*chosen, *division)}}
            seconds = round(time.perf_counter() - begun, 1)
            about = about_model(path, gguf) | {"options": options, "seconds": seconds}
            file.add(about | outcome(tally, without_paths(problem, path), result))

    try:
        difference = _compare(args, load, report, path, ids, tally)
    except Exception as error:
        write("error", without_cpu(error) if isinstance(error, DeviceError) else f"{type(error).__name__}: {error}")
        raise
    if difference is not None:
        print(f"\nDIFFERENT: {difference}")
        write("different", str(difference))
        return 1
    print(f"\nall {tally.values} values compared are equal, bit for bit.")
    write("equal")
    return 0


def _compare(
    args: argparse.Namespace, load: Callable[..., "LLM"], report: "Report", path: Path, ids: list[int], tally: "Tally"
) -> "Difference | None":
    """Compare the model at ``path`` on both devices, and print the table.  Returns the first difference."""
    from engine.cli.placements import describe
    from engine.cli.table import print_table
    from engine.hub.resolve import resolve
    from engine.verify.check import Difference
    from engine.verify.groups import GroupComparison
    from engine.verify.stages import StageComparison

    drafts = MOST_DRAFTS if args.draft_model is not None else 0
    options: dict[str, Any] = {
        "n_ctx": args.ctx_size or len(ids) + args.n_gen + drafts,
        "cache_type": args.cache_type,
        "ds4_rounding": args.ds4_rounding,
        "draft_max": MOST_DRAFTS,  # so that the state before a pass is still kept after it
        "progress": report.progress,
    }
    if args.draft_model is not None:
        options["draft_model"] = resolve(args.draft_model, report.progress)
    division = shared.division_options(args)
    division |= {"n_threads": args.threads, "batch_size": args.batch_size, "gpu_memory": args.gpu_memory}
    gpu = load(path, device=args.device, **division, **options)
    if args.device.startswith("cuda") and gpu.model.placement.accelerator.device_memory() is None:
        raise UsageError("nothing of the model is on the GPU, so there is nothing to compare: give -ngl 1 or more")
    is_divided = bool(gpu.model.stages) or len(gpu.model.ops.owners) > 1
    if args.device.startswith("cpu") and not is_divided:
        raise UsageError("one device has all of the model, so there is nothing to compare: leave out -sm none")
    # Equal batch sizes: both devices can run the same passes.
    cpu = load(path, device="cpu", n_threads=args.threads, batch_size=gpu.batch_size, **options)
    for llm in (gpu, cpu):
        llm.check_generates()
        if drafts and (llm.draft is None or llm.draft.name not in ("mtp", "eagle3", "dflash")):
            raise UsageError("-md is for a network that reads the model; compare a draft model on its own, as MODEL")
        llm.compile(report.progress)
    config = cpu.config
    rounding = " with ds4's rounding" if args.ds4_rounding else ""
    size = f"{config.n_layer} layers, {cpu.cache_types[0]} cache{rounding}, {len(ids)} + {args.n_gen} tokens"
    print(f"{shown(path.name)}: {config.architecture}, {size}")
    threads = f"{cpu.n_threads} thread{'s' * (cpu.n_threads != 1)}"
    place = describe(gpu.model.placement) if gpu.model.stages else gpu.model.ops.label
    print(f"CPU, {threads}, and {place}, arithmetic {ARITHMETIC}\n", flush=True)

    found = None
    try:
        if is_divided:
            how = StageComparison if gpu.model.stages else GroupComparison
            divided = how(cpu, gpu, ids, args.seed, tally)
            report.line("the prompt, stage by stage ..." if gpu.model.stages else "the prompt ...")
            divided.prompt()
            if args.n_gen:
                report.line("answers ...")
                divided.answers(args.n_gen)
        else:
            from engine.verify.comparison import Comparison  # which imports the kernels of GPUs

            both = Comparison(cpu, gpu, ids, args.seed, tally)
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
        found = difference
    print_table(tally.HEAD, tally.rows(), right=("layers", "values", "differing bits"), titled=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr."""
    return entry.main(parser, run, argv, memory="choose fewer tokens (-p, -n) or a smaller model")


if __name__ == "__main__":
    entry.program(main)
