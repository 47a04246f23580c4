"""Causal attention over a cache of keys and values, in chunks of 64 absolute positions.

Formula: out = sum_j softmax_j(scale q . k_j) v_j over the visible positions j: lo <= j <= p, lo = max(0, p - window + 1).
Shapes: q float32 [rows, n_head, d_k]; keys [n_head_kv, chunks, d_k, 64], values [n_head_kv, chunks, 64, d_v], float32 or
    uint16 holding float16, or words (``engine/cache/types.py``); out float32 [rows, n_head, d_v].  Position j lives in ring
    chunk (j // 64) % chunks, lane j % 64.  Keys are stored transposed within a chunk, so that 64 scores are 64 lanes and each
    is one chain over d_k.
Who owns what: a thread owns (row, head) pairs; head h reads the keys and values of head h // (n_head / n_head_kv).
Reduction order: score_j = fma(q'_(d-1), k_(d-1), ... fma(q'_0, k_0, 0)), q' = q * scale; hidden positions score -inf;
    with a quantized cache by ``engine/cpu/quantized_cache.py``;
    per chunk: m = max, p_j = exp(score_j - m), l = halving tree of p_0..p_63 ((p0 + p32), ..., then 16, 8, 4, 2, 1),
    o_d = fma(p_b, v_bd, ... fma(p_a, v_ad, 0)) over the visible lanes a..b of the chunk only;
    chunks join in rising position: M' = max(M, m), a = exp(M - M'), b = exp(m - M'), L' = fma(L, a, b l),
    O' = fma(O, a, b o); out = O / L.
Bytes moved: (d_k + d_v) * element size per visible position, n_head_kv times from memory.
"""

import numpy as np
from numba import njit, prange

from engine.cache.types import CHUNK
from engine.cpu import quantized_cache
from engine.cpu.fold import fold
from engine.cpu.intrinsics import LANES, weighted_sum64
from engine.numerics import exp, float_to_half, fma, half_to_float

f32 = np.float32


@njit(cache=True)
def append(x, positions, half, by_position, ring):  # type: ignore[no-untyped-def]
    """Store keys or values (``by_position``) x float32 [rows, n_head_kv, d] at their positions int32 [rows]; ``half``: the
    ring [n_head_kv, chunks, d, 64] or [n_head_kv, chunks, 64, d] holds float16 bits."""
    chunks = ring.shape[1]
    for t in range(x.shape[0]):
        c = positions[t] // CHUNK % chunks
        lane = positions[t] % CHUNK
        for h in range(x.shape[1]):
            for d in range(x.shape[2]):
                value = float_to_half(x[t, h, d]) if half else x[t, h, d]
                if by_position:
                    ring[h, c, lane, d] = value
                else:
                    ring[h, c, d, lane] = value


@njit(cache=True)
def weighted_sum(c, first, last, rows, half, out):  # type: ignore[no-untyped-def]
    """out[t] = sum of c[i] * rows[i, t] for first <= i < last, one fma chain per t in rising i, from 0; rows [n, width]."""
    width = out.size
    flat = rows.reshape(-1)
    whole = width // LANES * LANES
    for t in range(0, whole, LANES):
        weighted_sum64(c, first, last - first, flat, first * width + t, width, out, t)
    for t in range(whole, width):
        total = f32(0.0)
        for i in range(first, last):
            x = flat[i * width + t]
            total = fma(c[i], half_to_float(np.uint16(x)) if half else f32(x), total)
        out[t] = total


@njit(cache=True, error_model="numpy")
def weigh(p, first, last):  # type: ignore[no-untyped-def]
    """Turn scores p [64] into exp(p - maximum) in place, 0 outside the lanes [first, last); returns the maximum."""
    m = f32(-np.inf)
    for j in range(CHUNK):
        if j < first or j >= last:
            p[j] = f32(-np.inf)
        m = max(m, p[j])
    for j in range(CHUNK):
        p[j] = exp(p[j] - m)
    return m


@njit(cache=True, error_model="numpy")
def attend_chunk(scaled, keys, values, first, last, half, p, o):  # type: ignore[no-untyped-def]
    """Attend over one chunk: scaled q' [d_k], keys [d_k, 64], values [64, d_v]; the lanes [first, last) are visible.
    Returns the largest score and the sum of p, and writes the weighted values to o [d_v]; p [64] is scratch."""
    weighted_sum(scaled, 0, scaled.size, keys, half, p)
    m = weigh(p, first, last)
    # Hidden lanes hold keys and values of other rows or older answers; without this, 0 * inf would give NaN.
    weighted_sum(p, first, last, values, half, o)
    return m, fold(p, CHUNK)


