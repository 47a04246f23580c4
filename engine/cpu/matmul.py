"""Matrix products: activations quantized once, weights unpacked once per row, integer dots, floats once per unit.

Formula: out[t, r] = sum_k weight[r, k] * x[t, k].
Shapes: x float32 [n, K]; weights [R, K] packed; out float32 [n, R].
Who owns what: a thread owns a run of weight rows and takes them four at a time through all n activation rows.
Reduction order, quantized: units u = 0 .. U-1; chain c owns units [c L, (c+1) L), L = ceil(U / 8);
    chain_c = fma(da_u, value_u, ... fma(da_first, value_first, 0)),  value_u = fma(dm_u, M_u, d_u * I_u)
    (value_u = d_u * I_u where the format has no minimum);
    out = ((((chain_0 + chain_1) + chain_2) + ...) + chain_7).
Reduction order, float: chain c of 32 owns k with k % 32 == c, one fma each in rising k; then the halving tree
    (c0 + c16, c1 + c17, ...), (0 + 8, ...), ..., (0 + 1).
Bytes moved: each weight row once from memory (row bytes), n K bytes of activations from the cache per row.
"""

import numpy as np
from numba import njit, prange

from engine.cpu.embed import load_float
from engine.cpu.intrinsics import dot16, dot32, dot256
from engine.cpu.unpack import Q2_K, Q4_1, Q4_K, Q5_1, Q5_K, unpack_row
from engine.numerics import bits_float, float_bits, fma, round_product
from engine.quants import CHAINS, FLOAT_CHAINS

f32 = np.float32
i8 = np.int8
i16 = np.int16
i32 = np.int32


