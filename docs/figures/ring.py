"""The rings of a cache: where the kernel that stores keys and values puts each position."""

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cache.kv import KVCache, LayerShape
from engine.cache.sequence import Sequence
from engine.cache.types import CHUNK, F32
from engine.cpu.attention import append, first_visible
from engine.cpu.backend import Backend

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "The rings of a layer with a window and of one without"
SIZE = (480, 490)
LENGTH, CONTEXT, ROWS, WINDOW = 300, 384, 64, 128


def facts() -> dict[str, Any]:
    """Positions 0 .. LENGTH - 1 are stored one by one; each value is its own position, so that a ring tells what it holds."""
    shapes = [LayerShape(1, 1, 1), LayerShape(1, 1, 1, window=WINDOW)]
    cache = KVCache(shapes, CONTEXT, ROWS, F32, Backend().zeros)
    sequence = Sequence(cache)
    for layer in cache.layers:
        layer.values[:] = -1
    for p in range(LENGTH):
        sequence.claim(p, 1)
        sequence.commit([p])
        for layer in cache.layers:
            append(np.full((1, 1, 1), p, np.float32), np.array([p], np.int32), True, layer.values, 0, 1)
    back = next(length for length in range(1, LENGTH + 1) if sequence.can_truncate(length))
    return {
        "length": LENGTH,
        "context": CONTEXT,
        "window": WINDOW,
        "rows": ROWS,
        "chunk": CHUNK,
        "visible": int(first_visible(LENGTH, WINDOW)),
        "back": back,
        "rings": [[runs(chunk) for chunk in layer.values[0, :, :, 0].astype(int).tolist()] for layer in cache.layers],
    }


def runs(lanes: list[int]) -> list[list[int]]:
    """The runs of consecutive positions in the lanes of a chunk: (first lane, first position, count); -1 is an empty lane."""
    found = []
    for _, group in groupby(enumerate(lanes), lambda pair: pair[1] - pair[0] if pair[1] >= 0 else None):
        pairs = list(group)
        if pairs[0][1] >= 0:
            found.append([pairs[0][0], pairs[0][1], len(pairs)])
    return found


COLORS = ("purple", "blue", "green", "orange", "red", "muted")
LEFT, WIDE = 24, 432


def draw(facts: dict[str, Any], page: "Page") -> None:
    """The text as a tape of chunks, the ring of each layer below it."""
    chunk, length = facts["chunk"], facts["length"]
    scale = WIDE / facts["context"]
    page.text(LEFT, 22, f"A text of {length} tokens, in chunks of {chunk} positions", bold=True)
    top = 36
    for i in range(-(-facts["context"] // chunk)):
        x, filled = LEFT + i * chunk * scale, max(0, min(chunk, length - i * chunk))
        page.box(x, top, filled * scale, 30, COLORS[i % len(COLORS)], 0.3, 0)
        page.box(x, top, chunk * scale, 30, "muted", 0)
        page.text(x + 3, top + 46, str(i * chunk), "muted", 12.5)
        if filled:
            page.text(x + filled * scale / 2, top + 20, f"{i}", COLORS[i % len(COLORS)], 14, "middle", bold=True)
    begin, end = LEFT + facts["visible"] * scale, LEFT + (length + 1) * scale
    y = top + 62
    page.line([(begin, y - 6), (begin, y), (end, y), (end, y - 6)], "text", 1.5)
    text = f"window {facts['window']}: position {length} sees {facts['visible']} to {length}"
    page.text(end, y + 18, text, "text", 13, "end")

    heads = (
        (f"No window: room for the context, {facts['context']} positions", ""),
        (f"Window {facts['window']}, batches of {facts['rows']}", f"position j is in chunk (j // {chunk}) mod {{}}"),
    )
    y = 160
    for (title, rule), ring in zip(heads, facts["rings"], strict=True):
        page.text(LEFT, y, f"{title}: {len(ring)} chunks", bold=True)
        if rule:
            y += 19
            page.text(LEFT, y, rule.format(len(ring)) + f", lane j mod {chunk}", "muted")
        per_row = 3
        width = (WIDE - 16 * (per_row - 1)) / per_row
        y += 14
        for slot, lanes in enumerate(ring):
            x, at = LEFT + slot % per_row * (width + 16), y + slot // per_row * 64
            for lane, position, count in lanes:
                color = COLORS[position // chunk % len(COLORS)]
                left, wide = x + lane * width / chunk, count * width / chunk
                page.box(left, at, wide, 30, color, 0.3, 0)
                page.text(left + wide / 2, at + 20, str(position // chunk), color, 14, "middle", bold=True)
            page.box(x, at, width, 30, "muted", 0)
            held = ", ".join(f"{position}–{position + count - 1}" for _, position, count in lanes) or "empty"
            page.text(x, at + 46, held, "muted", 12)
        y += -(-len(ring) // per_row) * 64 + 30
    ring = facts["rings"][1]
    lost = ring[length // chunk % len(ring)][-1][1]
    page.text(LEFT, y - 4, f"Position {length} will overwrite {lost}, which no window needs any more.", "muted")
    page.text(LEFT, y + 15, f"Tokens can be taken back until {facts['back']} are left, and no further.", "muted")
