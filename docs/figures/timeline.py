"""The steps in which five requests are answered: one after another, in fixed batches, and with continuous batching."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import engine
from docs.figures.batches import slot_of
from engine.decode.request import Request
from engine.sampling.sampler import Sampler, SamplerParams

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "Five requests, one after another, in fixed batches and with continuous batching"
SIZE = (360, 336)
PROMPT = "import"
REQUESTS = {"A": 4, "B": 12, "C": 3, "D": 7, "E": 5}
"""The number of tokens of each answer.  All requests arrive at the beginning."""

WAYS = {
    "one": (1, "One after another"),
    "fixed": (3, "Fixed batches of three"),
    "continuous": (3, "Continuous batching"),
}
"""The number of slots of each way, and its title."""


def groups(way: str) -> Iterator[list[str]]:
    """The names of the requests that are given to the engine together, which has answered all earlier ones."""
    names, size = list(REQUESTS), 3 if way == "fixed" else len(REQUESTS)
    for first in range(0, len(names), size):
        yield names[first : first + size]


def facts() -> dict[str, Any]:
    """By way: for each step that continues answers, the request in each slot, "" where there is none."""
    found: dict[str, list[list[str]]] = {}
    for way, (slots, _) in WAYS.items():
        steps: list[list[str]] = []
        llm = engine.load(device="cpu", n_ctx=256, parallel=slots)
        for names in groups(way):
            requests = {}
            for name in names:
                sampler = Sampler(SamplerParams(temperature=0), llm.config.n_vocab)
                prompt = llm.tokenize(PROMPT)  # one token, which the first step reads
                requests[name] = Request(prompt, sampler, REQUESTS[name], begun=True, salt=name)
                llm.core.submit(requests[name])
            while any(not request.done for request in requests.values()):
                before = {name: (slot_of(request), len(request.items)) for name, request in requests.items()}
                llm.core.step()
                row = [""] * slots
                for name, request in requests.items():
                    slot, items = before[name]
                    slot = slot_of(request) if slot is None else slot
                    if slot is not None and len(request.items) > items:
                        row[slot] = name
                steps.append(row)
        llm.close()
        found[way] = steps
    return found


COLORS = dict(zip(REQUESTS, ("blue", "orange", "green", "purple", "red"), strict=True))
LEFT, HIGH = 8.0, 22.0


def draw(facts: dict[str, Any], page: "Page") -> None:
    """A row for each slot and a column for each step; a cell has the color of its request."""
    wide = (page.width - 2 * LEFT) / max(len(steps) for steps in facts.values())
    page.text(LEFT, 20, "Five requests", bold=True, size=14)
    page.text(LEFT, 39, "A row is a slot. A column is a step, which", "muted", 12.5)
    page.text(LEFT, 55, "reads all weights once. Empty: unused slots.", "muted", 12.5)
    y = 84.0
    for way, (slots, title) in WAYS.items():
        steps = facts[way]
        page.text(LEFT, y, title, "text", 13, bold=True)
        page.text(page.width - LEFT, y, f"{len(steps)} steps", "text", 13, "end")
        y += 9
        for slot in range(slots):
            known = ""
            for at, row in enumerate(steps):
                name, x = row[slot], LEFT + at * wide
                color = COLORS[name] if name else "faint"
                page.box(x, y, wide - 1.5, HIGH - 3, color, 0.35 if name else 0, 0.8)
                if name and name != known:
                    page.text(x + wide / 2 - 0.75, y + 14, name, color, 12, "middle", bold=True)
                known = name
            y += HIGH
        y += 31
