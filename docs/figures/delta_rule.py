"""One token of the gated delta rule, in numbers: forget, read, correct, write."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "One token of the delta rule: forget, read, correct, write"
SIZE = (360, 430)
DECAY, BETA = 0.75, 0.75


def facts() -> dict[str, Any]:
    """A small state and what each step makes of it, by the formula of ``docs/delta-rule.md``."""
    n = 6
    # Shades that differ from cell to cell; the entries of the key are such that its length is 1.
    before = np.array([[(3 * i + 5 * j + i * j) % 7 for i in range(n)] for j in range(n)]) / 12
    key = np.array([0.8, 0.2, 0, 0.5, 0, 0.26])
    key /= np.linalg.norm(key)
    value = np.array([0.8, 0.2, 0.3, 0.9, 0.4, 0.6])
    forgotten = DECAY * before
    read = forgotten @ key
    delta = BETA * (value - read)
    after = forgotten + np.outer(delta, key)
    found = {"before": before, "forgotten": forgotten, "key": key, "read": read, "value": value}
    found |= {"delta": delta, "after": after}
    rounded = {name: np.round(array, 4).tolist() for name, array in found.items()}
    return {"decay": DECAY, "beta": BETA, **rounded}


CELL = 18


def cells(page: "Page", x: float, y: float, values: Any, color: str) -> None:
    """A matrix, or a column, as cells whose shade is the magnitude of their number; negative ones have a bar."""
    for j, row in enumerate(np.atleast_2d(np.array(values))):
        for i, number in enumerate(row):
            at = x + CELL * i, y + CELL * j
            page.box(*at, CELL, CELL, color, min(1.0, abs(number)) * 0.85, 0.8)
            if number < 0:
                page.line([(at[0] + 5, at[1] + CELL / 2), (at[0] + CELL - 5, at[1] + CELL / 2)], "text", 1.4)


def column(values: Any) -> Any:
    """A vector from top to bottom."""
    return np.array(values)[:, None]


def draw(facts: dict[str, Any], page: "Page") -> None:
    """Four steps, two in a row."""
    high = 6 * CELL

    def head(x: float, y: float, n: int, name: str, says: str) -> None:
        page.text(x, y, f"{n} {name}", bold=True, size=14)
        page.text(x, y + 18, says, "muted", 13)

    x, y = 12.0, 20.0
    head(x, y, 1, "forget", f"M ← e M, e = {facts['decay']}")
    cells(page, x + 20, y + 54, facts["forgotten"], "muted")
    page.text(x + 20, y + 48, "i: the key →", "muted", 12.5)
    page.text(x + 20, y + 72 + high, "j, down: the value", "muted", 12.5)

    x = 190.0
    head(x, y, 2, "read", "what M has for k")
    cells(page, x + 20, y + 32, facts["key"], "blue")
    page.text(x + 12, y + 46, "k", "blue", 14, "end", bold=True)
    cells(page, x + 20, y + 54, facts["forgotten"], "muted")
    cells(page, x + 28 + high, y + 54, column(facts["read"]), "orange")
    page.text(x + 28 + high + CELL / 2, y + 72 + high, "M k", "orange", 14, "middle", bold=True)

    x, y = 12.0, 236.0
    head(x, y, 3, "correct", f"δ ← β (v − M k), β = {facts['beta']}")
    top, middle = y + 54, y + 54 + high / 2 + 5
    for at, name, values, color in (
        (x + 2, "v", facts["value"], "green"),
        (x + 44, "M k", facts["read"], "orange"),
        (x + 114, "δ", facts["delta"], "red"),
    ):
        cells(page, at, top, column(values), color)
        page.text(at + CELL / 2, top + high + 18, name, color, 14, "middle", bold=True)
    page.text(x + 32, middle, "−", "text", 14, "middle")
    page.text(x + 88, middle, "× β =", "text", 14, "middle")

    x = 190.0
    head(x, y, 4, "write", "M ← M + δ kᵀ")
    cells(page, x + 42, y + 32, facts["key"], "blue")
    page.text(x + 34, y + 46, "k", "blue", 14, "end", bold=True)
    cells(page, x + 16, top, column(facts["delta"]), "red")
    page.text(x + 16 + CELL / 2, top + high + 18, "δ", "red", 14, "middle", bold=True)
    added = np.outer(facts["delta"], facts["key"])
    cells(page, x + 42, top, facts["forgotten"], "muted")
    for j, row in enumerate(added):
        for i, number in enumerate(row):
            page.box(x + 42 + CELL * i, top + CELL * j, CELL, CELL, "purple", min(1.0, 1.6 * abs(number)), 0)
    page.text(x + 42, top + high + 18, "what is added", "purple", 12.5)
