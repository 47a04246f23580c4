"""Attention over compressed rows and a window of latents, each of which is the key and the value of all heads.

Formula: out = sum_j softmax_j(scale q . x_j) x_j over a list of compressed rows and the latents of the visible positions lo
    <= j <= p, lo = max(0, p - window + 1).  The list of position p is what an indexer chose, or all rows below (p + 1) //
    ratio; none with ratio 0.  A head's sink is one more score of its softmax, with the value 0.
Shapes: q float32 [rows, n_head, d]; sequences int32 [rows], the slots of the rows' sequences; latents, compressed float32 or
    uint16 (float16) [pages, 64, d], each with a table int32 [sequences, chunks]: position p of a sequence is lane p % 64 of
    page table[sequence, p // 64], its compressed row r lane r % 64 of page compressed_table[sequence, r // 64]; chosen int32
    [rows, top_k], or [rows, 0] for all rows; it begins with -1 if scores of the indexer are not finite, and then no result of
    the row is; sinks float32 [n_head]; out float32 [rows, n_head, d].
Who owns what: an item is a row and a block of ``HEADS`` heads, row * blocks + block.
Reduction order: the entries 64 c .. 64 c + 63 of the list are its chunk c, in rising row; then come the chunks of the window,
    64 absolute positions each.  Within a chunk as in ``engine/cpu/attention.py``: scores one chain over d, the tree over 64
    weights, weighted values one chain over the visible lanes.  Chunks join in two levels: groups of 8, those of the list by
    c, those of the window by their absolute number; first the groups of the list, then those of the window, each in rising
    order, then the sink, as in ``engine/cpu/attention.py``.  So a layer without compressed rows computes what attention with
    these keys and values does.
Bytes moved: d * element size per latent and compressed row that a token sees, once for each block of heads.
"""

from typing import Any

import numpy as np
from numba import njit

from engine.cache.types import CHUNK, GROUP
from engine.compile.family import family
from engine.cpu.attention import first_visible, join, join_sink, weigh
from engine.cpu.fold import fold
from engine.cpu.lanes import ROWS, add_weighted, clear
from engine.numerics import finite, half_to_float, stored_half

f32 = np.float32
i64 = np.int64

NAN = f32(np.nan)

HEADS = 32
"""Heads of an item: they share what is read."""

LANES = 16
"""Scores of heads are computed side by side, in multiples of this number."""


