"""Operations per second of passes of 1 to thousands of rows, below what memory and tensor cores allow, as an SVG.

``python -m engine.bench --shape qwen3-8b:Q4_K_M --device cuda -p 1,2,4,8,16,256,512,1024,2048 -b 2048 -n 0 -r 3
-o json > qwen3-8b.json`` and ``python -m benchmarks.plot_roofline qwen3-8b.json > docs/images/roofline.svg``

Every prompt is one pass, hence ``-b``; prompts at a depth and generated tokens are left out.  Operations are two for each
weight of the products of a row, the output matrix for one row of a pass only; bytes are those of the weights that the pass
reads: of experts, as many as rows that choose independently need.  Both follow from the name of the model, which has to be
that of a shape and a quantization (``python -m engine.synthetic``).
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.svg import TEXT, Axis, colors, curve, decades, dot, image, label, legend, line, measurements, powers
from engine.errors import UsageError
from engine.gguf.quants import FORMATS
from engine.synthetic.shapes import quants, shapes, tensor_type

BANDWIDTH = 4.5
"""TB/s of a plain read of an H200's memory (``engine/cuda/bandwidth.py``)."""
PRODUCTS = 1258.0
"""10^12 operations per second of an H200's int8 ``mma.sync`` with everything in registers."""

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 64, 690, 78, 404
NAMED_ROWS = (1, 16, 256, 2048)


@dataclass(frozen=True)
class Products:
    """The matrices of a model: weights and bytes of those that every row multiplies, of the experts (all of them), and of the
    output matrix."""

    dense: tuple[int, int]
    experts: tuple[int, int]
    head: tuple[int, int]
    n_expert: int
    n_used: int

    def operations(self, rows: int) -> float:
        """Operations of a pass that gives logits for its last row."""
        experts = self.experts[0] * self.n_used / max(1, self.n_expert)
        return 2 * ((self.dense[0] + experts) * rows + self.head[0])

    def bytes_read(self, rows: int) -> float:
        """Bytes of weights that a pass reads."""
        share = 1 - (1 - self.n_used / self.n_expert) ** rows if self.n_expert else 0.0
        return self.dense[1] + self.experts[1] * share + self.head[1]


def shape_of(model: str) -> tuple[str, str]:
    """(shape, quantization) from the name of a model of ``engine.bench``: ``qwen3-8b Q4_K_M``, ``qwen3-8b-Q4_K_M``."""
    for name in sorted(shapes(), key=len, reverse=True):
        quant = model[len(name) :].lstrip(" -:")
        if model.startswith(name) and quant in quants():
            return name, quant
    raise UsageError(f"{model!r} is not the name of a shape and a quantization, such as 'qwen3-8b-Q4_K_M'.")


def products(model: str) -> Products:
    """The matrices that a pass of the model multiplies."""
    name, quant = shape_of(model)
    shape = shapes()[name]
    output = "token_embd.weight" if shape.tied else "output.weight"
    # The tail of gemma4 reads keys and values of earlier layers; layers after the trunk draft.
    shared = range(shape.n_layer - (shape.gemma4.n_shared if shape.gemma4 else 0), shape.n_layer)
    idle = tuple(f"blk.{il}.attn_{part}." for il in shared for part in "kv")
    idle += tuple(f"blk.{il}." for il in range(shape.n_layer, shape.n_block))
    sums = {"dense": [0, 0], "experts": [0, 0], "head": [0, 0]}
    for tensor, sizes in shape.tensors():
        table = "token_embd" in tensor and tensor != output
        if len(sizes) < 2 or table or "conv1d" in tensor or tensor.startswith(idle):
            continue
        weights, entry = 1, FORMATS[tensor_type(shape, quant, tensor, sizes[-1])]
        for n in sizes:
            weights *= n
        own = sums["head" if tensor == output else "experts" if "_exps." in tensor else "dense"]
        own[0] += weights
        own[1] += weights // entry.block * entry.block_bytes
    dense, experts, head = ((weights, n_bytes) for weights, n_bytes in sums.values())
    mix = shape.experts
    return Products(dense, experts, head, mix.n_expert if mix else 0, mix.n_used if mix else 0)


