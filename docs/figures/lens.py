"""The logit lens: what the bundled model would say after each layer, for the tokens of a text."""

from typing import TYPE_CHECKING, Any

import numpy as np

from docs.figures import bundled

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "The most probable next token after each layer, for the tokens of a text"
SIZE = (480, 372)
TEXT = "def add(a, b):\n    return"
SHOWN = 6
"""The number of last tokens that are shown."""


def facts() -> dict[str, Any]:
    """For each token, the most probable next token after each layer, with its probability."""
    llm = bundled.model()
    ids = llm.tokenize(TEXT)
    columns = []
    for at in range(len(ids) - SHOWN, len(ids)):
        trace = llm.trace(ids, token=at, top=1, drafts=0)
        streams = [trace.embedding, *(layer.stream for layer in trace.layers)]
        said = [stream.lens[0] for stream in streams]
        found = [[bundled.piece(each.id), round(float(np.exp(each.logprob)), 3)] for each in said]
        columns.append({"read": bundled.piece(ids[at]), "said": found})
    return {"text": TEXT, "columns": columns}


LEFT, TOP, CELL, LINE = 66, 66, 66, 36


def draw(facts: dict[str, Any], page: "Page") -> None:
    """A cell for each token and layer, shaded by probability; those that agree with the last layer have an outline."""
    page.text(16, 24, "Token", bold=True)
    rows = ["none", *map(str, range(len(facts["columns"][0]["said"]) - 1))]
    page.text(16, TOP - 14, "Layer", bold=True)
    for i, name in enumerate(rows):
        page.text(16, TOP + LINE * i + 22, name, "muted")
    for j, column in enumerate(facts["columns"]):
        x = LEFT + CELL * j
        page.text(x + CELL / 2, 24, short(column["read"]), "text", 13, "middle", mono=True, bold=True)
        for i, (piece, p) in enumerate(column["said"]):
            same = piece == column["said"][-1][0]
            color = "green" if same else "blue"
            page.box(x + 2, TOP + LINE * i, CELL - 4, LINE - 4, color, 0.06 + 0.5 * p, 1.4 if same else 0, radius=3)
            page.text(x + CELL / 2, TOP + LINE * i + 21, short(piece), "text", 12.5, "middle", mono=True)
    y = TOP + LINE * len(rows) + 22
    page.text(16, y, "Darker: more probable. Green, with an outline: what the last layer says, too.", "muted", 12)
    page.text(16, y + 22, "␣ is a space and ⏎ a line break.", "muted", 12)


def short(piece: str) -> str:
    """A piece that fits into a cell."""
    return piece if len(piece) <= 7 else piece[:6] + "…"
