"""Causal attention over a cache of keys and values, in chunks of 64 absolute positions.

Formula: out = sum_j softmax_j(scale q . k_j) v_j over the visible positions j: lo <= j <= p, lo = max(0, p - window + 1).
Shapes: q float32 [rows, n_head, d_k]; keys [n_head_kv, chunks, d_k, 64], values [n_head_kv, chunks, 64, d_v], float32 or
    uint16 holding float16; out float32 [rows, n_head, d_v].  Position j lives in ring chunk (j // 64) % chunks, lane j % 64.
    Keys are stored transposed within a chunk, so that 64 scores are 64 lanes and each is one chain over d_k.
Who owns what: a thread owns (row, head) pairs; head h reads the keys and values of head h // (n_head / n_head_kv).
Reduction order: score_j = fma(q'_(d-1), k_(d-1), ... fma(q'_0, k_0, 0)), q' = q * scale; hidden positions score -inf;
    per chunk: m = max, p_j = exp(score_j - m), l = halving tree of p_0..p_63 ((p0 + p32), ..., then 16, 8, 4, 2, 1),
    o_d = fma(p_b, v_bd, ... fma(p_a, v_ad, 0)) over the visible lanes a..b of the chunk only;
    chunks join in rising position: M' = max(M, m), a = exp(M - M'), b = exp(m - M'), L' = fma(L, a, b l),
    O' = fma(O, a, b o); out = O / L.
Bytes moved: (d_k + d_v) * element size per visible position, n_head_kv times from memory.
"""

import numpy as np
from numba import njit, prange

from engine.cache.kv import CHUNK
from engine.cpu.fold import fold
from engine.cpu.intrinsics import LANES, weighted_sum64
from engine.numerics import exp, float_to_half, fma, half_to_float

f32 = np.float32


@njit(cache=True)
def append(k, v, positions, half, keys, values):  # type: ignore[no-untyped-def]
    """Store k [rows, n_head_kv, d_k] and v [rows, n_head_kv, d_v] float32 at their positions int32 [rows];
    ``half``: the cache holds float16 bits."""
    chunks = keys.shape[1]
    for t in range(k.shape[0]):
        c = positions[t] // CHUNK % chunks
        lane = positions[t] % CHUNK
        for h in range(k.shape[1]):
            for d in range(k.shape[2]):
                keys[h, c, d, lane] = float_to_half(k[t, h, d]) if half else k[t, h, d]
            for d in range(v.shape[2]):
                values[h, c, lane, d] = float_to_half(v[t, h, d]) if half else v[t, h, d]


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
def attend_chunk(scaled, keys, values, first, last, half, p, o):  # type: ignore[no-untyped-def]
    """One chunk: scaled q' [d_k], keys [d_k, 64], values [64, d_v]; visible are the lanes [first, last).  Returns the largest
    score and the sum of p, and leaves the weighted values in o [d_v]; p [64] is scratch."""
    weighted_sum(scaled, 0, scaled.size, keys, half, p)
    m = f32(-np.inf)
    for j in range(CHUNK):
        if j < first or j >= last:
            p[j] = f32(-np.inf)
        m = max(m, p[j])
    for j in range(CHUNK):
        p[j] = exp(p[j] - m)
    # What lies in hidden lanes is of other rows or older answers; 0 * inf would let it show.
    weighted_sum(p, first, last, values, half, o)
    return m, fold(p, CHUNK)


@njit(cache=True, error_model="numpy")
def attend_one(q, keys, values, position, scale, window, half, scaled, p, o, out):  # type: ignore[no-untyped-def]
    """One head of one row: q [d_k], keys [chunks, d_k, 64], values [chunks, 64, d_v], out [d_v]; scaled [d_k], p [64]
    and o [d_v] are scratch."""
    chunks = keys.shape[0]
    low = max(0, position - window + 1) if window > 0 else 0
    for d in range(q.size):
        scaled[d] = q[d] * scale
    maximum = f32(-np.inf)
    total = f32(0.0)
    out[:] = f32(0.0)
    for chunk in range(low // CHUNK, position // CHUNK + 1):
        c = chunk % chunks
        first, last = max(0, low - chunk * CHUNK), min(CHUNK, position - chunk * CHUNK + 1)
        m, weight = attend_chunk(scaled, keys[c], values[c], first, last, half, p, o)
        joined = max(maximum, m)
        a = exp(maximum - joined)
        b = exp(m - joined)
        total = fma(total, a, b * weight)
        for d in range(out.size):
            out[d] = fma(out[d], a, b * o[d])
        maximum = joined
    for d in range(out.size):
        out[d] = out[d] / total


@njit(cache=True, parallel=True, error_model="numpy")
def attend(q, keys, values, positions, scale, window, half, shares, out):  # type: ignore[no-untyped-def]
    """Every head of every row; window 0 means all earlier positions."""
    rows, n_head, d_k = q.shape
    group = n_head // keys.shape[0]
    tasks = rows * n_head
    step = (tasks + shares - 1) // shares
    for share in prange(shares):
        scaled = np.empty(d_k, np.float32)
        p = np.empty(CHUNK, np.float32)
        o = np.empty(values.shape[3], np.float32)
        for task in range(share * step, min((share + 1) * step, tasks)):
            # Rows of one head follow one another, so a thread reads few heads of the cache.
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
