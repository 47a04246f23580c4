"""``python -m engine.parity MODEL``: does this model give the same bits on the GPU as on the CPU?

The tool counts the bits that differ, in three comparisons:

* every kernel: the prompt is read operation by operation on both devices (``engine/verify/lockstep.py``), in passes of 1 to
  16 rows, and in a few passes of many rows;
* whole passes, as in normal use: the logits of the prompt, the cache after it, the logits of greedy tokens, passes of k
  rows against k single steps, tokens chosen on the device against the CPU's sampler, and answers of ``LLM.generate``;
* if a whole pass differs although every kernel is correct by itself: the first launch of the captured graph that differs.
"""

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cli.flags import CACHE_TYPES, Document, Parser, whole
from engine.devices import check_batch_size, parse_device
from engine.errors import EngineError, UsageError

if TYPE_CHECKING:
    from engine.cli.report import Report
    from engine.llm import LLM

DESCRIPTION = """\
Runs a model on the CPU and on a GPU and compares every bit: of each kernel's output, of the
logits of a prompt and of greedy tokens, of the key-value cache, of passes of 1 to 16 rows and of
the largest passes that read a prompt."""

EPILOG = """\
Exit status: 0 all bits equal, 1 some differ (the first kernel is named, with both values),
2 user error (one sentence on stderr says what to do)."""


def parser() -> Parser:
    """The parser of the command line."""
    top = Parser(
        prog="python -m engine.parity",
        usage="python -m engine.parity [-m] MODEL [flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Document,
        allow_abbrev=False,
    )
    add = top.add_argument
    add("-m", "--model", default=None, metavar="MODEL", help="path or name; default: the bundled model")
    add("-p", "--n-prompt", type=whole, default=200, metavar="N", help="number of random tokens of the prompt")
    add("-n", "--n-gen", type=whole, default=200, metavar="N", help="greedy tokens")
    add("--text", metavar="TEXT", help="read this text instead of random tokens")
    add("-c", "--ctx-size", type=whole, default=0, metavar="N", help="size of the context, 0: as needed")
    add("-b", "--batch-size", type=whole, default=0, metavar="N", help="rows of the largest pass, 0: the GPU's own")
    add("-ct", "--cache-type", choices=CACHE_TYPES, default="f16", help="type of keys and values")
    add("-s", "--seed", type=whole, default=0, metavar="N", help="seed of the prompt's tokens and of sampling")
    add("-t", "--threads", type=whole, default=0, metavar="N", help="CPU threads, 0: all cores")
    add("--device", default="cuda", metavar="DEVICE", help="the GPU: cuda, cuda:1 and so on")
    add("-v", "--verbose", action="store_true", help="a line per layer, and the traceback of an error")
    return top


# --- command line ----------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Run the comparison that the flags describe.  Returns 0 if all bits are equal, else 1.  Raises EngineError for an error
    that the user can correct."""
    if args.n_prompt < 1 or args.n_gen < 0:
        raise UsageError(f"-p must be at least 1 and -n at least 0, not {args.n_prompt} and {args.n_gen}.")
    check_batch_size(args.batch_size)
    index = parse_device(args.device)
    if index is None:
        raise UsageError(f"--device is the GPU to compare with the CPU, such as cuda or cuda:1, not {args.device!r}.")
    args.device = f"cuda:{index}"
    import engine

    load = engine.load  # before any kernel is imported: this chooses the folder of compiled kernels
    from engine.cli.report import Report
    from engine.devices import open_device

    open_device(args.device)  # so that a missing GPU is reported before a model is read
    with Report(args.verbose) as report:
        return compare(args, load, report)


def compare(args: argparse.Namespace, load: Callable[..., "LLM"], report: "Report") -> int:
    """Load the model on both devices, compare the two and print the results.  Returns the exit status, 0 or 1."""
    from engine.gguf.file import read_gguf
    from engine.hub.resolve import resolve
    from engine.limits import MOST_DRAFTS
    from engine.models.read_config import read_config
    from engine.text.tokenizer import Tokenizer
    from engine.verify.comparison import Comparison
    from engine.verify.lockstep import Difference
    from engine.verify.tally import Tally

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
        "draft_max": MOST_DRAFTS,  # so that the state before a pass is still kept after it
        "progress": report.progress,
    }
    gpu = load(path, device=args.device, batch_size=args.batch_size, **options)
    # Equal batch sizes: both devices can run the same passes.
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
    """Run one command line and return its exit status; every expected failure is one sentence on stderr."""
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
