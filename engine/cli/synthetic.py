"""``bitmirror synthetic``: writes a random model."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from engine.cli import entry, shared
from engine.cli.parser import Parser, filled, whole
from engine.cli.table import print_table
from engine.errors import UsageError
from engine.synthetic.model import make_model
from engine.synthetic.shapes import parse_shape, quants, shapes

USAGE = """\
%(prog)s --list                                    list the shapes
       %(prog)s --shape qwen3-8b:Q4_K_M                   write a model to this folder
       %(prog)s --shape qwen3-8b:Q4_K_M -o model.gguf     write it to this file"""

DESCRIPTION = """\
Writes a GGUF file with random weights and the sizes of a well-known model, for tests and
benchmarks; its answers are meaningless. `bitmirror bench --shape` makes such a file itself."""

EPILOG = """\
Exit status: 0 written, 2 user error (one sentence on stderr says what to do), 130 interrupted by
Ctrl-C, 1 a bug."""


def parser(prog: str = "bitmirror synthetic") -> Parser:
    """The command line as an argparse parser."""
    top = Parser(prog, usage=USAGE, description=DESCRIPTION, epilog=EPILOG, positional="name the shape with --shape")
    add = top.add_argument_group("model").add_argument
    name = filled("--list lists the shapes")
    add("--shape", metavar="NAME:QUANT", type=name, help="e.g. qwen3-8b:Q4_K_M; without a quantization, Q4_K_M")
    file = filled("name the file to write")
    add("-o", "--output", metavar="FILE", type=file, help="the file to write; default: NAME-QUANT.gguf in this folder")
    add("--seed", metavar="N", type=whole(0), default=0, help="the same seed gives the same bytes")
    add("--list", action="store_true", help="list the shapes and the quantizations; also without --shape")
    shared.add_other(top.add_argument_group("other"))
    return top


def run(args: argparse.Namespace) -> int:
    """Writes the model, or lists the shapes.  Returns the exit status.  Raises EngineError."""
    if args.list or args.shape is None:
        if args.output is not None and not args.list:
            raise UsageError("-o needs the shape of the model to write: give one with --shape")
        list_shapes()
        return 0
    name, quant = parse_shape(args.shape)
    path = make_model(args.output or f"{name}-{quant}.gguf", name, quant, args.seed)
    print(f"{path}: {Path(path).stat().st_size / 1e6:.1f} MB")
    return 0


def list_shapes() -> None:
    """Prints one line per shape, and one with all quantizations."""
    rows = [(name, shape.architecture, f"{shape.n_params / 1e6:.1f} M parameters") for name, shape in shapes().items()]
    print_table(("shape", "architecture", "size"), rows, right=("size",))
    print("quantizations:", " ".join(quants()))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status; every expected failure is one sentence on stderr."""
    return entry.main(parser, run, argv, memory="choose a smaller shape")


if __name__ == "__main__":
    entry.program(main)