@njit(cache=True, error_model="numpy")
def quantize_unit(x, q, s, start, unit):  # type: ignore[no-untyped-def]
    """One unit of float32 x to int8 q and the int16 sums s of each 16; returns the scale.

    scale = amax / 127; q = round(x * (127 / amax)), ties to even; all zero where amax is 0.
    """
    bits = i32(0)
    for i in range(start, start + unit):
        # The magnitudes of floats order as their bits do, so the maximum is one of integers: exact in any order.
        bits = max(bits, i32(float_bits(x[i]) & i32(0x7FFFFFFF)))
    amax = bits_float(bits)
    inverse = f32(127.0) / amax if amax > f32(0.0) else f32(0.0)
    for g in range(start // 16, (start + unit) // 16):
        total = i32(0)
        for i in range(16 * g, 16 * g + 16):
            v = round_product(x[i], inverse)
            q[i] = i8(v)
            total += v
        s[g] = i16(total)
    return amax / f32(127.0)


@njit(cache=True, error_model="numpy")
def quantize_rows(x, unit, q, d, s):  # type: ignore[no-untyped-def]
    """float32 x [n, K] to int8 q [n, K], scales d [n, K / unit] and sums s int16 [n, K / 16]."""
    for t in range(x.shape[0]):
        for u in range(d.shape[1]):
            d[t, u] = quantize_unit(x[t], q[t], s[t], u * unit, unit)


@njit(forceinline=True, error_model="numpy")
def unit_dot(unit, w, i, q, j):  # type: ignore[no-untyped-def]
    """I of one unit: int32, exact."""
    if unit == 256:
        return dot256(w, i, q, j)
    return dot32(w, i, q, j)


@njit(forceinline=True, error_model="numpy")
def unit_min(unit, m, i, s, j):  # type: ignore[no-untyped-def]
    """M of one unit: int32, exact."""
    if unit == 256:
        return dot16(m, i, s, j)
    return i32(m[i] * s[j] + m[i + 1] * s[j + 1])


@njit(cache=True, error_model="numpy")
def dot_rows(unit, has_min, w, d, m, dm, q, da, s, total):  # type: ignore[no-untyped-def]
    """Four unpacked weight rows times one activation row, into total float32 [4]."""
    columns = q.size
    units = da.size
    length = (units + CHAINS - 1) // CHAINS
    t0 = t1 = t2 = t3 = f32(0.0)
    for first in range(0, units, length):
        a0 = a1 = a2 = a3 = f32(0.0)
        for u in range(first, min(first + length, units)):
            j = u * unit
            v0 = d[u] * f32(unit_dot(unit, w, j, q, j))
            v1 = d[units + u] * f32(unit_dot(unit, w, columns + j, q, j))
            v2 = d[2 * units + u] * f32(unit_dot(unit, w, 2 * columns + j, q, j))
            v3 = d[3 * units + u] * f32(unit_dot(unit, w, 3 * columns + j, q, j))
            if has_min:
                g = j // 16
                groups = columns // 16
                v0 = fma(dm[u], f32(unit_min(unit, m, g, s, g)), v0)
                v1 = fma(dm[units + u], f32(unit_min(unit, m, groups + g, s, g)), v1)
                v2 = fma(dm[2 * units + u], f32(unit_min(unit, m, 2 * groups + g, s, g)), v2)
                v3 = fma(dm[3 * units + u], f32(unit_min(unit, m, 3 * groups + g, s, g)), v3)
            a0 = fma(da[u], v0, a0)
            a1 = fma(da[u], v1, a1)
            a2 = fma(da[u], v2, a2)
            a3 = fma(da[u], v3, a3)
        t0 = t0 + a0
        t1 = t1 + a1
        t2 = t2 + a2
        t3 = t3 + a3
    total[0] = t0
    total[1] = t1
    total[2] = t2
    total[3] = t3


@njit(cache=True, error_model="numpy")
def matmul_rows(fmt, unit, src, q, da, s, first, last, out):  # type: ignore[no-untyped-def]
    """Weight rows [first, last) times every activation row: one thread's share."""
    rows, columns = q.shape
    units = da.shape[1]
    has_min = fmt == Q4_K or fmt == Q5_K or fmt == Q2_K or fmt == Q4_1 or fmt == Q5_1
    w = np.empty(4 * columns, np.int16)
    m = np.zeros(4 * columns // 16, np.int16)
    d = np.zeros(4 * units, np.float32)
    dm = np.zeros(4 * units, np.float32)
    total = np.empty(4, np.float32)
    for r in range(first, last, 4):
        count = min(4, last - r)
        for k in range(count):
            unpack_row(fmt, src[r + k], w, k * columns, m, d, dm, k * units, units, True)
        for t in range(rows):
            if unit == 256:
                dot_rows(256, has_min, w, d, m, dm, q[t], da[t], s[t], total)
            else:
                dot_rows(32, has_min, w, d, m, dm, q[t], da[t], s[t], total)
            for k in range(count):
                out[t, r + k] = total[k]


@njit(cache=True, parallel=True, error_model="numpy")
def matmul_quantized(fmt, unit, src, q, da, s, shares, out):  # type: ignore[no-untyped-def]
    """Packed rows src uint8 [R, row bytes] times quantized rows, in ``shares`` runs of rows, into out [n, R]."""
    step = (src.shape[0] + shares - 1) // shares
    step = (step + 3) // 4 * 4
    for c in prange(shares):
        first = c * step
        last = min(first + step, src.shape[0])
        if first < last:
            matmul_rows(fmt, unit, src, q, da, s, first, last, out)


@njit(cache=True, error_model="numpy")
def float_dot(w, x):  # type: ignore[no-untyped-def]
    """sum w[k] x[k] over float32 rows in the float order."""
    acc = np.zeros(FLOAT_CHAINS, np.float32)
    whole = x.size // FLOAT_CHAINS * FLOAT_CHAINS
    for k in range(0, whole, FLOAT_CHAINS):
        for c in range(FLOAT_CHAINS):
            acc[c] = fma(w[k + c], x[k + c], acc[c])
    for k in range(whole, x.size):
        acc[k - whole] = fma(w[k], x[k], acc[k - whole])
    width = FLOAT_CHAINS // 2
    while width > 0:
        for c in range(width):
            acc[c] = acc[c] + acc[c + width]
        width //= 2
    return acc[0]


@njit(cache=True, parallel=True, error_model="numpy")
def matmul_float(fmt, size, src, x, shares, out):  # type: ignore[no-untyped-def]
    """Rows of a float format, src uint8 [R, K * size], times x float32 [n, K], into out [n, R]."""
    step = (src.shape[0] + shares - 1) // shares
    for c in prange(shares):
        w = np.empty(x.shape[1], np.float32)
        for r in range(c * step, min((c + 1) * step, src.shape[0])):
            for k in range(w.size):
                w[k] = load_float(fmt, src[r], k * size)
            for t in range(x.shape[0]):
                out[t, r] = float_dot(w, x[t])
