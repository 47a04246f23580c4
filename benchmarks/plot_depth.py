"""Tokens per second of answers and prompts over the number of tokens in the cache, as an SVG.

``python -m engine.bench --shape qwen3-8b:Q4_K_M --device cuda -p 512 -n 128 -d 0,4096,8192,16384,32768 -r 3 -o json >
qwen3-8b.json`` and ``python -m benchmarks.plot_depth qwen3-8b.json > depth.svg``; without a file, the table of the book is
drawn.  A sweep is drawn in the same way: ``python -m engine.bench --sweep 2048-65536 > sweep.csv`` and ``python -m
benchmarks.plot_depth sweep.csv > sweep.svg``.

Each length of prompt or answer is a line of its own, and so are answers with drafts.
"""

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.measured import measured, measurements, number, table

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "Tokens per second of answers and prompts, over the depth of the context"
SIZE = (480, 660)

PANELS = (("n_gen", "answers, tokens per second"), ("n_prompt", "prompts, tokens per second"))

DRAFTS = {
    "mtp": ", drafts of its own layer",
    "model": ", drafts of a model",
    "assistant": ", drafts of its assistant",
}
"""What a line is called after its model, by the source of drafts."""

Test = dict[str, Any]


def lines(tests: Sequence[Test], count: str) -> list[list[Any]]:
    """[model, [[depth, tokens per second], ...]] of each model and length, ``count`` being "n_gen" or "n_prompt"."""
    found: dict[tuple[str, int], list[list[float]]] = {}
    for test in tests:
        if test[count]:
            drafts = DRAFTS.get(test.get("drafts", ""), "")
            found.setdefault((test["model"] + drafts, test[count]), []).append([test["n_depth"], test["avg_ts"]])
    return [[model, sorted(places)] for (model, _), places in found.items()]


def book() -> list[Test]:
    """The tests of the table on depth, one model for each type of the cache."""
    header, *rows = [["", *map(str, (0, 4096, 8192, 16384, 32768))], *table("performance.md", "Qwen3-8B, depth")]
    tests = []
    for name, *cells in rows:
        kind = re.search(r"\b(f16|q8_0|q4_0)\b", name)
        if kind:
            what = {"answer": 128} if name.startswith("answer") else {"prompt": 2048}
            for depth, cell in zip(header[1:], cells, strict=True):
                tests.append(measured(f"Qwen3-8B, {kind[1]} cache", number(cell), depth=int(depth), **what))
    return tests


def facts(tests: Sequence[Test] | None = None) -> dict[str, Any]:
    """The lines of both panels: of these tests, or of the book."""
    tests = book() if tests is None else tests
    return {count: lines(tests, count) for count, _ in PANELS}


def draw(facts: dict[str, Any], page: "Page") -> None:
    """One panel above the other: a line for each model."""
    from docs.figures.style import COLORS

    models = list(dict.fromkeys(model for found in facts.values() for model, _ in found))
    colors = {model: COLORS[i % len(COLORS)] for i, model in enumerate(models)}
    page.legend(16, 20, colors)
    top = 26 + 19 * len(models)
    height = (page.height - top - 144) / 2
    for (count, title), y in zip(PANELS, (top + 24, top + 24 + height + 66), strict=True):
        page.text(16, y - 14, title, bold=True)
        axes = page.axes(66, y, 390, height)
        axes.set_yscale("log")
        for model, places in facts[count]:
            page.curve(axes, places, colors[model])
        rates = [rate for _, places in facts[count] for _, rate in places] or [100, 1000]
        axes.set_ylim(min(rates) / 1.15, max(rates) * 1.15)
        low, high = axes.get_ylim()
        ticks = [step * 10.0**k for k in range(-2, 7) for step in (1, 2, 3, 5) if low <= step * 10.0**k <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
        axes.set_yticks([], minor=True)
        depths = sorted({depth for found in facts.values() for _, places in found for depth, _ in places}) or [0]
        # Depths double, so the smallest would be too close to one another.
        shown = [depth for depth in depths if depth == 0 or depth >= depths[-1] / 4]
        axes.set_xticks(shown, [str(depth) for depth in shown])
    page.text(261, page.height - 10, "tokens in the cache", anchor="middle")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the image."""
    parser = argparse.ArgumentParser(description="Print a plot of rates over depth, as SVG.")
    add = parser.add_argument
    add(
        "files",
        nargs="*",
        metavar="FILE",
        help="output of python -m engine.bench, csv or json; default: the book's table",
    )
    files = parser.parse_args(argv).files
    found = facts(measurements(files) if files else None)

    from docs.figures.style import Page

    page = Page(SIZE, "both")
    draw(found, page)
    print(page.svg(TITLE, found), end="")


if __name__ == "__main__":
    main()
