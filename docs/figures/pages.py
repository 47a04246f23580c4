"""The pages of a cache: where two texts that begin alike are stored, by layers with a window and without."""

from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cache.kv import AttentionCacheSpec, KVCache
from engine.cache.sequence import Sequence
from engine.cache.types import CHUNK, F32
from engine.cpu.attention import append, first_visible
from engine.cpu.backend import Backend

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "The pages of two texts that begin alike, of a layer with a window and of one without"
SIZE = (480, 500)
CONTEXT, ROWS, WINDOW = 384, 20, 64
NAMES, LENGTHS, COMMON = ("A", "B"), (300, 230), 140


def facts() -> dict[str, Any]:
    """Text B is read after text A.  Each position is stored with a value of its own, so that a page tells what it holds."""
    shapes = [AttentionCacheSpec(1, 1, 1), AttentionCacheSpec(1, 1, 1, window=WINDOW)]
    cache = KVCache(shapes, CONTEXT, ROWS, F32, Backend().zeros, n_sequences=len(NAMES))
    sequences = [Sequence(cache, slot) for slot in range(len(NAMES))]
    for layer in cache.layers:
        layer.values[:] = -1
    found = []
    for slot, (sequence, length) in enumerate(zip(sequences, LENGTHS, strict=True)):
        text = [p if p < COMMON else p + 1000 * slot for p in range(length)]
        n, keys = sequence.find(text)
        found.append(n)
        if n:
            sequence.adopt(text[:n], keys)
        while sequence.length < length:
            first = sequence.length
            tokens = text[first : first + ROWS]
            sequence.claim(first, len(tokens))
            for layer in cache.layers:
                positions = np.arange(first, first + len(tokens), dtype=np.int32)
                row = np.full(len(tokens), slot, np.int32), layer.table, True, layer.values, 0, len(tokens)
                append(np.array(tokens, np.float32)[:, None, None], positions, *row)
            sequence.commit(tokens)
            sequence.settle()
    return {
        "names": NAMES,
        "lengths": LENGTHS,
        "common": COMMON,
        "context": CONTEXT,
        "window": WINDOW,
        "chunk": CHUNK,
        "found": found,
        "visible": [int(first_visible(length, WINDOW)) for length in LENGTHS],
        "pages": [[held(page) for page in layer.values[0, :, :, 0].astype(int).tolist()] for layer in cache.layers],
        "tables": [[sorted(sequence.pages(paging).items()) for sequence in sequences] for paging in cache.pools],
    }


def held(lanes: list[int]) -> list[int]:
    """The first token of a page and how many there are; nothing if it is empty."""
    tokens = [token for token in lanes if token >= 0]
    return [tokens[0], len(tokens)] if tokens else []


COLORS = ("purple", "blue", "green", "orange", "red", "muted")
LEFT, WIDE, PER_ROW, GAP = 24, 432, 8, 6


def draw(facts: dict[str, Any], page: "Page") -> None:
    """Both texts as tapes of chunks, the pages of each layer below them."""
    chunk, y = facts["chunk"], 22
    scale = WIDE / facts["context"]
    page.text(LEFT, y, f"Two texts with the same first {facts['common']} tokens, in chunks of {chunk}", bold=True)
    for name, length in zip(facts["names"], facts["lengths"], strict=True):
        y += 14
        page.text(LEFT - 4, y + 20, name, "text", 13, "end", bold=True)
        for i in range(-(-length // chunk)):
            x, filled = LEFT + i * chunk * scale, min(chunk, length - i * chunk)
            page.box(x, y, filled * scale, 30, COLORS[i % len(COLORS)], 0.3)
            page.text(x + filled * scale / 2, y + 20, str(i), COLORS[i % len(COLORS)], 14, "middle", bold=True)
        y += 30
    edge = LEFT + facts["common"] * scale
    page.line([(edge, 30), (edge, y + 6)], "text", 1.5, dash=True)
    page.text(edge, y + 20, str(facts["common"]), "muted", 12.5, "middle")

    heads = ("No window", f"Window {facts['window']}")
    y += 48
    for head, pages, tables in zip(heads, facts["pages"], facts["tables"], strict=True):
        users = [
            [n for n, own in zip(facts["names"], tables, strict=True) if at in dict(own).values()]
            for at in range(len(pages))
        ]
        page.text(LEFT, y, f"{head}: {len(pages)} pages", bold=True)
        y += 12
        width = (WIDE - GAP * (PER_ROW - 1)) / PER_ROW
        for at, content in enumerate(pages):
            x, top = LEFT + at % PER_ROW * (width + GAP), y + at // PER_ROW * 56
            if content:
                first, count = content
                i = first % 1000 // chunk
                color, wide = COLORS[i % len(COLORS)], width * count / chunk
                page.box(x, top, wide, 30, color, 0.3 if users[at] else 0.1, 0)
                page.text(x + wide / 2, top + 20, str(i), color, 14, "middle", bold=True)
            page.box(x, top, width, 30, "muted", 0)
            says = " and ".join(users[at]) or ("kept" if content else "free")
            page.text(x + width / 2, top + 45, says, "text" if users[at] else "muted", 12.5, "middle")
        y += -(-len(pages) // PER_ROW) * 56 + 22
    name, length, first = facts["names"][0], facts["lengths"][0], facts["visible"][0]
    lines = (
        f"Position {length} of {name} sees positions {first} to {length} through the window.",
        f"{name} has given earlier pages back. They are kept until room is needed:",
        f"{facts['names'][1]} was able to begin after {facts['found'][1]} tokens.",
    )
    for i, line in enumerate(lines):
        page.text(LEFT, y - 4 + 18 * i, line, "muted", 12.5)
