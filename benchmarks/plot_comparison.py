"""Plot the output of ``asv compare`` as SVG: the times of a commit relative to those of the commit before it.

``asv compare BEFORE AFTER > compared.txt`` and ``python -m benchmarks.plot_comparison compared.txt > comparison.svg``;
without a file, the tables of the book are drawn.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measured import BOOK

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "Times of benchmarks after a commit, relative to those before"
SIZE = (480, 430)

SECONDS = {"ns": 1e-9, "μs": 1e-6, "ms": 1e-3, "s": 1.0}

HEAD = re.compile(r"^\|\s*Change\s*\|\s*Before \[\w+\] <(.+?)>\s*\|\s*After \[\w+\] <(.+?)>\s*\|")
TIME = r"([\d.]+)(?:±([\d.]+))?(ns|μs|ms|s)"
ROW = re.compile(rf"^\|\s*([-+x!*]?)\s*\|\s*{TIME}\s*\|\s*{TIME}\s*\|[^|]*\|\s*(.+?)\s*\|$")

SHORT = re.compile(r"^[\w.]*\.")
"""The part of the name of a benchmark that a figure leaves out: its file and class."""

MARKS = {"+": "red", "-": "green"}
"""Colors of benchmarks that asv marks; the others are blue."""


@dataclass(frozen=True)
class Row:
    """One benchmark: its mark ("+" is worse), the ratio of the new time to the old, and the ratios of the quartiles that are
    farthest apart, if any."""

    name: str
    mark: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Table:
    """The output of one ``asv compare``."""

    before: str
    after: str
    rows: list[Row]


def tables(text: str) -> list[Table]:
    """The tables in the output of ``asv compare``, without benchmarks that lack a time in one of the commits.

    Tables of the same two commits are joined, because ``--split`` prints several.
    """
    found: dict[tuple[str, str], Table] = {}
    current = None
    for each in text.splitlines():
        if title := HEAD.match(each):
            current = found.setdefault((title[1], title[2]), Table(title[1], title[2], []))
        elif current and (row := ROW.match(each)):
            mark, *times, name = row.groups()
            (old, old_error), (new, new_error) = (
                (float(value) * SECONDS[unit], float(error or 0) * SECONDS[unit])
                for value, error, unit in (times[:3], times[3:])
            )
            low, high = (new - new_error) / (old + old_error), (new + new_error) / (old - old_error)
            current.rows.append(Row(name, mark, new / old, low, high))
    return list(found.values())


def facts(file: str = str(BOOK / "benchmarks.md")) -> list[dict[str, Any]]:
    """The tables in a file."""
    return [asdict(table) for table in tables(Path(file).read_text(encoding="utf-8"))]


def draw(facts: list[dict[str, Any]], page: "Page") -> None:
    """A group of lines for each table, on one axis; each name is above its line."""
    rows = [row for table in facts for row in table["rows"]]
    low = min([0.95, *(row["low"] - 0.01 for row in rows)])
    high = max([1.15, *(row["high"] + 0.01 for row in rows)])
    page.text(16, 20, "Time after a commit, relative to that before")
    page.text(16, 38, "lines span the quartiles; red: worse, green: better, says asv")
    top, left = 58, 190
    height = page.height - top - 30
    axes = page.axes(left, top, page.width - left - 28, height)
    axes.set(xlim=(low, high), ylim=(height, 0), yticks=[])
    ticks = [percent for percent in range(-100, 1000, 5) if low <= 1 + percent / 100 <= high]
    axes.set_xticks(
        [1 + tick / 100 for tick in ticks], [f"{tick:+d} %".replace("-", "−") if tick else "0" for tick in ticks]
    )
    step = (height - 14) / (len(rows) + len(facts))
    y = step / 2 + 7
    for table in facts:
        page.text(16, top + y + 4, f"{table['before']} → {table['after']}", bold=True)
        y += step
        for row in table["rows"]:
            color = MARKS.get(row["mark"], "blue")
            page.text(16, top + y + 4, SHORT.sub("", row["name"]), color)
            page.curve(axes, [(row["low"], y), (row["high"], y)], color, dot=0)
            page.curve(axes, [(row["ratio"], y)], color)
            y += step


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command line: print the image."""
    parser = argparse.ArgumentParser(description="Plot the output of asv compare as SVG.")
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help="output of asv compare, or a text that quotes it; default: the book")
    given = parser.parse_args(argv).file
    found = facts(given) if given else facts()

    from docs.figures.style import Page

    page = Page(SIZE, "both")
    draw(found, page)
    print(page.svg(TITLE, found), end="")


if __name__ == "__main__":
    main()
