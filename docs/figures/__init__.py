"""Figures of this book.  Each is drawn from facts that its module takes from the code, the bundled model or a page.

A module of a figure has

- ``TITLE``: what the figure shows, in one line;
- ``SIZE``: width and height in pixels;
- ``facts()``: everything that the figure depends on, as a value that JSON can represent;
- ``draw(facts, page)``: the drawing, on a page of ``docs/figures/style.py``.

Only drawing needs matplotlib.  An image carries a digest of its facts, so that a test can tell whether it is up to date.
"""

import hashlib
import json
from importlib import import_module
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent.parent / "images"
"""The folder of the images."""

FIGURES = {
    "gguf-file": "docs.figures.gguf_file",
    "q4k-block": "docs.figures.q4k_block",
    "tokens": "docs.figures.tokens",
    "layer": "docs.figures.layer",
    "lens": "docs.figures.lens",
    "pages": "docs.figures.pages",
    "chunks": "docs.figures.chunks",
    "sampling": "docs.figures.sampling",
    "record": "docs.figures.record",
    "step": "docs.figures.step",
    "answer": "docs.figures.answer",
    "orders": "docs.figures.orders",
    "timeline": "docs.figures.timeline",
    "loads": "docs.figures.loads",
}
"""The module of each figure that is drawn twice, for a light and for a dark page."""

PLOTS = {
    "roofline": "benchmarks.plot_roofline",
    "depth": "benchmarks.plot_depth",
    "comparison": "benchmarks.plot_comparison",
    "speedup": "benchmarks.plot_speedup",
    "users": "benchmarks.plot_users",
    "rivals": "docs.figures.rivals",
    "delta-rule": "docs.figures.delta_rule",
    "lanes": "docs.figures.lanes",
    "warpgroup": "docs.figures.warpgroup",
    "batches": "docs.figures.batches",
    "parting": "docs.figures.parting",
}
"""The module of each figure or plot that is drawn once, in colors for both pages."""


def module(name: str) -> Any:
    """The module of a figure or plot."""
    return import_module({**FIGURES, **PLOTS}[name])


def files(name: str) -> dict[str, Path]:
    """The images of a figure, by the theme that each is drawn in."""
    themes = (
        {theme: f"{name}-{theme}.svg" for theme in ("light", "dark")} if name in FIGURES else {"both": f"{name}.svg"}
    )
    return {theme: IMAGES / file for theme, file in themes.items()}


def digest(facts: Any) -> str:
    """A short text that differs for different facts."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
