"""Operations per second of passes of 1 to thousands of rows, below what memory and tensor cores allow, as an SVG.

``python -m engine.bench --shape qwen3-8b:Q4_K_M --device cuda -p 1,2,4,8,16,256,512,1024,2048 -b 2048 -n 0 -r 3
-o json > qwen3-8b.json`` and ``python -m benchmarks.plot_roofline qwen3-8b.json > roofline.svg``; without a file,
the tables of the book are drawn

Every prompt is one pass, hence ``-b``; prompts at a depth and generated tokens are left out.  Operations are two for each
weight of the products of a row, the output matrix for one row of a pass only; bytes are those of the weights that the pass
reads: of experts, as many as rows that choose independently need.  Both follow from the name of the model, which has to be
that of a shape and a quantization (``python -m engine.cli.synthetic``).
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.measured import measured, measurements, number, table
from engine.cuda.rows import NARROW_ROWS
from engine.errors import UsageError
from engine.gguf.quants import FORMATS
from engine.synthetic.shapes import quants, shapes, tensor_type

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "Operations per second over operations per byte of weights, for passes of 1 to thousands of rows"
SIZE = (480, 520)

BANDWIDTH = 4.5
"""TB/s of a plain read of an H200's memory (``engine/cuda/bandwidth.py``)."""
PRODUCTS = 1258.0
"""10^12 operations per second of an H200's int8 ``mma.sync`` with everything in registers."""

NAMED_ROWS = (1, 4, 256, 2048)
PLACES: dict[int, Any] = {
    1: {"xytext": (-9, -3), "ha": "right"},
    4: {"xytext": (9, -9)},
    256: {"xytext": (0, 18), "ha": "right"},
}
"""Where the names of rows are that would be over lines or points of other models if they were below their own points."""


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


SHAPES = {
    "Qwen3-8B": "qwen3-8b",
    "Qwen3.6-27B": "qwen3.6-27b",
    "Qwen3.6-35B-A3B": "qwen3.6-35b-a3b",
    "Gemma 4 12B": "gemma4-12b",
}
"""The shapes that the tables of the book name."""


def book() -> list[dict[str, Any]]:
    """The passes in the tables of the book, all of Q4_K_M: prompts read in one pass, and passes of few rows.  A step of an
    answer is a pass of one row."""

    def passed(shape: str, rows: int, rate: float) -> dict[str, Any]:
        return measured(f"{SHAPES[shape]} Q4_K_M", rate, prompt=rows)

    tests = []
    sizes = (256, 512, 1024, 2048)
    latest: dict[str, list[str]] = {}
    for shape, *cells in table("performance.md", "shape", *(f"pp{rows}" for rows in sizes)):
        latest.setdefault(shape.partition(",")[0], cells)  # earlier measurements have their date after a comma
    for shape, cells in latest.items():
        tests += [passed(shape, rows, number(cell)) for rows, cell in zip(sizes, cells, strict=True)]
    few = (1, 2, 4, 8)
    micros = table("notebook.md", "rows per pass", *map(str, few))[0][1:]
    tests += [passed("Qwen3-8B", rows, 1e6 * rows / number(cell)) for rows, cell in zip(few, micros, strict=True)]
    for shape, test, rate, *_ in table("performance.md", "shape", "test"):
        if shape in SHAPES and test == "tg128":
            tests.append(passed(shape, 1, number(rate)))
    for shape, cache, test, rate, *_ in table("performance.md", "shape", "cache", "test"):
        if f"Gemma 4 {shape}" in SHAPES and (cache, test) == ("f16", "tg128"):
            tests.append(passed(f"Gemma 4 {shape}", 1, number(rate)))
    return tests


