"""Attention in chunks: the weights of one head for the last token of a text, and how chunks are joined."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from docs.figures import bundled
from engine.cache.types import CHUNK
from engine.cpu.attention import NO_PARTS, attend, join, readers, weigh
from engine.cpu.fold import fold
from engine.cpu.lanes import ROWS
from engine.models.attention_config import AttentionConfig
from engine.ops.observation import Observation

if TYPE_CHECKING:
    from docs.figures.style import Page

TITLE = "The weights of one head in four chunks, and the sums that join them"
SIZE = (480, 676)
LAYER, HEAD = 5, 1
TEXT = """\
import os
import sys


def read_lines(path):
    with open(path) as file:
        return [line.strip() for line in file]


def count_words(lines):
    counts = {}
    for line in lines:
        for word in line.split():
            word = word.lower()
            counts[word] = counts.get(word, 0) + 1
    return counts


def print_table(counts, limit=10):
    items = sorted(counts.items(), key=lambda item: item[1])
    for word, count in items[:limit]:
        print(word, count)


def main():
    if len(sys.argv) != 2:
        print("usage: words.py PATH")
        sys.exit(1)
    path = sys.argv[1]
    if not os.path.exists(path):
        print("no such file:", path)
        sys.exit(1)
    lines = read_lines(path)
    counts = count_words(lines)
    print_table("""


def facts() -> dict[str, Any]:
    """For each chunk its weights, its maximum m and sum l, and the maximum M and sum L of the chunks so far, joined."""
    llm = bundled.model()
    queries: list[np.ndarray] = []

    def observe(seen: Observation[Any]) -> None:
        queries.append(seen.values["query"].copy())

    ids = llm.tokenize(TEXT)
    llm.model.ops.observe(observe)
    try:
        llm.prefill(ids)
    finally:
        llm.model.ops.observe(None)
    config, cache = llm.config, llm.cache.layers[LAYER]
    attention = config.layers[LAYER].mixer
    assert isinstance(attention, AttentionConfig)
    group = attention.n_head // attention.n_head_kv
    q = queries[-config.n_layer :][LAYER][-1, HEAD]
    keys, values = cache.keys[HEAD // group], cache.values[HEAD // group]
    scale, position = np.float32(attention.scale), len(ids) - 1
    scaled, none = np.zeros((ROWS, q.size), np.float32), np.empty((0, CHUNK), np.float32)
    scaled[0] = q * scale
    p, o = np.empty((ROWS, CHUNK), np.float32), np.empty((ROWS, cache.d_v), np.float32)
    out = np.zeros(cache.d_v, np.float32)
    _, _, scores, _, weighted_values = readers(16, 16)
    maximum, total, chunks = np.float32(-np.inf), np.float32(0), []
    for chunk in range(position // CHUNK + 1):
        last = min(CHUNK, position - chunk * CHUNK + 1)
        page = cache.table[0, chunk]
        scores(scaled, none, 0, 1, keys[page], 0, none, none, p)
        m = weigh(p[0], 0, last)
        weights = [round(float(w), 4) for w in p[0, :last]]
        weighted_values(p, 1, np.array([[0, last]]), values[page], 0, cache.d_v, o)
        weight = fold(p[0], CHUNK)
        maximum, total = join(maximum, total, m, weight, o[0], out)
        numbers = {"m": m, "l": weight, "M": maximum, "L": total}
        chunks.append({"weights": weights} | {name: round(float(n), 3) for name, n in numbers.items()})
    whole = np.empty((1, 1, cache.d_v), np.float32)
    words = (pages[None].reshape(1, len(pages), -1).view(np.uint32) for pages in (keys, values))
    sinks = np.empty(0, np.float32)
    query = q[None, None], np.empty((1, 1, 0), np.int8), np.empty((1, 1, 0), np.float32)
    row = np.array([position], np.int32), np.zeros(1, np.int32), cache.table
    attend(16, 16)(*query, *words, *row, scale, 0, sinks, NO_PARTS, whole, 0, 1)
    assert np.array_equal(out / total, whole[0, 0])
    return {
        "layer": LAYER,
        "head": HEAD,
        "chunk": CHUNK,
        "chunks": chunks,
        "pieces": [bundled.piece(i) for i in ids],
    }


LEFT, BAR, HIGH = 24, 6.75, 62
COLORS = ("purple", "blue", "green", "orange")


def draw(facts: dict[str, Any], page: "Page") -> None:
    """A row of weights for each chunk, what it is joined to, and the share of each chunk in the result."""
    n, chunks, pieces = facts["chunk"], facts["chunks"], facts["pieces"]
    page.text(LEFT, 20, f"What the last of {len(pieces)} tokens, “{pieces[-1]}”, attends to", bold=True)
    page.text(
        LEFT, 38, f"layer {facts['layer']}, head {facts['head']}; weights exp(score − m) in lanes 0 to {n - 1}", "muted"
    )
    y = 66.0
    for i, chunk in enumerate(chunks):
        color, weights = COLORS[i % len(COLORS)], chunk["weights"]
        first = i * n
        page.text(LEFT, y, f"chunk {i}: {first}–{first + len(weights) - 1}", color, bold=True)
        page.text(LEFT + n * BAR, y, f"m = {chunk['m']:.3f}, l = {chunk['l']:.3f}", color, 13, "end")
        base = y + 24 + HIGH
        for lane, weight in enumerate(weights):
            page.box(LEFT + lane * BAR + 0.7, base - weight * HIGH, BAR - 1.4, weight * HIGH, color, 0.75, 0)
        page.line([(LEFT, base), (LEFT + n * BAR, base)], "muted", 0.8)
        taken: list[tuple[float, float]] = []
        for lane in sorted(range(len(weights)), key=lambda lane: -weights[lane])[:5]:
            name, x = pieces[first + lane], LEFT + (lane + 0.5) * BAR
            half = page.length(name, 12, mono=True) / 2 + 5
            # Inside the plot, and where no larger bar or name is in the way.
            x = min(max(x, LEFT + half), LEFT + n * BAR - half)
            top = base - weights[lane] * HIGH
            near = [w for i, w in enumerate(weights) if i != lane and abs(LEFT + (i + 0.5) * BAR - x) < half]
            if all(base - w * HIGH > top - 1 for w in near) and all(abs(x - at) > half + w for at, w in taken):
                page.text(x, top - 4, name, "text", 12, "middle", mono=True)
                taken.append((x, half))
        y = base + 19
        if i == 0:
            text = f"M = {chunk['M']:.3f}, L = {chunk['L']:.3f}"
        else:
            text = f"joined: M = {chunk['M']:.3f}, L = {chunk['L']:.3f}"
        page.text(LEFT + n * BAR, y, text, "text", 13, "end")
        if i:
            page.line([(LEFT + 4, y - 14), (LEFT + 4, y - 4), (LEFT + 34, y - 4)], "muted", 1.2, arrow=True)
            page.text(LEFT + 42, y, "with all before", "muted", 12.5)
        y += 34
    page.text(LEFT, y, "Shares of the result: l · exp(m − M) / L", bold=True)
    x, top = float(LEFT), y + 10
    end = chunks[-1]
    for i, chunk in enumerate(chunks):
        share = chunk["l"] * math.exp(chunk["m"] - end["M"]) / end["L"]
        color = COLORS[i % len(COLORS)]
        page.box(x, top, share * n * BAR, 28, color, 0.3, 0.8)
        page.text(x + share * n * BAR / 2, top + 19, f"{100 * share:.0f} %", color, 13, "middle")
        x += share * n * BAR