def points(tests: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float, float]]]:
    """(rows, operations per byte, 10^12 operations per second) of each pass, for each model."""
    found: dict[str, list[tuple[int, float, float]]] = {}
    for test in tests:
        rows = test["n_prompt"]
        if rows and not test["n_depth"]:
            model = products(test["model"])
            work = model.operations(rows)
            place = rows, work / model.bytes_read(rows), work * test["avg_ts"] / rows / 1e12
            found.setdefault(test["model"], []).append(place)
    return {model: sorted(places) for model, places in found.items()}


def parts(tests: Sequence[dict[str, Any]], bandwidth: float, peak: float) -> Iterator[str]:
    """Axes, the two ceilings, a point for each pass."""
    found = points(tests)
    places = [place for places in found.values() for place in places]
    x_low, x_high = decades([x for _, x, _ in places], 1, 10000)
    y_low, y_high = decades([y for _, _, y in places], 1, peak)[0], 1.6 * peak
    x, y = Axis(x_low, x_high, LEFT, RIGHT), Axis(y_low, y_high, BOTTOM, TOP)
    yield label(8, 18, "10¹² operations per second over operations per byte of weights that the pass reads")
    yield from legend(8, 40, WIDTH, colors(list(found)))
    for value in powers(y_low, y_high):
        yield line(LEFT, y(value), RIGHT, y(value))
        yield label(LEFT - 8, y(value) + 4, f"{value:g}", "end")
    for value in powers(x_low, x_high):
        yield line(x(value), BOTTOM, x(value), BOTTOM + 5)
        yield label(x(value), BOTTOM + 20, f"{value:g}", "middle")
    yield label((LEFT + RIGHT) / 2, BOTTOM + 42, "operations per byte", "middle")
    ridge = peak / bandwidth
    first = max(x_low, y_low / bandwidth)
    roof = [(first, first * bandwidth), (ridge, peak), (max(ridge, x_high), peak)]
    yield curve([(x(a), y(b)) for a, b in roof], TEXT, ' stroke-dasharray="6 4"')
    middle = (first * ridge) ** 0.5
    yield label(x(middle) - 8, y(middle * bandwidth) - 8, f"memory, {bandwidth:g} TB/s", "end")
    yield label(RIGHT, y(peak) - 8, f"tensor cores, int8, {peak:g}", "end")
    for i, (model, color) in enumerate(colors(list(found)).items()):
        yield curve([(x(a), y(b)) for _, a, b in found[model]], color, ' stroke-opacity="0.6"')
        for rows, a, b in found[model]:
            yield dot(x(a), y(b), color)
            if i == 0 and rows in NAMED_ROWS:
                yield label(x(a) + 6, y(b) + 18, f"{rows} row{'s' * (rows > 1)}", fill=color)


def figure(tests: Sequence[dict[str, Any]], bandwidth: float = BANDWIDTH, peak: float = PRODUCTS) -> str:
    """The whole image."""
    title = "Operations per second over operations per byte of weights, for passes of 1 to thousands of rows"
    return image(WIDTH, HEIGHT, title, parts(tests, bandwidth, peak))


def main(argv: Sequence[str] | None = None) -> None:
    """Print the image."""
    parser = argparse.ArgumentParser(description="Print a plot of passes below what a GPU allows, as SVG.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="output of python -m engine.bench -o json")
    parser.add_argument("--bandwidth", type=float, default=BANDWIDTH, help="TB/s of memory (default %(default)s)")
    parser.add_argument(
        "--peak", type=float, default=PRODUCTS, help="10^12 operations per second of int8 (default %(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        print(figure(measurements(args.files), args.bandwidth, args.peak), end="")
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
