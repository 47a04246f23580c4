"""Tokens per second of all users over their number, ours and llama.cpp's, as an SVG.

``python -m benchmarks.plot_users > users.svg`` draws the table of the book; ``bitmirror bench -m MODEL -np 1,16,64 -o json >
users.json`` and ``python -m benchmarks.plot_users users.json > users.svg`` draw measurements of this machine.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measured import number, table

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "Tokens per second of all users, over the number of users"
SIZE = (480, 620)

PANELS = (("answers", "answers, tokens per second"), ("prompts", "prompts, tokens per second"))

COUNTS = ("1", "8", "16", "32", "64", "96", "128")
"""The columns of the table of the book."""

LINES = {
    "answers": {"Qwen3-8B": "Qwen3-8B", "llama.cpp": "Qwen3-8B, llama.cpp"},
    "prompts": {"prompts": "Qwen3-8B", "prompts, llama.cpp": "Qwen3-8B, llama.cpp"},
}
"""What lines of each panel are called, by the first cell of the first row of the table that has it."""

Lines = list[list[Any]]
"""[name, [[users, tokens per second], ...]] of each line."""


def book() -> dict[str, Lines]:
    """The lines of the table on many users."""
    found: dict[str, Lines] = {panel: [] for panel, _ in PANELS}
    seen: set[str] = set()
    for name, *cells in table("scheduler.md", "users", *COUNTS):
        for panel, names in LINES.items():
            if name in names and name not in seen:
                places = [[int(n), number(cell)] for n, cell in zip(COUNTS, cells, strict=True) if cell]
                found[panel].append([names[name], places])
        seen.add(name)
    return found


def measured(paths: Sequence[str]) -> dict[str, Lines]:
    """The lines of the output of ``bitmirror bench -np``, one for each model."""
    found: dict[str, dict[str, list[list[float]]]] = {panel: {} for panel, _ in PANELS}
    for path in paths:
        for test in json.loads(Path(path).read_text(encoding="utf-8")):
            for panel, name in (("answers", "answer_per_second"), ("prompts", "prompt_per_second")):
                found[panel].setdefault(test["model"], []).append([test["n_users"], test[name]])
    return {panel: [[model, sorted(places)] for model, places in lines.items()] for panel, lines in found.items()}


def facts(paths: Sequence[str] = ()) -> dict[str, Lines]:
    """The lines of both panels: of these files, or of the book."""
    return measured(paths) if paths else book()


def draw(facts: dict[str, Lines], page: "Page") -> None:
    """One panel above the other: a line for each model and engine."""
    from docs.figures.style import COLORS

    names = list(dict.fromkeys(name for lines in facts.values() for name, _ in lines))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    page.legend(16, 20, colors)
    top = 26 + 19 * len(names)
    height = (page.height - top - 144) / 2
    users = sorted({n for lines in facts.values() for _, places in lines for n, _ in places})
    for (panel, title), y in zip(PANELS, (top + 24, top + 24 + height + 66), strict=True):
        page.text(16, y - 14, title, bold=True)
        axes = page.axes(66, y, 390, height)
        for name, places in facts[panel]:
            page.curve(axes, places, colors[name])
        axes.set_ylim(0, 1.08 * max(rate for _, places in facts[panel] for _, rate in places))
        # Fewer users would be too close to one another.
        shown = [n for n in users if n >= users[-1] / 8 or n == users[0]]
        axes.set_xticks(shown, [str(n) for n in shown])
    page.text(261, page.height - 10, "users", anchor="middle")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the image."""
    parser = argparse.ArgumentParser(description="Print a plot of rates over users, as SVG.")
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="output of bitmirror bench -np -o json; default: the book's table"
    )
    found = facts(parser.parse_args(argv).files)

    from docs.figures.style import Page

    page = Page(SIZE, "both")
    draw(found, page)
    print(page.svg(TITLE, found), end="")


if __name__ == "__main__":
    main()
