"""``python -m engine.compile``: compile a model's GPU kernels to machine code on a machine without a GPU."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from engine.cli.flags import BATCH_SIZE, CACHE_TYPES, MODEL, Document, Parser, whole
from engine.errors import DeviceError, EngineError, UsageError

DESCRIPTION = """\
Compile the GPU kernels that a model needs. The machine needs no GPU. The kernels are stored where
python -m engine.run looks for them. The folder works on any machine with the same version of this
package and of the compilers, with any version of Python."""

EPILOG = """\
example:
  python -m engine.compile -m model.gguf --target sm_90 -o /image/cache
  BITMIRROR_CACHE=/image/cache python -m engine.run -m model.gguf -p "def add(a, b):"      # on the GPU"""


def parser() -> Parser:
    """The command line as an argparse parser."""
    top = Parser(
        prog="python -m engine.compile",
        usage="python -m engine.compile [-m MODEL] --target sm_90 [-o FOLDER] [flags]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Document,
        allow_abbrev=False,
    )
    add = top.add_argument
    add("-m", "--model", metavar="MODEL", default=None, help=MODEL)
    add("--target", metavar="SM", default="", help="compute capability of the GPU: sm_90 for an H100 or H200")
    add(
        "-o",
        "--output",
        metavar="FOLDER",
        default="",
        help="folder to write, for BITMIRROR_CACHE on the other machine; default: the cache folder of this machine",
    )
    add(
        "--multiprocessors",
        metavar="N",
        type=whole,
        default=0,
        help="number of multiprocessors of the GPU; 0 = that of the usual GPU with this compute capability",
    )
    add("-c", "--ctx-size", metavar="N", type=whole, default=0, help="context in tokens; 0 = as trained")
    add("-b", "--batch-size", metavar="N", type=whole, default=0, help=BATCH_SIZE)
    types = {"choices": CACHE_TYPES, "metavar": "TYPE"}
    add("--cache-type", **types, default="f16", help="type of the key-value cache")  # type: ignore[arg-type]
    add("-ctk", "--cache-type-k", **types, help="type of the keys, if different")  # type: ignore[arg-type]
    add("-ctv", "--cache-type-v", **types, help="type of the values, if different")  # type: ignore[arg-type]
    add("-md", "--draft-model", metavar="MODEL", default="", help="model that drafts for this one")
    add("--no-mtp", action="store_true", help="do not use the model's own layer for drafting")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status; every expected failure is one sentence on stderr."""
    try:
        return run(parser().parse_args(argv))
    except KeyboardInterrupt:
        return 130
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        print(f"error: {named}{error.strerror or error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Compile the missing kernels and print the folder they are in.  Returns the exit status.  Raises EngineError."""
    if not args.target:
        raise UsageError("choose a GPU with --target: sm_90 for an H100 or H200, sm_80 for an A100.")
    if args.multiprocessors < 0:
        raise UsageError(f"--multiprocessors must be 0 or more, not {args.multiprocessors}.")
    try:
        from engine.compile.target import Target
    except ImportError:
        raise DeviceError(
            "kernels for GPUs need the package numba-cuda: install it with pip install 'numba-cuda[cu13]'."
        ) from None
    from engine.cli.report import Report
    from engine.compile import cache as kernel_cache
    from engine.compile.jobs import GPUJob, gpu_job
    from engine.compile.pool import compile_all
    from engine.hub.resolve import resolve
    from engine.loading import load

    target = Target(args.target, args.multiprocessors)
    started = time.perf_counter()
    with Report() as report:
        path = resolve(args.model, report.progress)
        draft = resolve(args.draft_model, report.progress) if args.draft_model else None
        if args.output:
            # Only now: named models are downloaded into the user's own folder.
            Path(args.output).mkdir(parents=True, exist_ok=True)
            os.environ["NUMBA_CACHE_DIR"] = str(Path(args.output).absolute() / "kernels")
            kernel_cache.places.cache_clear()
        llm = load(
            path,
            device=target,
            n_ctx=args.ctx_size,
            batch_size=args.batch_size,
            cache_type=args.cache_type,
            cache_type_k=args.cache_type_k,
            cache_type_v=args.cache_type_v,
            draft_model=draft,
            mtp=not args.no_mtp,
            progress=report.progress,
        )
        # Loading has started some kernels as well, which rearrange the weights.
        jobs = [gpu_job(kernel, target.compute_capability) for kernel in target.launched]
        # Kernels of the CPU, such as the sampler's, depend on the machine that runs them.
        jobs += [job for job in llm.jobs() if isinstance(job, GPUJob)]
        if kernel_cache.places("gpu").write is None:
            raise UsageError("no folder for kernels is writable; choose one with -o.")
        compiled = compile_all(jobs, report.progress)
        for job in jobs:
            if not job.kept():
                job.compile()  # reports the error, or compiles what no other process could
        folder = kernel_cache.places("gpu").write
        if folder is None:
            raise UsageError(
                "the disk with the folder for kernels is full; free some space, or choose another with -o."
            )
        n = len(dict.fromkeys(jobs))
        seconds = time.perf_counter() - started
        report.line(f"{n} kernels for {args.target}, {compiled} of them new, in {seconds:.1f} s: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