@njit(cache=True, error_model="numpy")
def join(maximum, total, m, weight, o, out):  # type: ignore[no-untyped-def]
    """Join a chunk to those before it: out = out * a + o * b; returns the maximum and the sum over all of them."""
    joined = max(maximum, m)
    a = exp(maximum - joined)
    b = exp(m - joined)
    for d in range(out.size):
        out[d] = fma(out[d], a, b * o[d])
    return joined, fma(total, a, b * weight)


@njit(cache=True)
def first_visible(position, window):  # type: ignore[no-untyped-def]
    """The first position that the row at ``position`` sees."""
    return max(0, position - window + 1) if window > 0 else 0


@njit(cache=True, error_model="numpy")
def attend_one(q, keys, values, position, scale, window, half, scaled, p, o, out):  # type: ignore[no-untyped-def]
    """Attention of one head of one row: q [d_k], keys [chunks, d_k, 64], values [chunks, 64, d_v], out [d_v]; scaled [d_k],
    p [64] and o [d_v] are scratch."""
    chunks = keys.shape[0]
    low = first_visible(position, window)
    for d in range(q.size):
        scaled[d] = q[d] * scale
    maximum = f32(-np.inf)
    total = f32(0.0)
    out[:] = f32(0.0)
    for chunk in range(low // CHUNK, position // CHUNK + 1):
        c = chunk % chunks
        first, last = max(0, low - chunk * CHUNK), min(CHUNK, position - chunk * CHUNK + 1)
        m, weight = attend_chunk(scaled, keys[c], values[c], first, last, half, p, o)
        maximum, total = join(maximum, total, m, weight, o, out)
    for d in range(out.size):
        out[d] = out[d] / total


@njit(cache=True, parallel=True, error_model="numpy")
def attend(q, keys, values, positions, scale, window, half, shares, out):  # type: ignore[no-untyped-def]
    """Attention of every head of every row; keys and values are both float32 or both float16; window 0 means all earlier
    positions."""
    rows, n_head, d_k = q.shape
    group = n_head // keys.shape[0]
    tasks = rows * n_head
    step = (tasks + shares - 1) // shares
    for share in prange(shares):
        scaled = np.empty(d_k, np.float32)
        p = np.empty(CHUNK, np.float32)
        o = np.empty(values.shape[3], np.float32)
        for task in range(share * step, min((share + 1) * step, tasks)):
            # Rows of a head are consecutive, so a thread reads few heads of the cache.
            h = task // rows
            t = task % rows
            attend_one(
                q[t, h],
                keys[h // group],
                values[h // group],
                positions[t],
                scale,
                window,
                half,
                scaled,
                p,
                o,
                out[t, h],
            )


# --- quantized keys or values ----------------------------------------------------------------------------------


@njit(cache=True, error_model="numpy")
def floats(chunk, bits, out):  # type: ignore[no-untyped-def]
    """Convert a chunk of float32 or float16, given as words, to float32."""
    flat = out.reshape(-1)
    if bits == 32:
        words = chunk.view(np.float32)
        for i in range(flat.size):  # an assignment of arrays takes seconds to compile
            flat[i] = words[i]
    else:
        halves = chunk.view(np.uint16)
        for i in range(flat.size):
            flat[i] = half_to_float(halves[i])


@njit(cache=True, error_model="numpy")
def unpack(keys, values, k_bits, v_bits, key_integers, key_floats, value_integers, value_floats):  # type: ignore[no-untyped-def]
    """Unpack a chunk of keys and of values, given as words.  Keys: integers int16 [64, d_k] where they are quantized, else
    key_floats float32 [d_k, 64].  Values: value_floats float32 [64, d_v]; value_integers int8 [64, d_v] is scratch."""
    if k_bits < 16:
        quantized_cache.integers(keys, key_integers.shape[1], k_bits, False, key_integers)
    else:
        floats(keys, k_bits, key_floats)
    if v_bits < 16:
        quantized_cache.values(values, value_integers.shape[1], v_bits, value_integers, value_floats)
    else:
        floats(values, v_bits, value_floats)


@njit(cache=True, error_model="numpy")
def score(q, integers, scales, scale, keys, k_bits, key_integers, key_floats, dots, scaled, p):  # type: ignore[no-untyped-def]
    """p [64] = scores of one query with the keys that ``unpack`` has written; integers and scales are those of the query
    where keys are quantized; dots int32 [64] and scaled float32 [d_k] are scratch."""
    if k_bits < 16:
        quantized_cache.scores(key_integers, keys, k_bits, integers, scales, dots, p)
    else:
        for d in range(q.size):
            scaled[d] = q[d] * scale
        weighted_sum(scaled, 0, q.size, key_floats, False, p)


@njit(cache=True, error_model="numpy")
def attend_share(  # type: ignore[no-untyped-def]
    q, integers, scales, keys, values, positions, scale, window, k_bits, v_bits, begin, end, out
):
    """One thread's share of ``attend_quantized``: the pairs begin .. end - 1 of a head and a row; the rows of a head are
    consecutive."""
    rows, n_head, d_k = q.shape
    group, chunks, d_v = n_head // keys.shape[0], keys.shape[1], out.shape[2]
    key_integers, value_integers = np.empty((CHUNK, d_k), np.int16), np.empty((CHUNK, d_v), np.int8)
    dots = np.empty(CHUNK, np.int32)
    key_floats, value_floats = np.empty((d_k, CHUNK), np.float32), np.empty((CHUNK, d_v), np.float32)
    p, o, scaled = np.empty(CHUNK, np.float32), np.empty(d_v, np.float32), np.empty(d_k, np.float32)
    maxima, totals = np.empty(max(end - begin, 0), np.float32), np.empty(max(end - begin, 0), np.float32)
    while begin < end:
        g = begin // rows // group
        stop = min(end, (g + 1) * group * rows)
        low, high = positions[0], positions[0]
        for task in range(begin, stop):
            position = positions[task % rows]
            low, high = min(low, first_visible(position, window)), max(high, position)
            maxima[task - begin], totals[task - begin] = f32(-np.inf), f32(0.0)
            out[task % rows, task // rows, :] = f32(0.0)
        for chunk in range(low // CHUNK, high // CHUNK + 1):
            own, unpacked = keys[g, chunk % chunks], (key_integers, key_floats)
            unpack(own, values[g, chunk % chunks], k_bits, v_bits, *unpacked, value_integers, value_floats)
            for task in range(begin, stop):
                t, h = task % rows, task // rows
                lowest = first_visible(positions[t], window)
                first, last = max(0, lowest - chunk * CHUNK), min(CHUNK, positions[t] - chunk * CHUNK + 1)
                if first >= last:
                    continue
                score(q[t, h], integers[t, h], scales[t, h], scale, own, k_bits, *unpacked, dots, scaled, p)
                m = weigh(p, first, last)
                weighted_sum(p, first, last, value_floats, False, o)
                joined = join(maxima[task - begin], totals[task - begin], m, fold(p, CHUNK), o, out[t, h])
                maxima[task - begin], totals[task - begin] = joined
        for task in range(begin, stop):
            for d in range(d_v):
                out[task % rows, task // rows, d] = out[task % rows, task // rows, d] / totals[task - begin]
        begin = stop


@njit(cache=True, parallel=True, error_model="numpy")
def attend_quantized(  # type: ignore[no-untyped-def]
    q, integers, scales, keys, values, positions, scale, window, k_bits, v_bits, shares, out
):
    """Attention of every head of every row where keys, values or both are quantized.

    q float32 [rows, n_head, d_k]; keys and values are words [n_head_kv, chunks, ...] whatever their types; positions int32
    [rows]; window 0 means all earlier positions; out float32 [rows, n_head, d_v].

    integers int8 [rows, n_head, d_k] and scales float32 [rows, n_head, d_k / 32] are the query where keys are quantized.  A
    thread unpacks a chunk once for all its heads and rows that share it.
    """
    tasks = q.shape[0] * q.shape[1]
    step = (tasks + shares - 1) // shares
    for share in prange(shares):
        begin, end = share * step, min((share + 1) * step, tasks)
        attend_share(q, integers, scales, keys, values, positions, scale, window, k_bits, v_bits, begin, end, out)
