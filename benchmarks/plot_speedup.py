"""What speculation can gain, over the number of drafts and how many of them are accepted, as an SVG.

``python -m benchmarks.plot_speedup > speedup.svg``

A pass with n drafts gives E(n) = 1 + a + ... + a^n tokens, if each draft is accepted with probability a (Leviathan et al.
2023, section 3.1), and takes n c + v(n + 1) times as long as a plain pass: a draft costs c, a pass of as many rows v.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "Speedup over the number of drafts, for five probabilities that a draft is accepted"
SIZE = (480, 640)

ROWS = (1, 2, 4, 8, 16)
PASS = (1.0, 1.07, 1.10, 1.13, 1.49)
"""v: seconds of a pass of several rows, relative to one row: Qwen3-8B in Q4_K_M on an H200 (docs/notebook.md)."""

DRAFT = 0.25
"""c of the first panel: a draft model whose pass takes a quarter of the target's, like Qwen3-0.6B's."""

MOST = 15
KEPT = (0.5, 0.6, 0.75, 0.9, 0.95)
TICKS = (0.5, 1, 2, 4, 8)

LOWEST, HIGHEST = 0.35, 10.0


def tokens(a: float, n: int) -> float:
    """E(n)."""
    return sum(a**i for i in range(n + 1))


def speedup(a: float, n: int, c: float) -> float:
    """Tokens per second with n drafts of cost c over tokens per second without any."""
    return tokens(a, n) / (n * c + float(np.interp(n + 1, ROWS, PASS)))


def best(a: float, c: float) -> int:
    """The number of drafts with the largest gain; 0: none."""
    return max(range(MOST + 1), key=lambda n: speedup(a, n, c))


def facts(draft: float = DRAFT) -> list[dict[str, Any]]:
    """Two panels: drafts that cost ``draft``, and drafts that cost nothing, with a line for each probability and the best
    number of drafts."""
    return [
        {
            "draft": c,
            "lines": [[a, best(a, c), [round(float(speedup(a, n, c)), 4) for n in range(MOST + 1)]] for a in KEPT],
        }
        for c in (draft, 0.0)
    ]


def draw(facts: list[dict[str, Any]], page: "Page") -> None:
    """One panel above the other, on logarithmic scales."""
    from docs.figures.style import COLORS

    page.text(16, 20, "Tokens per second relative to no drafts;")
    page.text(16, 38, "per cent: accepted drafts; dot: the best number of drafts")
    for panel, y in zip(facts, (78, 368), strict=True):
        c = panel["draft"]
        page.text(16, y - 12, f"a draft costs {c:g} of a pass" if c else "a draft costs nothing", bold=True)
        axes = page.axes(56, y, 360, 216)
        axes.set_yscale("log")
        axes.set(xlim=(0, MOST), ylim=(LOWEST, HIGHEST))
        axes.set_yticks(TICKS, [f"{gain:g} ×" for gain in TICKS])
        axes.set_yticks([], minor=True)
        axes.set_xticks([0, 1, 2, 4, 7, 10, MOST])
        axes.axhline(1, color=page.colors["muted"], linewidth=1.5)
        for (a, top, gains), color in zip(panel["lines"], COLORS, strict=True):
            page.curve(axes, list(enumerate(gains)), color, dot=0)
            page.curve(axes, [(top, gains[top])], color)
            place = {"xytext": (7, -4), "textcoords": "offset points", "annotation_clip": False}
            axes.annotate(f"{100 * a:.0f} %", (MOST, gains[-1]), color=page.colors[color], size=13, **place)
    page.text(236, page.height - 12, "drafts per pass", anchor="middle")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the image."""
    parser = argparse.ArgumentParser(description="Print a plot of what speculation can gain, as SVG.")
    parser.add_argument("--draft", type=float, default=DRAFT, help="cost of a draft, in passes (default %(default)s)")
    found = facts(parser.parse_args(argv).draft)

    from docs.figures.style import Page

    page = Page(SIZE, "both")
    draw(found, page)
    print(page.svg(TITLE, found), end="")


if __name__ == "__main__":
    main()
