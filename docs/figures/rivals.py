"""The speed of this engine relative to llama.cpp's, from the results of the book: a bar for answers and one for prompts."""

from typing import TYPE_CHECKING, Any

from docs import results

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "Speed relative to llama.cpp, of answers and prompts of each model"
SIZE = (480, 480)

KINDS = (("answer", "blue"), ("prompt", "green"))


def facts() -> list[list[Any]]:
    """[model, device, answers, prompts] of each row of the table: ratios at the start of the context."""
    header, _, *rows = (line.strip("|").split("|") for line in results.glance())
    names = [name.strip() for name in header]
    cells = [dict(zip(names, (cell.strip() for cell in row), strict=True)) for row in rows]
    return [
        [row["model"], row["device"], float(row["answer"].rstrip(" ×")), float(row["prompt"].rstrip(" ×"))]
        for row in cells
    ]


def draw(facts: list[list[Any]], page: "Page") -> None:
    """Bars from the left, and a line where both engines would be equally fast."""
    page.text(16, 22, "Speed relative to llama.cpp in the same formats", bold=True)
    page.legend(16, 46, {f"{kind}s": color for kind, color in KINDS})
    left, right, top = 176, page.width - 44, 88
    most = max(value for _, _, *values in facts for value in values)
    scale, step = (right - left) / most, (page.height - top - 34) / len(facts)
    for i, (model, device, *values) in enumerate(facts):
        y = top + step * i
        page.text(16, y + 16, model)
        page.text(16, y + 33, device, "muted")
        for (_, color), value, shift in zip(KINDS, values, (4, 22), strict=True):
            page.box(left, y + shift, value * scale, 15, color, 0.85, edge=0)
            page.text(left + value * scale + 5, y + shift + 12, f"{value:.2f}", color)
    page.line([(left + scale, top - 4), (left + scale, page.height - 34)], "text", dash=True)
    page.text(left + scale, page.height - 14, "llama.cpp", "muted", anchor="middle")
