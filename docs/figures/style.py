"""What the figures have in common: two themes, and a page on which coordinates are pixels from the upper left corner.

Text stays text in the SVG, in a generic font of the reader's machine.  matplotlib measures it in DejaVu Sans, which is wider
than most fonts, so text that fits here fits there.  The same facts give the same file.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.textpath import TextPath

from docs.figures import digest

Point = tuple[float, float]

THEMES = {
    "light": {
        "text": "#1b1c1f",
        "muted": "#5a5c63",
        "faint": "#c9cbd1",
        "blue": "#2563c9",
        "green": "#1f8074",
        "orange": "#a9650a",
        "red": "#bf3f3c",
        "purple": "#7351c2",
    },
    "dark": {
        "text": "#cfd0d0",
        "muted": "#9ca0a5",
        "faint": "#4a4d52",
        "blue": "#6aa5f8",
        "green": "#4cc0b0",
        "orange": "#e0a548",
        "red": "#ea8a86",
        "purple": "#b49df0",
    },
    # Midtones that can be read on white and on black.
    "both": {
        "text": "#808080",
        "muted": "#808080",
        "faint": "#80808066",
        "blue": "#3f86d6",
        "green": "#2a9d8f",
        "orange": "#c98a1b",
        "red": "#d1605e",
        "purple": "#8a6fd1",
    },
}
"""Colors by name: text and lines are those of the book's theme."""

COLORS = ("purple", "blue", "green", "orange", "red")
"""Colors of lines in a plot, in order."""

matplotlib.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "figures",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.monospace": ["DejaVu Sans Mono"],
        "text.parse_math": False,
        "path.simplify": False,
    }
)


class Page:
    """A drawing in one theme; colors are names of ``THEMES``."""

    def __init__(self, size: tuple[int, int], theme: str) -> None:
        """size: width and height in pixels."""
        self.width, self.height = width, height = size
        self.colors = THEMES[theme]
        self.figure = Figure((width / 72, height / 72), dpi=72, facecolor="none")
        FigureCanvasSVG(self.figure)
        self._axes: Any = self.figure.add_axes((0, 0, 1, 1), facecolor="none")
        self._axes.set(xlim=(0, width), ylim=(height, 0))
        self._axes.axis("off")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        color: str = "text",
        size: float = 13,
        anchor: str = "start",
        mono: bool = False,
        bold: bool = False,
    ) -> None:
        """One line of text whose baseline is at y; anchor: which part of it is at x, "start", "middle" or "end".  Runs of
        spaces are not allowed: browsers show one."""
        assert "  " not in text
        align = {"start": "left", "middle": "center", "end": "right"}[anchor]
        family, weight = "monospace" if mono else "sans-serif", "bold" if bold else "normal"
        style = {"size": size, "family": family, "weight": weight, "color": self.colors[color]}
        self._axes.text(x, y, text, ha=align, va="baseline", **style)

    def length(self, text: str, size: float = 13, mono: bool = False, bold: bool = False) -> float:
        """The width of a line of text in pixels."""
        font = FontProperties(family="monospace" if mono else "sans-serif", weight="bold" if bold else "normal")
        box = TextPath((0, 0), text.replace(" ", "n"), size=size, prop=font).get_extents()
        return float(box.x1)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        color: str = "muted",
        shade: float = 0.16,
        edge: float = 1.0,
        radius: float = 0,
    ) -> None:
        """A rectangle, filled with ``shade`` of its color; edge: the width of its outline, 0: none."""
        rgb = matplotlib.colors.to_rgb(self.colors[color][:7])
        style: dict[str, Any] = {"facecolor": (*rgb, shade), "edgecolor": (*rgb, 1.0 if edge else 0.0)}
        style |= {"linewidth": edge, "clip_on": False}
        if radius:
            shape = f"round,pad=0,rounding_size={radius}"
            self._axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, **style))
        else:
            self._axes.add_patch(Rectangle((x, y), width, height, **style))

    def line(
        self, points: Sequence[Point], color: str = "muted", width: float = 1.2, arrow: bool = False, dash: bool = False
    ) -> None:
        """A line through points; arrow: with a head at its end."""
        points = list(points)
        style: dict[str, Any] = {"color": self.colors[color], "linewidth": width, "clip_on": False}
        if arrow:
            head = "-|>,head_length=5,head_width=2.6"
            self._axes.add_patch(
                FancyArrowPatch(
                    points[-2], points[-1], arrowstyle=head, shrinkA=0, shrinkB=0, mutation_scale=1, **style
                )
            )
            points = points[:-1]
        if len(points) > 1:
            xs, ys = zip(*points, strict=True)
            self._axes.plot(xs, ys, linestyle=(0, (4, 3)) if dash else "-", solid_joinstyle="miter", **style)

    def dot(self, x: float, y: float, color: str, radius: float = 4) -> None:
        """A filled circle."""
        self._axes.plot(
            [x], [y], "o", markersize=2 * radius, color=self.colors[color], markeredgewidth=0, clip_on=False
        )

    @staticmethod
    def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
        """Rising places, moved as little as needed so that neighbors are ``gap`` apart and all lie in low .. high."""
        found = list(places)
        for i in range(len(found)):
            found[i] = max(found[i], low if i == 0 else found[i - 1] + gap)
        for i in reversed(range(len(found))):
            found[i] = min(found[i], high if i == len(found) - 1 else found[i + 1] - gap)
        return found

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        """Axes of matplotlib for a plot whose area has this upper left corner and size."""
        w, h = self.width, self.height
        axes = self.figure.add_axes((x / w, 1 - (y + height) / h, width / w, height / h), facecolor="none")
        axes.tick_params(colors=self.colors["text"], labelsize=13, length=0, pad=6)
        axes.tick_params(which="minor", length=0)
        axes.grid(color=self.colors["faint"], linewidth=1)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes

    def curve(self, axes: Any, points: Sequence[Sequence[float]], color: str, line: float = 2, dot: float = 8) -> None:
        """A line through points (x, y) of a plot, with a dot at each; line, dot: its width and their size, 0: none."""
        xs, ys = zip(*points, strict=True)
        style = {"linewidth": line, "marker": "o", "markersize": dot, "markeredgewidth": 0, "clip_on": False}
        axes.plot(xs, ys, color=self.colors[color], **style)

    def legend(self, x: float, y: float, names: dict[str, str]) -> None:
        """Names in their colors, below one another."""
        for i, (name, color) in enumerate(names.items()):
            self.dot(x + 4, y + 19 * i - 4, color)
            self.text(x + 15, y + 19 * i, name, color)

    def svg(self, title: str, facts: Any) -> str:
        """The SVG, with a digest of the facts in its description."""
        file = io.StringIO()
        description = f"facts {digest(facts)}, drawn by python -m docs.figures"
        data = {"Title": title, "Description": description, "Date": None, "Creator": None, "Format": None, "Type": None}
        self.figure.savefig(file, format="svg", transparent=True, metadata=data)
        text = re.sub(r"'DejaVu Sans Mono', monospace|'DejaVu Sans Mono'", "monospace", file.getvalue())
        text = re.sub(r"'DejaVu Sans', sans-serif|'DejaVu Sans'", "sans-serif", text)
        text = re.sub(
            r'width="[\d.]+pt" height="[\d.]+pt"', f'width="{self.width}" height="{self.height}"', text, count=1
        )
        text = re.sub(r' transform="rotate\(-0 [-\d. ]+\)"', "", text)
        return re.sub(r"[ \t]+$", "", text, flags=re.M)
