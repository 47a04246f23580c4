"""``bitmirror compile``: compile a model's GPU kernels to machine code on a machine without a GPU."""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from engine.cli import entry, shared
from engine.cli.parser import Parser, filled, whole
from engine.errors import DeviceError, UsageError

USAGE = """\
%(prog)s [-m MODEL] --target sm_90 [flags]              into the cache folder
       %(prog)s [-m MODEL] --target sm_90 -o FOLDER [flags]    for another machine
       BITMIRROR_CACHE=FOLDER bitmirror run [-m MODEL] [flags]          on that machine"""

DESCRIPTION = """\
Compiles the GPU kernels that a model needs. The machine needs no GPU. The kernels are stored where
`bitmirror run` looks for them. The folder works on any machine with the same version of this
package and of the compilers, with any version of Python."""

EPILOG = """\
example:
  bitmirror compile -m model.gguf --target sm_90 -o /image/cache
  BITMIRROR_CACHE=/image/cache bitmirror run -m model.gguf -p "def add(a, b):"      # on the GPU

Exit status: 0 compiled, 2 user error (one sentence on stderr says what to do), 130 interrupted by
Ctrl-C, 1 a bug."""


def parser(prog: str = "bitmirror compile") -> Parser:
    """The command line as an argparse parser."""
    top = Parser(
        prog,
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        positional="name the model with -m",
        finish=shared.settle_model,
    )
    group = top.add_argument_group("model")
    shared.add_model(group)
    shared.add_context(group, "context in tokens; 0 = as trained")
    shared.add_batch_size(group, "tokens of a prompt read per pass; 0 = the default of the GPU")
    shared.add_cache_types(group)
    shared.add_ds4_rounding(group)
    shared.add_draft_model(group, "model that drafts for this one, named as for -m")

    add = top.add_argument_group("GPU").add_argument
    target = "compute capability of the GPU: sm_90 for an H100 or H200"
    add("--target", metavar="SM", type=filled("sm_90 is an H100 or H200"), help=target)
    add(
        "--multiprocessors",
        metavar="N",
        type=whole(0),
        default=0,
        help="number of multiprocessors of the GPU; 0 = that of the usual GPU with this compute capability",
    )

    group = top.add_argument_group("other")
    folder = "folder to write, for BITMIRROR_CACHE on the other machine; default: the cache folder of this machine"
    group.add_argument("-o", "--output", metavar="FOLDER", type=filled("name a folder"), help=folder)
    shared.add_other(group)
    return top


def run(args: argparse.Namespace) -> int:
    """Compile the missing kernels and print the folder they are in.  Returns the exit status.  Raises EngineError."""
    if not args.target:
        raise UsageError("choose a GPU with --target: sm_90 for an H100 or H200, sm_80 for an A100")
    try:
        from engine.cuda.target import Target
    except ImportError:
        raise DeviceError(
            "kernels for GPUs need the package numba-cuda: install it with pip install 'bitmirror[cuda]'."
        ) from None
    from engine.cli.report import Report
    from engine.compile import cache as kernel_cache
    from engine.compile.pool import compile_all
    from engine.cuda.runtime.jobs import GPUJob, gpu_job
    from engine.hub.resolve import resolve
    from engine.loading import load
    from engine.machine import trust

    target = Target(args.target, args.multiprocessors)
    started = time.perf_counter()
    with Report() as report:
        path = resolve(args.model, report.progress)
        draft = resolve(args.draft_model, report.progress) if args.draft_model else None
        if args.output:
            # Only now: named models are downloaded into the user's own folder.
            trust.make(Path(args.output).absolute())
            os.environ["NUMBA_CACHE_DIR"] = str(Path(args.output).absolute() / "kernels")
            kernel_cache.choose_again()
        llm = load(
            path,
            device=target,
            n_ctx=args.ctx_size,
            batch_size=args.batch_size,
            cache_type=args.cache_type,
            cache_type_k=args.cache_type_k,
            cache_type_v=args.cache_type_v,
            ds4_rounding=args.ds4_rounding,
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr."""
    return entry.main(parser, run, argv)


if __name__ == "__main__":
    entry.program(main)
