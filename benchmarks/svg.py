"""The common part of the plots in this folder: measurements of ``engine.bench``, axes, text."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

# Midtones that can be read on white and on black.
TEXT = "#808080"
COLORS = ("#8a6fd1", "#3f86d6", "#2a9d8f", "#c98a1b", "#d1605e")


def measurements(paths: Iterable[str]) -> list[dict[str, Any]]:
    """Read the output of ``python -m engine.bench -o json``: arrays of tests, or tests in sequence."""
    tests: list[dict[str, Any]] = []
    decoder = json.JSONDecoder()
    for path in paths:
        text = Path(path).read_text(encoding="utf-8").strip()
        while text:
            value, end = decoder.raw_decode(text)
            tests += value if isinstance(value, list) else [value]
            text = text[end:].lstrip()
    return tests


def colors(models: Sequence[str]) -> dict[str, str]:
    """A color for each model."""
    return {model: COLORS[i % len(COLORS)] for i, model in enumerate(models)}


@dataclass(frozen=True)
class Axis:
    """Maps numbers to pixels, from ``low`` at ``start`` to ``high`` at ``end``; ``log``: on a logarithmic scale."""

    low: float
    high: float
    start: float
    end: float
    log: bool = True

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share


def decades(values: Sequence[float], least: float, most: float) -> tuple[float, float]:
    """The powers of ten that enclose all values, ``least`` and ``most``."""
    low, high = min([*values, least]), max([*values, most])
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))


def powers(low: float, high: float) -> list[float]:
    """Powers of ten from low, which is one itself, to high."""
    return [10.0**k for k in range(round(math.log10(low)), math.floor(math.log10(high) + 1e-9) + 1)]


def label(at_x: float, at_y: float, text: str, anchor: str = "start", fill: str = TEXT, extra: str = "") -> str:
    """A piece of text."""
    return f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="{anchor}" fill="{fill}"{extra}>{escape(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    """A line of a grid."""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{TEXT}" '
        f'stroke-opacity="0.4" stroke-width="1"/>'
    )


def curve(points: Sequence[tuple[float, float]], color: str, extra: str = "") -> str:
    """A line through points."""
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{text}" fill="none" stroke="{color}" stroke-width="2"{extra}/>'


def dot(x: float, y: float, color: str) -> str:
    """A measured point."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>'


def legend(left: float, y: float, width: float, named: dict[str, str]) -> Iterator[str]:
    """Names in their colors, next to each other, in lines as long as the image is wide."""
    x = left
    for name, color in named.items():
        further = 36 + 7.8 * len(name)
        if x > left and x + further > width:
            x, y = left, y + 20
        yield dot(x + 4, y - 4, color)
        yield label(x + 14, y, name, fill=color)
        x += further


def image(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """The whole image."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"]) + "\n"
