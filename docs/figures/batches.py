"""The rounds in which a scheduler computes five requests in three slots: what is read of prompts, and which tokens follow."""

from typing import TYPE_CHECKING, Any

import engine
from engine.decode.prefill import Prefilling
from engine.decode.request import Request
from engine.decode.running import Running
from engine.sampling.sampler import Sampler, SamplerParams

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "Five requests in three slots, round by round"
SIZE = (360, 432)
SLOTS = 3
SLICE = 16
"""The most rows of a slice of a prompt.  Larger ones are read where they take little time, which differs from run to run."""

REQUESTS = (
    ("A", 0, 13, "import os\nimport sys\n"),
    (
        "B",
        0,
        4,
        "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
    ),
    ("C", 2, 9, "for i in range("),
    ("D", 3, 6, "class Stack:\n    def push(self, item):\n        "),
    ("E", 6, 5, "while True:\n    "),
)
"""Name, the round in which the request arrives, the number of tokens of its answer, and its prompt."""


def slot_of(request: Request) -> int | None:
    """The slot that a request has."""
    state = request.state
    return state.sequence.slot if isinstance(state, (Prefilling, Running)) else None


def facts() -> dict[str, Any]:
    """By request: when it arrives, and for each round in which it had a slot [round, slot, tokens of its prompt that were
    read, tokens of its answer]."""
    llm = engine.load(device="cpu", n_ctx=256, parallel=SLOTS, batch_size=SLICE)
    requests: dict[str, Request] = {}
    sequences = {sequence.slot: sequence for sequence in llm.model.sequences}
    done: dict[str, list[list[int]]] = {name: [] for name, *_ in REQUESTS}
    rounds = 0
    while rounds == 0 or any(not request.done for request in requests.values()):
        for name, arrival, count, prompt in REQUESTS:
            if arrival == rounds:
                sampler = Sampler(SamplerParams(temperature=0), llm.config.n_vocab)
                requests[name] = Request(llm.tokenize(prompt), sampler, count)
                llm.core.submit(requests[name])
        slots = {name: slot_of(request) for name, request in requests.items()}
        read = {name: request.n_prompt - left(request, sequences) for name, request in requests.items()}
        items = {name: len(request.items) for name, request in requests.items()}
        llm.core.step()
        for name, request in requests.items():
            slot = slot_of(request) if slots[name] is None else slots[name]
            tokens = len(request.items) - items[name]
            prompt_rows = request.n_prompt - left(request, sequences) - read[name]
            if slot is not None and (tokens or prompt_rows):
                done[name].append([rounds, slot, prompt_rows, tokens])
        rounds += 1
    llm.close()
    return {
        "slots": SLOTS,
        "rounds": rounds,
        "requests": [[name, arrival, done[name]] for name, arrival, *_ in REQUESTS],
    }


def left(request: Request, sequences: dict[int, Any]) -> int:
    """The tokens of its prompt that have not been read for a request."""
    slot = slot_of(request)
    if slot is None:
        return request.n_prompt if not request.items else 0
    return max(0, request.n_prompt - sequences[slot].length)


COLORS = ("blue", "green", "purple", "orange", "red")
LEFT, HIGH, TOP = 52, 66, 76


def draw(facts: dict[str, Any], page: "Page") -> None:
    """A row for each slot, a column for each round; below, what waits, and how many rows the pass of a round's tokens has."""
    rounds, slots = facts["rounds"], facts["slots"]
    wide = (page.width - LEFT - 8) / rounds
    page.text(8, 20, "Five requests in three slots", bold=True, size=14)
    page.text(8, 38, "A column is a round. Bars: tokens of a prompt.", "muted", 12.5)
    page.text(8, 54, "Dots: tokens of the answer.", "muted", 12.5)
    bottom = TOP + slots * HIGH
    for slot in range(slots):
        y = TOP + slot * HIGH
        page.text(8, y + 40, f"slot {slot}", "text", 12.5)
        page.line([(LEFT, y + HIGH - 8), (page.width - 8, y + HIGH - 8)], "faint", 1)
    rows = [0] * rounds
    for i, (name, arrival, did) in enumerate(facts["requests"]):
        color = COLORS[i]
        for at, slot, read, tokens in did:
            x, base = LEFT + at * wide, TOP + slot * HIGH + HIGH - 8
            if read:
                page.box(x + 1, base - 1.5 * read, wide - 2, 1.5 * read, color, 0.35, 0.8)
                page.text(x + wide / 2, base - 1.5 * read - 3, str(read), color, 12, "middle")
            for k in range(tokens):
                page.dot(x + wide / 2, base - 6 - 8 * k - (1.5 * read + 14 if read else 0), color, 3)
            rows[at] += min(tokens, 1) if not read else max(0, tokens - 1)
        first, slot = did[0][:2]
        page.text(LEFT + first * wide + 1, TOP + slot * HIGH + 10, name, color, 14, bold=True)
        y = bottom + 20 + 15 * i
        page.text(LEFT - 8, y + 4, name, color, 12.5, "end", bold=True)
        page.dot(LEFT + arrival * wide + 3, y, color, 3)
        if first > arrival:
            page.line([(LEFT + arrival * wide + 3, y), (LEFT + first * wide, y)], color, 2)
    page.text(8, bottom + 10, "waits", "text", 12.5)
    y = bottom + 20 + 15 * len(facts["requests"]) + 18
    page.text(8, y, "rows", "text", 12.5)
    for at, count in enumerate(rows):
        page.text(LEFT + (at + 0.5) * wide, y, str(count), "text" if count else "muted", 12, "middle")
    page.text(8, y + 20, "rows: those of the pass that continues answers", "muted", 12.5)
