"""``python -m engine.synthetic``: writes a random model."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.cli.table import print_table
from engine.errors import EngineError
from engine.synthetic.model import make_model
from engine.synthetic.shapes import parse_shape, quants, shapes


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: returns 0 when the file is written, else 2, with one sentence on stderr."""
    parser = argparse.ArgumentParser(prog="python -m engine.synthetic", description="Write a random model.")
    parser.add_argument("--shape", metavar="NAME:QUANT", help="e.g. qwen3-8b:Q4_K_M; the quantization is optional")
    parser.add_argument("-o", "--output", type=Path, help="the file to write (default: NAME-QUANT.gguf here)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same bytes (default: 0)")
    parser.add_argument("--list", action="store_true", help="list shapes and quantizations")
    args = parser.parse_args(argv)
    if args.list or not args.shape:
        rows = [
            (name, shape.architecture, f"{shape.n_params / 1e6:.1f} M parameters") for name, shape in shapes().items()
        ]
        print_table(("shape", "architecture", "size"), rows, right=("size",))
        print("quantizations:", " ".join(quants()))
        return 0
    try:
        name, quant = parse_shape(args.shape)
        path = make_model(args.output or Path(f"{name}-{quant}.gguf"), name, quant, args.seed)
    except EngineError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
