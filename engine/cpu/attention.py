"""Causal attention over a cache of keys and values, in chunks of 64 absolute positions, for rows of any sequences.

Formula: out = sum_j softmax_j(scale q . k_j) v_j over the visible positions j: lo <= j <= p, lo = max(0, p - window + 1),
    or, in frames of n positions, a power of two, lo = p - p mod n;
    where rows have spans (``engine/ops/spans.py``), from the first to the last position of their span;
    with a cap c (Gemma 2), a score s = scale q . k_j is replaced by c tanh(s / c);
    a head's sink (Agarwal et al. 2025, gpt-oss) is one more score of its softmax, with the value 0.
Shapes: q float32 [rows, n_head, d_k]; keys [n_head_kv, pages, d_k, 64], values [n_head_kv, pages, 64, d_v], float32 or
    float16, given as words uint32 [n_head_kv, pages, words], or quantized (``engine/cache/types.py``); positions, sequences
    int32 [rows]; table int32 [slots, chunks]; sinks float32 [n_head], or [0] for none; out float32 [rows, n_head, d_v].
    Position j of the sequence in slot s lives in page table[s, j // 64], lane j % 64.  Keys are stored transposed within a
    page, so that 64 scores are 64 lanes and each is one chain over d_k.
Who owns what: an item is a row and a head; a call owns items [first, last).  The items of a head of keys are consecutive, row
    by row, and those of a row are its of_head = n_head / n_head_kv heads h with h // of_head = that head of keys.  So the
    items that follow each other share keys and values up to the next head of keys or the next sequence (a *run*).
Reduction order: score_j = fma(q'_(d-1), k_(d-1), ... fma(q'_0, k_0, 0)), q' = q * scale; hidden positions score -inf;
    with a quantized cache by ``engine/cpu/quantized_cache.py``; with a cap c, score_j = softcap(score_j, c), before hiding;
    per chunk: m = max, p_j = exp(score_j - m), l = halving tree of p_0..p_63 ((p0 + p32), ..., then 16, 8, 4, 2, 1),
    o_d = fma(p_b, v_bd, ... fma(p_a, v_ad, 0)) over the visible lanes a..b of the chunk only;
    chunks join in two levels: those of a group, 8 whose numbers differ in the last three bits, in rising position, then the
    groups in rising position, each level from (M, L, O) = (-inf, 0, 0); a group without a visible chunk takes no part;
    a join is M' = max(M, m), a = exp(M - M'), b = exp(m - M'), L' = fma(L, a, b l), O' = fma(O, a, b o);
    a sink s joins last: M' = max(M, s), a = exp(M - M'), L' = fma(L, a, exp(s - M')), O' = O a; out = O / L.
Bytes moved: (d_k + d_v) * element size per visible position, once from memory per call and run, and once per four items
    from a cache of the CPU.

A key that is not finite, or too large for float16, is stored as NaN: its scores are, and with them the sum of the weights, L.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from engine.cache.types import BLOCK, CHUNK, GROUP
from engine.cache.window import NOT_FIRST
from engine.compile.family import family
from engine.cpu import quantized_cache
from engine.cpu.fold import fold
from engine.cpu.lanes import ROWS, add_weighted, clear, hide
from engine.numerics import exp, finite, fma, softcap, stored_half
from engine.ops.spans import CUT_BITS, MOST_CUT, SPANS

f32 = np.float32
i64 = np.int64

NO_PARTS = np.zeros((0, 0, 0, 2), f32)
"""In place of the maxima and sums of chunks, which are then not written."""


@njit(cache=True, error_model="numpy")
def append(x, positions, sequences, table, by_position, memory, first, last):
    """Store keys or values (``by_position``) x float32 [rows, n_head_kv, d] at positions int32 [rows] of the sequences in
    slots int32 [rows], in ``memory`` [n_head_kv, pages, d, 64] or [n_head_kv, pages, 64, d], float32 or uint16 for the bits
    of float16; NaN where it is not finite, or too large.  An item is a pair of a row and a head, row by row."""
    heads, pages, d = x.shape[1], memory.shape[1], x.shape[2]
    flat = memory.reshape(-1)
    for item in range(first, last):
        t, h = item // heads, item % heads
        lane = positions[t] % CHUNK
        at = (h * pages + table[sequences[t], positions[t] // CHUNK]) * CHUNK * d
        at, step = (at + lane * d, 1) if by_position else (at + lane, CHUNK)
        for i in range(d):
            if memory.itemsize == 2:
                flat[at + i * step] = stored_half(x[t, h, i])
            else:
                flat[at + i * step] = finite(x[t, h, i])


# --- items -----------------------------------------------------------------------------------------------------


@njit(cache=True)
def row_and_head(item, rows, of_head):
    """The row and the head of an item."""
    t = item // of_head
    return t % rows, t // rows * of_head + item % of_head


@njit(cache=True)
def end_of_run(item, sequences, of_head):
    """The end of the items from ``item`` on that read the same keys: those of one head of keys and of one sequence."""
    t = end = item // of_head % sequences.size
    while end < sequences.size and sequences[end] == sequences[t]:
        end += 1
    return (item // of_head + end - t) * of_head


# --- one chunk -------------------------------------------------------------------------------------------------


@njit(cache=True)
def first_visible(position, window):
    """The first position that the row at ``position``, or with the span ``position``, sees."""
    if window > SPANS:
        return max(0, (position >> CUT_BITS) + (position & MOST_CUT) - (window - SPANS) + 1)
    if window > 0:
        return max(0, position - window + 1)
    # A frame, as the bits of its beginning; or no window, perhaps without position 0.
    return position & window if window < NOT_FIRST else -window


@njit(cache=True)
def last_visible(position, window):
    """The last position that the row at ``position``, or with the span ``position``, sees."""
    return position >> CUT_BITS if window > SPANS else position


@njit(cache=True)
def visible(chunk, position, window):
    """The lanes [first, last) of a chunk that the row at ``position`` sees; none if last <= first."""
    last = last_visible(position, window)
    return max(0, first_visible(position, window) - chunk * CHUNK), min(CHUNK, last - chunk * CHUNK + 1)


@njit(cache=True)
def rows_that_see(chunk, positions, at, end, window, lanes):
    """Write the lanes [first, last) of a chunk that items at ``positions`` int64 [items] see to lanes int64 [4, 2], from item
    ``at`` on; returns how many items these are: at most 4, before ``end`` and before the first that sees none."""
    n = 0
    while n < ROWS and at + n < end:
        lanes[n, 0], lanes[n, 1] = visible(chunk, positions[at + n], window)
        if lanes[n, 0] >= lanes[n, 1]:
            break
        n += 1
    return n


@njit(cache=True, error_model="numpy")
def bound(p, rows, cap):
    """Replace the scores p [4, 64] of so many rows by cap tanh(score / cap)."""
    for r in range(rows):
        for j in range(CHUNK):
            p[r, j] = softcap(p[r, j], cap)


@njit(cache=True, error_model="numpy")
def weigh(p, first, last):
    """Turn scores p [64] into exp(p - maximum) in place, 0 outside the lanes [first, last); returns the maximum."""
    m = hide(p, first, last)
    for j in range(CHUNK):
        p[j] = exp(p[j] - m)
    return m


@family
def weighted_values(half: bool) -> Callable[..., None]:
    """The function ``weighted_values(p, n, lanes, values, j, d_v, o)``: o[r] = weighted values [64, d_v] of the lanes
    ``lanes[r]`` [first, last) of n queries, p [4, 64], o [4, d_v]; the values are float16 if ``half``, else float32, from
    element j of an array.

    Hidden lanes hold values of other rows or older answers, possibly 0 * inf, so they take no part.  The lanes that all
    queries see are summed for all of them at once, the others before and after for each.
    """
    add = add_weighted(half)

    @njit(error_model="numpy")
    def weighted_values(p, n, lanes, values, j, d_v, o):
        first, last = lanes[0, 0], lanes[0, 1]
        for r in range(1, n):
            first, last = max(first, lanes[r, 0]), min(last, lanes[r, 1])
        if first >= last:
            first = last = i64(CHUNK)
        one, together = i64(1), i64(1 if n == 1 else ROWS)
        clear(o, together * d_v)
        for r in range(n):
            low, high = lanes[r, 0], min(first, lanes[r, 1])
            add(p, r * CHUNK + low, one, one, high - low, values, j + low * d_v, d_v, d_v, o, r * d_v, d_v)
        stride = i64(CHUNK)
        add(p, first, stride, together, last - first, values, j + first * d_v, d_v, d_v, o, i64(0), d_v)
        for r in range(n):
            count = lanes[r, 1] - last
            add(p, r * CHUNK + last, one, one, count, values, j + last * d_v, d_v, d_v, o, r * d_v, d_v)

    return weighted_values


@njit(cache=True)
def note(parts, item, rows, of_head, chunk, m, weight):
    """Write the maximum and the sum of an item's weights in a chunk to parts float32 [rows, n_head, chunks, 2], unless it is
    empty."""
    if parts.size > 0:
        t, h = row_and_head(item, rows, of_head)
        parts[t, h, chunk, 0] = m
        parts[t, h, chunk, 1] = weight


# --- joining ---------------------------------------------------------------------------------------------------


@njit(cache=True, error_model="numpy")
def join(maximum, total, m, weight, o, out):
    """Join a chunk, or a group, to those before it: out = out * a + o * b; returns the maximum and the sum over all."""
    joined = max(maximum, m)
    a = exp(maximum - joined)
    b = exp(m - joined)
    for d in range(out.size):
        out[d] = fma(out[d], a, b * o[d])
    return joined, fma(total, a, b * weight)


@njit(cache=True, error_model="numpy")
def begin(sums, out, of_head, first, stop):
    """Nothing has been joined for items [first, stop).  Row item - first of sums float32 [.., 4]: maximum and sum of the
    groups so far, and of the chunks so far of the current group; out holds the weighted values of the groups."""
    rows = out.shape[0]
    for item in range(first, stop):
        t, h = row_and_head(item, rows, of_head)
        own = sums[item - first]
        own[0] = own[2] = f32(-np.inf)
        own[1] = own[3] = f32(0.0)
        out[t, h, :] = f32(0.0)


@njit(cache=True, error_model="numpy")
def join_groups(sums, inner, out, of_head, first, stop):
    """Join the current group of items [first, stop) to those before it, and begin the next one; inner float32 [.., d_v]: the
    group's weighted values."""
    rows = out.shape[0]
    for item in range(first, stop):
        own, values = sums[item - first], inner[item - first]
        # The sum of a chunk is at least 1, so this is 0 only where the item has seen none of the group.
        if own[3] != f32(0.0):
            t, h = row_and_head(item, rows, of_head)
            own[0], own[1] = join(own[0], own[1], own[2], own[3], values, out[t, h])
            own[2], own[3] = f32(-np.inf), f32(0.0)
            values[:] = f32(0.0)


