"""Two answers of one model that part, because sums of floats are added in two orders."""

import importlib.util
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from docs.figures import bundled

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "Two answers of one model, whose sums of floats are added in two orders"
SIZE = (360, 366)
PROMPT = "import os\n"
MOST, MORE = 24, 12
"""The most tokens before the answers part, and those that are shown after it."""


def law() -> Any:
    """A module of its own of ``examples/law.py``, which has the engine's bits."""
    path = bundled.REPOSITORY / "examples" / "law.py"
    spec = importlib.util.spec_from_file_location("law_of_a_figure", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def from_left_to_right(lanes: np.ndarray) -> np.ndarray:
    """The sums of the last axis in the order of a plain loop, in place of the tree of ``fold``."""
    return np.add.accumulate(lanes, axis=-1, dtype=np.float32)[..., -1]


def facts() -> dict[str, Any]:
    """The engine's greedy answer, and that of the same arithmetic with plain loops in place of trees, up to ``MORE`` tokens
    after they part; and the logits of the two tokens there by each order."""
    llm = bundled.model()
    prompt = llm.tokenize(PROMPT)
    tree = llm.complete(prompt, max_tokens=MOST + MORE, temperature=0, ignore_eos=True).ids
    other = law()
    other.fold = from_left_to_right
    model = other.Model(bundled.file())
    for token in prompt[:-1]:
        model.step(token)
    token, loop, rows = prompt[-1], list[int](), []
    while not (
        parted := next((i for i, pair in enumerate(zip(tree, loop, strict=False)) if pair[0] != pair[1]), 0)
    ) or (len(loop) < parted + MORE):
        rows.append(model.step(token))
        token = other.choose(rows[-1], len(prompt) + len(loop))
        loop.append(token)
        assert parted or len(loop) <= MOST, "the answers do not part"
    pair = [tree[parted], loop[parted]]
    row = llm.logits(prompt + tree[:parted])[-1]
    return {
        "prompt": PROMPT,
        "parted": parted,
        "common": llm.detokenize(tree[:parted]),
        "tree": llm.detokenize(tree[parted : parted + MORE]),
        "loop": llm.detokenize(loop[parted:]),
        "tokens": [bundled.piece(i) for i in pair],
        "logits": {
            name: [f"{values[i]:.5f}" for i in pair] for name, values in (("tree", row), ("loop", rows[parted]))
        },
    }


LEFT, LINE, SIZE_OF_CODE = 10.0, 17.0, 12.5
COLUMNS = 44


def draw(facts: dict[str, Any], page: "Page") -> None:
    """The common text, then what follows by each order, and the logits that decided."""
    letter = page.length("n" * 100, SIZE_OF_CODE, mono=True) / 100

    def code(y: float, line: str, color: str, known: int = 0) -> float:
        """A line of code, of which the first characters are known already; returns where the next one begins."""
        for part in textwrap.wrap(line, COLUMNS, subsequent_indent="    "):
            words = part.lstrip(" ")
            x = LEFT + letter * (len(part) - len(words))
            before = words[:known].rstrip(" ")
            if before:
                page.text(x, y, before, "muted", SIZE_OF_CODE, mono=True)
            after = words[len(before) :].lstrip(" ")
            x += letter * (len(words) - len(after))
            if after:
                page.text(x, y, after, color, SIZE_OF_CODE, mono=True, bold=color != "muted")
            known, y = 0, y + LINE
        return y

    page.text(LEFT, 20, "One model, one prompt, temperature 0", bold=True, size=14)
    y = code(44, facts["prompt"].strip(), "muted")
    *whole, last = facts["common"].split("\n")
    for line in whole:
        y = code(y, line, "muted")
    for way, color, name in (("tree", "green", "Sums by a tree"), ("loop", "orange", "Sums from left to right")):
        y += 14
        page.line([(LEFT, y - 10), (page.width - LEFT, y - 10)], "faint", 1)
        page.text(LEFT, y + 8, name, color, 13, bold=True)
        y += 30
        first, *rest = (last + facts[way]).split("\n")
        y = code(y, first, color, len(last))
        for line in rest:
            y = code(y, line, color)
        page.text(LEFT, y + 4, "logits", "muted", 12.5)
        for piece, logit in zip(facts["tokens"], facts["logits"][way], strict=True):
            won = logit == max(facts["logits"][way], key=float)
            page.text(LEFT + 110, y + 4, piece, "text" if won else "muted", 12.5, "end", mono=True, bold=won)
            page.text(LEFT + 190, y + 4, logit, "text" if won else "muted", 12.5, "end", mono=True, bold=won)
            y += LINE
