"""Latent attention: causal attention of all heads over one vector per position, whose first elements are its value.

Formula: out_h = sum_j softmax_j(scale * (q_h . c_j + r_h . k_j)) c_j over the positions j <= p, [c_j, k_j] the row of
    position j, c_j of rank elements: the attention of ``engine/cpu/attention.py`` with one head of keys [c, k] and values c.
    If positions are chosen, j counts those of the row in rising order, and p is the number of the last one: chunk c has the
    chosen positions 64 c .. 64 c + 63.
Shapes: q float32 [rows, n_head, rank]; r float32 [rows, n_head, n_rope]; latents float32 or uint16 (bits of float16)
    [pages, 64, width], width = rank + n_rope: position j of the sequence in slot s is row j % 64 of page table[s, j // 64]
    (``engine/cache/latent.py``); positions, sequences (slots) int32 [rows]; table int32 [slots, chunks]; chosen int32 [rows,
    top_k], or [rows, 0] for all positions; it begins with -1 if scores of the indexer are not finite, and then no result of
    the row is; tops float32 [rows, groups, n_head, 2] (maximum, sum), sums float32 [rows, groups, n_head, rank]; out float32
    [rows, n_head, rank].
Who owns what: ``attend_groups``: an item is a row and a group of 8 chunks, for all heads; ``join_parts``: a row and a head.
Reduction order: that of ``engine/cpu/attention.py``: score_j = one chain of fma over the elements of the row in rising order;
    the halving tree of a chunk's 64 weights; values in rising position; chunks joined within groups, then groups.
Bytes moved: width * element size per visible position and row, for all heads; 4 (rank + 2) per row, head and group, twice.
"""

from collections.abc import Callable

import numpy as np
from numba import njit

from engine.cache.types import CHUNK, GROUP
from engine.compile.family import family
from engine.cpu.attention import join, weigh
from engine.cpu.fold import fold
from engine.cpu.lanes import ROWS, add_weighted, clear
from engine.numerics import finite, half_to_float, stored_half

f32 = np.float32
i64 = np.int64

NAN = f32(np.nan)

LANES = 16
"""Heads whose scores are computed at once: their number is rounded up to a multiple, so that no head is left to a loop
without vectors."""