@njit(cache=True, error_model="numpy")
def join_sink(maximum, total, sink, out):
    """Join a sink to all chunks: out = out * a; returns the sum over all of them and the sink."""
    joined = max(maximum, sink)
    a = exp(maximum - joined)
    for d in range(out.size):
        out[d] = out[d] * a
    return fma(total, a, exp(sink - joined))


@njit(cache=True, error_model="numpy")
def finish(sums, sinks, out, of_head, first, stop):
    """Join the sinks, if there are any, and divide by the sums."""
    rows = out.shape[0]
    for item in range(first, stop):
        t, h = row_and_head(item, rows, of_head)
        row, total = out[t, h], sums[item - first, 1]
        if sinks.size > 0:
            total = join_sink(sums[item - first, 0], total, sinks[h], row)
        for i in range(row.size):
            row[i] = row[i] / total


# --- types of keys and values ----------------------------------------------------------------------------------


def readers(k_bits: int, v_bits: int) -> tuple[Callable[..., Any], ...]:
    """The functions that read a cache of these types.

    ``query(q, integers, scales, scale, t, h, queries, dq, at)``: write a query as it is multiplied by keys to queries[at],
    and its scales to dq[at];
    ``read_keys(keys, g, c, scratch, dk)``: an array, and the index of its element where page c of head g begins, [d_k, 64];
    the scales are written to dk [d_k / 32, 64];
    ``scores(queries, dq, at, rows, keys, j, dk, dots, p)``: write the scores of 1 or 4 ``rows`` from ``at`` to p [4, 64];
    ``read_values(values, g, c, scratch)``: like ``read_keys``, for values [64, d_v];
    ``weighted_values(p, n, lanes, values, j, d_v, o)``.
    """
    weighted = weighted_values(v_bits == 16)
    if v_bits < 16:

        @njit(error_model="numpy")
        def read_values(values, g, c, scratch):
            quantized_cache.unpack_values(values[g, c], v_bits, scratch)
            return scratch, 0

    else:

        @njit(error_model="numpy")
        def read_values(values, g, c, scratch):
            return values, (g * values.shape[1] + c) * values.shape[2] * (32 // v_bits)

    if k_bits < 16:

        @njit(error_model="numpy")
        def read_keys(keys, g, c, scratch, dk):
            quantized_cache.unpack_keys(keys[g, c], k_bits, dk, scratch)
            return scratch, 0

        return quantized_cache.query_floats, read_keys, quantized_cache.scores, read_values, weighted
    add = add_weighted(k_bits == 16)

    @njit(error_model="numpy")
    def query(q, integers, scales, scale, t, h, queries, dq, at):
        for i in range(q.shape[2]):
            queries[at, i] = q[t, h, i] * scale

    @njit(error_model="numpy")
    def read_plain_keys(keys, g, c, scratch, dk):
        return keys, (g * keys.shape[1] + c) * keys.shape[2] * (32 // k_bits)

    @njit(error_model="numpy")
    def scores(queries, dq, at, rows, keys, j, dk, dots, p):
        clear(p, rows * CHUNK)
        d, lanes = queries.shape[1], i64(CHUNK)
        add(queries, at * d, d, rows, d, keys, j, lanes, lanes, p, i64(0), lanes)

    return query, read_plain_keys, scores, read_values, weighted


# --- all chunks ------------------------------------------------------------------------------------------------


@family
def attend(k_bits: int, v_bits: int, group: int = GROUP, cap: float = 0.0) -> Callable[..., None]:
    """The kernel ``attend(q, integers, scales, keys, values, positions, sequences, table, scale, window, sinks, parts, out,
    first, last)`` for keys and values of these sizes in bits and groups of this number of chunks; ``cap``: of scores, 0 for
    none.

    integers int8 [rows, n_head, d_k] and scales float32 [rows, n_head, d_k / 32] are the quantized queries for quantized
    keys, and empty for others; window 0 means all earlier positions, and if it is larger than ``SPANS``, positions are spans.
    parts float32 [rows, n_head, chunks, 2]: where the maximum and the sum of the weights of each chunk are written, or empty.
    If values are quantized, the result has yet to be rotated (``engine/cpu/quantized_cache.py``).
    """
    query, read_keys, scores, read_values, weighted = readers(k_bits, v_bits)
    k_quantized, v_quantized = k_bits < 16, v_bits < 16
    capped, most_score = cap > 0.0, f32(cap)

    @njit(error_model="numpy")
    def attend(
        q, integers, scales, keys, values, positions, sequences, table, scale, window, sinks, parts, out, first, last
    ):
        rows, n_head, d_k = q.shape
        of_head, d_v = n_head // keys.shape[0], out.shape[2]
        blocks = d_k // BLOCK if k_quantized else 0
        most = min(last - first, of_head * rows)
        # Four queries are read at once, even where fewer are left.
        queries, dq = np.empty((most + ROWS, d_k), np.float32), np.empty((most + ROWS, blocks), np.float32)
        clear(queries, queries.size)
        clear(dq, dq.size)
        k_scratch = np.empty((d_k if k_quantized else 0, CHUNK), np.float32)
        v_scratch = np.empty((CHUNK, d_v if v_quantized else 0), np.float32)
        dk, dots = np.empty((blocks, CHUNK), np.float32), np.empty((ROWS, CHUNK), np.float32)
        p, o = np.empty((ROWS, CHUNK), np.float32), np.empty((ROWS, d_v), np.float32)
        tops, lanes = np.empty(ROWS, np.float32), np.empty((ROWS, 2), np.int64)
        sums, inner = np.empty((most, 4), np.float32), np.zeros((most, d_v), np.float32)
        at_positions = np.empty(most, np.int64)
        while first < last:
            stop, n_items = min(last, end_of_run(first, sequences, of_head)), 0
            t, h = row_and_head(first, rows, of_head)
            g, pages = h // of_head, table[sequences[t]]
            low, high = first_visible(positions[t], window), i64(last_visible(positions[t], window))
            for item in range(first, stop):
                t, h = row_and_head(item, rows, of_head)
                low = min(low, first_visible(positions[t], window))
                high = max(high, i64(last_visible(positions[t], window)))
                query(q, integers, scales, scale, t, h, queries, dq, n_items)
                at_positions[n_items] = positions[t]
                n_items += 1
            begin(sums, out, of_head, first, stop)
            end = high // CHUNK + 1
            for chunk in range(low // CHUNK, end):
                page = pages[chunk]
                own_keys, key = read_keys(keys, g, page, k_scratch, dk)
                own_values, value = read_values(values, g, page, v_scratch)
                at = 0
                while at < n_items:
                    n = rows_that_see(chunk, at_positions, at, n_items, window, lanes)
                    if n == 0:
                        at += 1
                        continue
                    scores(queries, dq, at, i64(1 if n == 1 else ROWS), own_keys, key, dk, dots, p)
                    if capped:
                        bound(p, n, most_score)
                    for r in range(n):
                        tops[r] = weigh(p[r], lanes[r, 0], lanes[r, 1])
                    weighted(p, n, lanes, own_values, value, d_v, o)
                    for r in range(n):
                        weight, own = fold(p[r], CHUNK), sums[at + r]
                        note(parts, first + at + r, rows, of_head, chunk, tops[r], weight)
                        own[2], own[3] = join(own[2], own[3], tops[r], weight, o[r], inner[at + r])
                    at += n
                if (chunk + 1) % group == 0 or chunk + 1 == end:
                    join_groups(sums, inner, out, of_head, first, stop)
            finish(sums, sinks, out, of_head, first, stop)
            first = stop

    return attend
