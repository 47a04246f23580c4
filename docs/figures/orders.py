"""The two orders of sums that ``examples/law.py`` defines: units in chains, and chunks in groups."""

from typing import TYPE_CHECKING, Any

import numpy as np

from docs.figures.parting import law

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "The order in which the units of a product and the chunks of attention are added"
SIZE = (360, 420)
UNITS, POSITIONS = 16, 1280
"""The units of a row, and the positions that a query sees."""


def facts() -> dict[str, Any]:
    """What calls of the law's functions add: the units of each chain, and the chunks of each group."""
    return {"units": UNITS, "chains": chains(), "positions": POSITIONS, "groups": chunks()}


def chains() -> list[list[int]]:
    """The units of each chain, in the order in which ``Matrix.times`` adds them."""
    module, found = law(), list[list[int]]()
    matrix = object.__new__(module.Matrix)
    matrix.d, matrix.w, matrix.minimums = np.ones((UNITS, 1), np.float32), np.ones((UNITS, 1, 256)), []
    one_by_one = module.fma

    def fma(scale: Any, value: Any, chain: Any) -> Any:
        if not chain.any():
            found.append([])
        found[-1].append(int(np.rint(scale * 127)) - 1)
        return one_by_one(scale, value, chain)

    module.fma = fma
    matrix.times(np.repeat(np.arange(1, UNITS + 1, dtype=np.float32), 256))  # the scale of unit u is (u + 1) / 127
    return found


def chunks() -> list[list[int]]:
    """The first positions of the chunks of each group, in the order in which ``attention`` joins them."""
    module, found, chunk = law(), list[list[int]](), list[int]()
    join, chunk_state = module.join, module.chunk_state

    def state_of(scores: Any, values: Any) -> Any:
        chunk.append(int(values[0, 0, 0]))
        return chunk_state(scores, values)

    def joined(left: Any, right: Any) -> Any:
        if chunk:
            found[-1:] = [[*found[-1], chunk.pop()]] if np.isfinite(left[0]).all() else [*found[-1:], [chunk.pop()]]
        return join(left, right)

    module.chunk_state, module.join = state_of, joined
    values = np.arange(POSITIONS, dtype=np.float32)[None, :, None]
    module.attention(np.ones((1, 1, 1), np.float32), np.zeros_like(values), values)
    return found


LEFT, RIGHT = 8.0, 352.0


def row(page: "Page", y: float, parts: list[list[int]], color: str, names: list[str]) -> float:
    """Numbered boxes, one for each element, in parts with arrows through them; a box for each part; and arrows through
    these.  Returns the y of the end."""
    count, gap = sum(map(len, parts)), 5.0
    wide = (RIGHT - LEFT - gap * (len(parts) - 1)) / count
    x, number, middles = LEFT, 0, []
    for part, name in zip(parts, names, strict=True):
        begin = x
        for _ in part:
            page.box(x + 0.5, y, wide - 1, 22, color, 0.3, 0.8)
            page.text(x + wide / 2, y + 15, str(number), "text", 12, "middle")
            x, number = x + wide, number + 1
        page.line([(begin + 2, y + 30), (x - 1, y + 30)], color, 1.4, arrow=True)
        page.box(begin + 0.5, y + 40, x - begin - 1, 22, color, 0.12, 0.8)
        page.text((begin + x) / 2, y + 55, name, "text", 12, "middle")
        middles.append((begin + x) / 2)
        x += gap
    page.line([(LEFT + 2, y + 72), (RIGHT - 1, y + 72)], color, 1.4, arrow=True)
    page.box(LEFT + 0.5, y + 82, RIGHT - LEFT - 1, 22, color, 0.12, 0.8)
    return y + 97


def draw(facts: dict[str, Any], page: "Page") -> None:
    """Above, a product; below, attention."""
    page.text(LEFT, 20, "A product: units, chains, result", bold=True, size=14)
    page.text(LEFT, 39, f"{facts['units']} units of 256 weights in eight chains", "muted", 12.5)
    page.text(LEFT, 55, "Inside a unit: exact integers, in any order", "muted", 12.5)
    chains = facts["chains"]
    y = row(page, 68, chains, "blue", [str(i) for i in range(len(chains))])
    page.text((LEFT + RIGHT) / 2, y, "result of the row", "text", 12.5, "middle")
    y += 40
    page.text(LEFT, y, "Attention: chunks, groups, result", bold=True, size=14)
    page.text(LEFT, y + 19, f"{facts['positions']} positions in chunks of 64, eight in a group", "muted", 12.5)
    page.text(LEFT, y + 35, "Inside a chunk: one maximum and one tree", "muted", 12.5)
    groups = facts["groups"]
    y = row(page, y + 48, groups, "green", [f"group {i}" for i in range(len(groups))])
    page.text((LEFT + RIGHT) / 2, y, "result of the head", "text", 12.5, "middle")
    page.text(LEFT, y + 32, "Arrows: added from the first to the last, with", "muted", 12.5)
    page.text(LEFT, y + 48, "one rounding for each addition", "muted", 12.5)