@njit(cache=True)
def append(x, positions, sequences, table, latents, first, last):
    """Store latents x float32 [rows, d] at their positions int32 [rows], for the rows [first, last)."""
    d = x.shape[1]
    for t in range(first, last):
        own = latents[table[sequences[t], positions[t] // CHUNK], positions[t] % CHUNK]
        for i in range(d):
            if latents.itemsize == 2:
                own[i] = stored_half(x[t, i])
            else:
                own[i] = finite(x[t, i])


@njit(cache=True)
def widen(x, out):
    """out = x as float32: float32, or the bits of float16."""
    for i in range(out.size):
        if x.itemsize == 2:
            out[i] = half_to_float(x[i])
        else:
            out[i] = x[i]


@family
def attend(group: int = GROUP) -> Any:
    """The kernel for groups of this number of chunks."""
    add = add_weighted(False)

    @njit(error_model="numpy")
    def one_chunk(queries, n, x, a, b, scores, p, o, sums, inner):
        """Join lanes [a, b) of a chunk x [64, d] to the current group of n heads: queries [d, width], transposed; scores [64,
        width], p [HEADS, 64] and o [HEADS, d] are scratch; sums [HEADS, 4], inner [HEADS, d]."""
        d, width = queries.shape
        clear(scores, scores.size)
        at = a
        while at < b:
            rows = i64(ROWS if at + ROWS <= b else 1)
            add(x, at * d, d, rows, d, queries, i64(0), width, width, scores, at * width, width)
            at += rows
        for h in range(n):
            for j in range(CHUNK):
                p[h, j] = scores[j, h]
        h = 0
        while h < n:
            rows = i64(ROWS if h + ROWS <= n else 1)
            for k in range(h, h + rows):
                sums[k, 4] = weigh(p[k], a, b)
            clear(o, rows * d)
            add(p, h * CHUNK + a, i64(CHUNK), rows, b - a, x, a * d, d, d, o, i64(0), d)
            for k in range(h, h + rows):
                own = sums[k]
                own[2], own[3] = join(own[2], own[3], own[4], fold(p[k], CHUNK), o[k - h], inner[k])
            h += rows

    @njit(error_model="numpy")
    def end_group(n, sums, inner, out):
        """Join the current group to those before it, and begin the next one."""
        for h in range(n):
            own = sums[h]
            # The sum of a chunk is at least 1, so this is 0 only where the group is empty.
            if own[3] != f32(0.0):
                own[0], own[1] = join(own[0], own[1], own[2], own[3], inner[h], out[h])
            own[2], own[3] = f32(-np.inf), f32(0.0)
            inner[h, :] = f32(0.0)

    @njit(error_model="numpy")
    def attend(
        q,
        latents,
        table,
        compressed,
        compressed_table,
        chosen,
        positions,
        sequences,
        window,
        ratio,
        scale,
        sinks,
        out,
        first,
        last,
    ):
        n_head, d, top_k = q.shape[1], q.shape[2], chosen.shape[1]
        blocks = (n_head + HEADS - 1) // HEADS
        width = min(HEADS, (n_head + LANES - 1) // LANES * LANES)
        queries, x = np.zeros((d, width), np.float32), np.empty((CHUNK, d), np.float32)
        scores, p = np.empty((CHUNK, width), np.float32), np.empty((HEADS, CHUNK), np.float32)
        o, sums = np.empty((ROWS, d), np.float32), np.empty((HEADS, 5), np.float32)
        inner = np.zeros((HEADS, d), np.float32)
        for item in range(first, last):
            t, h0 = item // blocks, item % blocks * HEADS
            n = min(HEADS, n_head - h0)
            result = out[t, h0 : h0 + n]
            result[:, :] = f32(0.0)
            for h in range(n):
                sums[h, 0] = sums[h, 2] = f32(-np.inf)
                sums[h, 1] = sums[h, 3] = f32(0.0)
            position, sequence = i64(positions[t]), i64(sequences[t])
            seen = (position + 1) // ratio if ratio > 0 else i64(0)
            listed = min(seen, top_k) if top_k > 0 else seen
            # Without a choice, because scores of the indexer are not finite, no score is.
            factor = NAN if top_k > 0 and listed > 0 and chosen[t, 0] < 0 else scale
            for h in range(n):
                for i in range(d):
                    queries[i, h] = q[t, h0 + h, i] * factor
            for c in range((listed + CHUNK - 1) // CHUNK):
                count = min(i64(CHUNK), listed - c * CHUNK)
                for j in range(count):
                    r = max(i64(0), i64(chosen[t, c * CHUNK + j])) if top_k > 0 else c * CHUNK + j
                    widen(compressed[compressed_table[sequence, r // CHUNK], r % CHUNK], x[j])
                one_chunk(queries, n, x, i64(0), count, scores, p, o, sums, inner)
                if (c + 1) % group == 0:
                    end_group(n, sums, inner, result)
            end_group(n, sums, inner, result)
            low = i64(first_visible(position, window))
            for c in range(low // CHUNK, position // CHUNK + 1):
                a, b = max(i64(0), low - c * CHUNK), min(i64(CHUNK), position - c * CHUNK + 1)
                page = table[sequence, c]
                for j in range(a, b):
                    widen(latents[page, j], x[j])
                one_chunk(queries, n, x, a, b, scores, p, o, sums, inner)
                if (c + 1) % group == 0:
                    end_group(n, sums, inner, result)
            end_group(n, sums, inner, result)
            for h in range(n):
                total = join_sink(sums[h, 0], sums[h, 1], sinks[h0 + h], result[h])
                for i in range(d):
                    result[h, i] = result[h, i] / total

    return attend
