"""Plot the output of ``asv compare`` as SVG: the times of a commit relative to those of the commit before it.

``asv compare BEFORE AFTER > compared.txt`` and ``python -m benchmarks.plot_comparison compared.txt > comparison.svg``;
``python -m benchmarks.plot_comparison docs/benchmarks.md > docs/images/comparison.svg`` draws the tables of the book.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.svg import COLORS, Axis, dot, image, label, line

SECONDS = {"ns": 1e-9, "μs": 1e-6, "ms": 1e-3, "s": 1.0}

TITLE = re.compile(r"^\|\s*Change\s*\|\s*Before \[\w+\] <(.+?)>\s*\|\s*After \[\w+\] <(.+?)>\s*\|")
TIME = r"([\d.]+)(?:±([\d.]+))?(ns|μs|ms|s)"
ROW = re.compile(rf"^\|\s*([-+x!*]?)\s*\|\s*{TIME}\s*\|\s*{TIME}\s*\|[^|]*\|\s*(.+?)\s*\|$")

SAME, WORSE, BETTER = COLORS[1], COLORS[4], COLORS[2]

WIDTH, TOP, STEP = 780, 58, 22
LEFT, RIGHT = 330, 760


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
        if title := TITLE.match(each):
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


def drawn(row: Row, x: Axis, y: float) -> Iterator[str]:
    """The SVG elements of a benchmark: its name, interval and ratio."""
    color = {"+": WORSE, "-": BETTER}.get(row.mark, SAME)
    yield label(LEFT - 12, y + 4, row.name, "end")
    yield (
        f'<line x1="{x(row.low):.1f}" y1="{y:.1f}" x2="{x(row.high):.1f}" y2="{y:.1f}" stroke="{color}" stroke-width="2"/>'
    )
    yield dot(x(row.ratio), y, color)


def figure(compared: Sequence[Table]) -> str:
    """The whole image as SVG: a group of lines for each table, on one axis."""
    rows = [row for table in compared for row in table.rows]
    low = min([0.95, *(row.low - 0.01 for row in rows)])
    high = max([1.15, *(row.high + 0.01 for row in rows)])
    x = Axis(low, high, LEFT, RIGHT, log=False)
    bottom = TOP + STEP * (len(rows) + len(compared)) + STEP / 2
    parts = [
        label(
            8,
            18,
            "ratio of the time after to the time before; lines span the quartiles; red: worse according to asv compare",
        )
    ]
    for percent in range(-100, 1000, 5):
        at = 1 + percent / 100
        if low <= at <= high:
            parts.append(line(x(at), TOP - 12, x(at), bottom))
            parts.append(label(x(at), bottom + 18, f"{percent:+d} %" if percent else "0", "middle"))
    y = float(TOP)
    for table in compared:
        parts.append(label(8, y + 4, f"{table.before} → {table.after}", extra=' font-weight="bold"'))
        y += STEP
        for row in table.rows:
            parts += drawn(row, x, y)
            y += STEP
    return image(WIDTH, round(bottom + 32), "Times of benchmarks after a commit, relative to those before", parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command line: print the image."""
    parser = argparse.ArgumentParser(description="Plot the output of asv compare as SVG.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="output of asv compare, or a text that quotes it")
    texts = [Path(file).read_text(encoding="utf-8") for file in parser.parse_args(argv).files]
    print(figure(tables("\n".join(texts))), end="")


if __name__ == "__main__":
    main()
