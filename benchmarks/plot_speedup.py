"""What speculation can gain, over the number of drafts and how many of them are accepted, as an SVG.

``python -m benchmarks.plot_speedup > docs/images/speedup.svg``

A pass with n drafts gives E(n) = 1 + a + ... + a^n tokens, if each draft is accepted with probability a (Leviathan et al.
2023, section 3.1), and takes n c + v(n + 1) times as long as a plain pass: a draft costs c, a pass of as many rows v.
"""

import argparse
import math
from collections.abc import Iterator

import numpy as np

from benchmarks.svg import COLORS, TEXT, label

ROWS = (1, 2, 4, 8, 16)
PASS = (1.0, 1.07, 1.10, 1.13, 1.49)
"""v: seconds of a pass of several rows, relative to one row: Qwen3-8B in Q4_K_M on an H200 (docs/notebook.md)."""

DRAFT = 0.25
"""c of the left half: a draft model whose pass takes a quarter of the target's, like Qwen3-0.6B's."""

MOST = 15
KEPT = (0.5, 0.6, 0.75, 0.9, 0.95)
TICKS = (0.5, 1, 2, 4, 8)

WIDTH, HEIGHT = 760, 400
TOP, BOTTOM = 62, 344
LEFT = {"model": 52, "lookup": 416}
PLOT = 280
LOWEST, HIGHEST = 0.4, 8.0


def tokens(a: float, n: int) -> float:
    """E(n)."""
    return sum(a**i for i in range(n + 1))


def speedup(a: float, n: int, c: float) -> float:
    """Tokens per second with n drafts of cost c over tokens per second without any."""
    return tokens(a, n) / (n * c + float(np.interp(n + 1, ROWS, PASS)))


def best(a: float, c: float) -> int:
    """The number of drafts with the largest gain; 0: none."""
    return max(range(MOST + 1), key=lambda n: speedup(a, n, c))


def x(left: float, n: float) -> float:
    """The coordinate of n drafts, in pixels."""
    return left + PLOT * n / MOST


def y(gain: float) -> float:
    """The coordinate of a gain, in pixels, on a logarithmic scale."""
    return BOTTOM - (BOTTOM - TOP) * math.log(gain / LOWEST) / math.log(HIGHEST / LOWEST)


def panel(left: float, title: str, c: float) -> Iterator[str]:
    """One half: axes, a line for each probability, and a dot where it is highest."""
    yield label(left, TOP - 22, title, extra=' font-weight="bold"')
    for gain in TICKS:
        width = 1.5 if gain == 1 else 1
        yield (
            f'<line x1="{left}" y1="{y(gain):.1f}" x2="{left + PLOT}" y2="{y(gain):.1f}" stroke="{TEXT}" '
            f'stroke-opacity="0.4" stroke-width="{width}"/>'
        )
        yield label(left - 8, y(gain) + 4, f"{gain:g} ×", "end")
    for n in (0, 1, 2, 4, 7, 10, MOST):
        yield label(x(left, n), BOTTOM + 18, str(n), "middle")
    yield label(left + PLOT / 2, BOTTOM + 40, "drafts per pass", "middle")
    for a, color in zip(KEPT, COLORS, strict=True):
        points = " ".join(f"{x(left, n):.1f},{y(speedup(a, n, c)):.1f}" for n in range(MOST + 1))
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
        top = best(a, c)
        yield f'<circle cx="{x(left, top):.1f}" cy="{y(speedup(a, top, c)):.1f}" r="4" fill="{color}"/>'
        yield label(left + PLOT + 6, y(speedup(a, MOST, c)) + 4, f"{a:.0%}", fill=color)


def figure(draft: float) -> str:
    """The whole image."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        "<title>Speedup over the number of drafts, for five probabilities that a draft is accepted</title>",
        label(8, 18, "tokens per second relative to no drafts; per cent: accepted drafts; dot: the best number"),
        *panel(LEFT["model"], f"a draft costs {draft:g} of a pass", draft),
        *panel(LEFT["lookup"], "a draft costs nothing", 0.0),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Print the image."""
    parser = argparse.ArgumentParser(description="Print a plot of what speculation can gain, as SVG.")
    parser.add_argument("--draft", type=float, default=DRAFT, help="cost of a draft, in passes (default %(default)s)")
    print(figure(parser.parse_args().draft), end="")


if __name__ == "__main__":
    main()