@njit(cache=True, error_model="numpy")
def append_rows(c, k, positions, sequences, table, latents, first, last):
    """Store the rows [c, k], c float32 [rows, rank], k float32 [rows, n_rope], at their positions of their sequences.  An
    item is a row."""
    rank = c.shape[1]
    for t in range(first, last):
        row = latents[table[sequences[t], positions[t] // CHUNK], positions[t] % CHUNK]
        if latents.itemsize == 2:
            for i in range(rank):
                row[i] = stored_half(c[t, i])
            for i in range(k.shape[1]):
                row[rank + i] = stored_half(k[t, i])
        else:
            for i in range(rank):
                row[i] = finite(c[t, i])
            for i in range(k.shape[1]):
                row[rank + i] = finite(k[t, i])


@njit(cache=True, error_model="numpy")
def widen(latents, page, count, rows):
    """rows float32 [64, width]: the first ``count`` rows of a page, converted exactly."""
    for j in range(count):
        source, target = latents[page, j], rows[j]
        if latents.itemsize == 2:
            for i in range(target.size):
                target[i] = half_to_float(source[i])
        else:
            target[:] = source


@njit(cache=True, error_model="numpy")
def gather(latents, pages, chosen, count, rows):
    """rows float32 [64, width]: the rows of the first ``count`` chosen positions of a sequence with these pages, converted
    exactly."""
    for j in range(count):
        position = max(i64(0), i64(chosen[j]))
        source, target = latents[pages[position // CHUNK], position % CHUNK], rows[j]
        if latents.itemsize == 2:
            for i in range(target.size):
                target[i] = half_to_float(source[i])
        else:
            target[:] = source


@njit(cache=True, error_model="numpy")
def turn(q, r, scale, turned):
    """turned float32 [width, heads]: the queries [q, r] of a row, q float32 [n_head, rank], r float32 [n_head, n_rope], times
    scale, with heads as lanes."""
    rank = q.shape[1]
    for h in range(q.shape[0]):
        for i in range(rank):
            turned[i, h] = q[h, i] * scale
        for i in range(r.shape[1]):
            turned[rank + i, h] = r[h, i] * scale


@family
def attend_groups(group: int = GROUP) -> Callable[..., None]:
    """The kernel ``attend_groups(q, r, latents, positions, sequences, table, chosen, scale, tops, sums, first, last)`` for
    groups of so many chunks.

    Item t * groups + g is group g of row t.  Groups that a row does not see are left as they are.
    """
    add = add_weighted(False)

    @njit(error_model="numpy")
    def attend_groups(q, r, latents, positions, sequences, table, chosen, scale, tops, sums, first, last):
        _, n_head, rank = q.shape
        listed = chosen.shape[1] > 0
        width, n_groups = i64(latents.shape[2]), tops.shape[1]
        lanes, four = i64(-(-n_head // LANES) * LANES), i64(ROWS)
        turned, rows = np.zeros((width, lanes), np.float32), np.zeros((CHUNK, width), np.float32)
        scores, p = np.empty((CHUNK, lanes), np.float32), np.zeros((lanes, CHUNK), np.float32)
        o, m, current = np.empty((ROWS, rank), np.float32), np.empty(ROWS, np.float32), -1
        for item in range(first, last):
            t, g = item // n_groups, item % n_groups
            end = positions[t] + 1
            if g * group * CHUNK >= end:
                continue
            if t != current:
                # Without a choice, because scores of the indexer are not finite, no score is.
                turn(q[t], r[t], NAN if listed and chosen[t, 0] < 0 else scale, turned)
                current = t
            tops[t, g, :, 0] = f32(-np.inf)
            tops[t, g, :, 1] = f32(0.0)
            sums[t, g, :, :] = f32(0.0)
            for chunk in range(g * group, min((g + 1) * group, (end - 1) // CHUNK + 1)):
                seen = i64(min(CHUNK, end - chunk * CHUNK))
                if listed:
                    gather(latents, table[sequences[t]], chosen[t, chunk * CHUNK :], seen, rows)
                else:
                    widen(latents, table[sequences[t], chunk], seen, rows)
                clear(scores, scores.size)
                # Lanes are heads: a row is multiplied by all queries.  Rows behind the last visible one do not count.
                for j in range(i64(0), seen, four):
                    add(rows, j * width, width, four, width, turned, i64(0), lanes, lanes, scores, j * lanes, lanes)
                for h in range(n_head):
                    for j in range(seen):
                        p[h, j] = scores[j, h]
                for begin in range(i64(0), n_head, four):
                    count = min(four, n_head - begin)
                    for h in range(count):
                        m[h] = weigh(p[begin + h], i64(0), seen)
                    clear(o, o.size)
                    of_rows = p, begin * CHUNK, i64(CHUNK), four, seen, rows, i64(0), width
                    add(*of_rows, i64(rank), o, i64(0), i64(rank))
                    for h in range(count):
                        own, weight = tops[t, g, begin + h], fold(p[begin + h], CHUNK)
                        own[0], own[1] = join(own[0], own[1], m[h], weight, o[h], sums[t, g, begin + h])

    return attend_groups


@family
def join_parts(group: int = GROUP) -> Callable[..., None]:
    """The kernel ``join_parts(tops, sums, positions, out, first, last)``, which joins the groups of ``attend_groups`` and
    divides by the sums of the weights; item t * n_head + h is head h of row t."""

    @njit(error_model="numpy")
    def join_parts(tops, sums, positions, out, first, last):
        n_head = out.shape[1]
        for item in range(first, last):
            t, h = item // n_head, item % n_head
            maximum, total, values = f32(-np.inf), f32(0.0), out[t, h]
            values[:] = f32(0.0)
            for g in range(positions[t] // (group * CHUNK) + 1):
                maximum, total = join(maximum, total, tops[t, g, h, 0], tops[t, g, h, 1], sums[t, g, h], values)
            for i in range(values.size):
                values[i] = values[i] / total

    return join_parts
