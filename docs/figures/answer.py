"""How one command becomes an answer: the tokens of the prompt, the logits, the choice, and the loop."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from docs.figures import bundled

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "From a prompt to an answer, one token at a time"
SIZE = (360, 346)
PROMPT = "def add(a, b):\n    return"
SHOWN = 3


def facts() -> dict[str, Any]:
    """The tokens of a prompt, the most probable ones after it, and those of the answer."""
    llm = bundled.model()
    ids = llm.tokenize(PROMPT)
    logits = llm.logits(ids)[-1].astype(np.float64)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    best = np.argsort(-p)[:SHOWN]
    answer = llm.complete(PROMPT, max_tokens=16, temperature=0, stop="\n")
    return {
        "tokens": [bundled.piece(i) for i in ids],
        "ids": ids,
        "vocabulary": llm.config.n_vocab,
        "layers": len(llm.config.layers),
        "parameters": round(sum(math.prod(tensor.shape) for tensor in bundled.file().tensors.values()) / 1e6, 1),
        "best": [[bundled.piece(int(i)), f"{100 * p[i]:.1f} %"] for i in best],
        "answer": [bundled.piece(i) for i in answer.ids],
    }


LEFT, RIGHT, MIDDLE = 8.0, 352.0, 180.0


def cells(page: "Page", y: float, pieces: list[str], color: str) -> float:
    """Tokens in boxes, in as many lines as they need; returns the y of the next line."""
    x = LEFT
    for piece in pieces:
        wide = page.length(piece, 12, mono=True) + 9
        if x + wide > RIGHT:
            x, y = LEFT, y + 25
        page.box(x, y, wide, 21, color, 0.25, 0.8)
        page.text(x + wide / 2, y + 15, piece, "text", 12, "middle", mono=True)
        x += wide + 3
    return y + 25


def draw(facts: dict[str, Any], page: "Page") -> None:
    """From top to bottom: tokens, model, probabilities, choice; an arrow leads back to the tokens."""
    page.text(LEFT, 20, "From a prompt to an answer", bold=True, size=14)
    page.text(LEFT, 42, f"The prompt is divided into {len(facts['tokens'])} tokens.", "muted", 12.5)
    y = cells(page, 51, facts["tokens"], "blue")
    page.line([(MIDDLE, y), (MIDDLE, y + 18)], arrow=True)
    y += 20
    page.box(LEFT, y, RIGHT - LEFT, 44, "purple", 0.2, 1, 6)
    page.text(MIDDLE, y + 18, f"the model: {facts['layers']} layers", "text", 13, "middle", bold=True)
    page.text(MIDDLE, y + 35, f"{facts['parameters']} million weights", "muted", 12.5, "middle")
    y += 44
    page.line([(MIDDLE, y), (MIDDLE, y + 18)], arrow=True)
    y += 36
    page.text(LEFT, y, f"A probability for each of {facts['vocabulary']} tokens, such as", "muted", 12.5)
    y += 9
    for piece, share in facts["best"]:
        page.text(LEFT + 60, y + 15, piece, "text", 12, "end", mono=True)
        page.box(LEFT + 68, y + 3, max(1.0, 2.1 * float(share.split()[0])), 15, "green", 0.4, 0.8)
        page.text(RIGHT, y + 15, share, "text", 12, "end")
        y += 23
    y += 12
    page.text(LEFT, y + 5, "One token is chosen and appended to the text.", "muted", 12.5)
    y = cells(page, y + 14, facts["answer"], "green")
    page.text(LEFT, y + 13, "The model reads each chosen token before the", "muted", 12.5)
    page.text(LEFT, y + 29, "next one is chosen, until the answer ends.", "muted", 12.5)