def facts(
    tests: Sequence[dict[str, Any]] | None = None, bandwidth: float = BANDWIDTH, peak: float = PRODUCTS
) -> dict[str, Any]:
    """The ceilings, and the points of these tests, or of the book."""
    found = points(book() if tests is None else tests)
    rounded = {model: [[n, float(f"{x:.5g}"), float(f"{y:.5g}")] for n, x, y in each] for model, each in found.items()}
    return {"bandwidth": bandwidth, "peak": peak, "points": rounded}


def draw(facts: dict[str, Any], page: "Page") -> None:
    """The two ceilings, and a point for each pass; lines join passes of the same kernels."""
    from docs.figures.style import COLORS

    models = facts["points"]
    colors = {model: COLORS[i % len(COLORS)] for i, model in enumerate(models)}
    page.text(16, 20, "10¹² operations per second, over operations")
    page.text(16, 38, "per byte of weights that the pass reads")
    page.legend(16, 62, colors)
    top = 62 + 19 * len(models)
    axes = page.axes(58, top, 398, page.height - top - 58)
    axes.set_xscale("log")
    axes.set_yscale("log")
    bandwidth, peak = facts["bandwidth"], facts["peak"]
    places = [place for each in models.values() for place in each]
    low = 10 ** math.floor(math.log10(min([1.0, *(x for _, x, _ in places)])))
    high = 10 ** math.ceil(math.log10(max([10000.0, *(x for _, x, _ in places)])))
    bottom = 10 ** math.floor(math.log10(min([10.0, *(y for *_, y in places)])))
    axes.set(xlim=(low, high), ylim=(bottom, 2 * peak))
    ridge = peak / bandwidth
    dashed = {"color": page.colors["muted"], "linestyle": (0, (6, 4)), "linewidth": 2}
    axes.plot([low, ridge, high], [low * bandwidth, peak, peak], **dashed)
    middle = (max(low, bottom / bandwidth) * ridge) ** 0.5
    style = {"color": page.colors["text"], "size": 13, "ha": "right", "textcoords": "offset points"}
    axes.annotate(f"memory, {bandwidth:g} TB/s", (middle, middle * bandwidth), (-8, 6), **style)
    axes.annotate(f"int8, {peak:g}", (high, peak), (0, 6), **style)
    named = next(iter(models), "")
    for model, each in models.items():
        color = page.colors[colors[model]]
        for wide in (False, True):
            part = [(x, y) for rows, x, y in each if (rows > NARROW_ROWS) == wide]
            if part:
                page.curve(axes, part, colors[model], line=1.5)
        for rows, x, y in each:
            if model == named and rows in NAMED_ROWS:
                text = f"{rows} row{'s' * (rows > 1)}"
                place = PLACES.get(rows, {"xytext": (0, -20), "ha": "center"})
                axes.annotate(
                    text, (x, y), textcoords="offset points", color=color, size=13, annotation_clip=False, **place
                )
    axes.set_xticks([10.0**k for k in range(round(math.log10(low)), round(math.log10(high)) + 1)])
    axes.set_yticks([10.0**k for k in range(round(math.log10(bottom)), 4)])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_ticks([], minor=True)
    page.text(257, page.height - 12, "operations per byte", anchor="middle")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the image."""
    parser = argparse.ArgumentParser(description="Print a plot of passes below what a GPU allows, as SVG.")
    add = parser.add_argument
    add("files", nargs="*", metavar="FILE", help="output of python -m engine.bench -o json; default: the book's tables")
    add("--bandwidth", type=float, default=BANDWIDTH, help="TB/s of memory (default %(default)s)")
    add("--peak", type=float, default=PRODUCTS, help="10^12 operations per second of int8 (default %(default)s)")
    args = parser.parse_args(argv)
    try:
        found = facts(measurements(args.files) if args.files else None, args.bandwidth, args.peak)
    except UsageError as error:
        parser.error(str(error))

    from docs.figures.style import Page

    page = Page(SIZE, "both")
    draw(found, page)
    print(page.svg(TITLE, found), end="")


if __name__ == "__main__":
    main()
