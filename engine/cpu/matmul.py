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
from engine.cpu.fold import fold
from engine.cpu.intrinsics import dot16, dot32_four, dot256_four
from engine.cpu.unpack import unpack_row
from engine.gguf.quants import CHAINS, FLOAT_CHAINS, TINY
from engine.numerics import bits_float, float_bits, fma, round_product

f32 = np.float32
i8 = np.int8
i16 = np.int16
i32 = np.int32


@njit(forceinline=True, error_model="numpy")
def quantize_unit(x, unit, q, s):  # type: ignore[no-untyped-def]
    """Quantize one unit: float32 x [unit] to int8 q [unit] and the int16 sums s of each 16; returns the scale.

    scale = amax / 127; q = round(x * (127 / amax)), ties to even.  A unit with amax < 2**-100 counts as zero, because
    127 / amax would overflow where amax is subnormal.
    """
    bits = i32(0)
    for i in range(unit):
        # The magnitudes of floats order as their bits do, so this is a maximum of integers, exact in any order.
        bits = max(bits, i32(float_bits(x[i]) & i32(0x7FFFFFFF)))
    amax = bits_float(bits)
    if amax < TINY:
        amax = f32(0.0)
        inverse = f32(0.0)
    else:
        inverse = f32(127.0) / amax
    for i in range(unit):
        q[i] = i8(round_product(x[i], inverse))
    for g in range(unit // 16):
        total = i16(0)
        for i in range(16 * g, 16 * g + 16):
            total = i16(total + i16(q[i]))
        s[g] = total
    return amax / f32(127.0)


@njit(cache=True, error_model="numpy")
def quantize_rows(x, unit, q, d, s):  # type: ignore[no-untyped-def]
    """Quantize float32 x [n, K] to int8 q [n, K], scales d [n, K / unit] and sums s int16 [n, K / 16]."""
    for t in range(x.shape[0]):
        for u in range(d.shape[1]):
            a, g = u * unit, u * unit // 16
            # Loops of a length that the compiler knows become vector operations.
            if unit == 256:
                d[t, u] = quantize_unit(x[t, a : a + 256], 256, q[t, a : a + 256], s[t, g : g + 16])
            else:
                d[t, u] = quantize_unit(x[t, a : a + 32], 32, q[t, a : a + 32], s[t, g : g + 2])


@njit(forceinline=True, error_model="numpy")
def dot_rows(unit, has_min, w, d, m, dm, q, da, s, dots, acc, total):  # type: ignore[no-untyped-def]
    """Multiply four unpacked weight rows by one activation row, into total float32 [4].

    d and dm are laid out [unit][row], so that the four rows are four lanes of every float operation; ``dots`` int32 [8]
    (I of the four rows, then M) and ``acc`` float32 [4] are scratch.
    """
    columns = q.size
    units = da.size
    length = (units + CHAINS - 1) // CHAINS
    for r in range(4):
        total[r] = f32(0.0)
    for first in range(0, units, length):
        for r in range(4):
            acc[r] = f32(0.0)
        for u in range(first, min(first + length, units)):
            j = u * unit
            if unit == 256:
                dot256_four(w, j, columns, q, j, dots, 0)
            else:
                dot32_four(w, j, columns, q, j, dots, 0)
            if has_min and unit == 256:
                g = j // 16
                for r in range(4):
                    dots[4 + r] = dot16(m, r * (columns // 16) + g, s, g)
                for r in range(4):
                    value = fma(dm[4 * u + r], f32(dots[4 + r]), d[4 * u + r] * f32(dots[r]))
                    acc[r] = fma(da[u], value, acc[r])
            elif has_min:
                # The 32-wide formats with a minimum have m = 1, so M is the sum of the activations for every row.
                minimum = f32(i32(s[2 * u]) + i32(s[2 * u + 1]))
                for r in range(4):
                    value = fma(dm[4 * u + r], minimum, d[4 * u + r] * f32(dots[r]))
                    acc[r] = fma(da[u], value, acc[r])
            else:
                for r in range(4):
                    acc[r] = fma(da[u], d[4 * u + r] * f32(dots[r]), acc[r])
        for r in range(4):
            total[r] = total[r] + acc[r]


@njit(cache=True, error_model="numpy")
def matmul_rows(fmt, unit, has_min, src, q, da, s, first, last, out):  # type: ignore[no-untyped-def]
    """Weight rows [first, last) times every activation row: one thread's share."""
    rows, columns = q.shape
    units = da.shape[1]
    w = np.zeros(4 * columns, np.int16)
    m = np.zeros(4 * columns // 16, np.int16)
    d = np.zeros(4 * units, np.float32)
    dm = np.zeros(4 * units, np.float32)
    dots = np.zeros(8, np.int32)
    acc = np.zeros(4, np.float32)
    total = np.zeros(4, np.float32)
    for r in range(first, last, 4):
        count = min(4, last - r)
        for k in range(count):
            unpack_row(fmt, src[r + k], w, k * columns, m, d, dm, k, 4, units, True)
        for t in range(rows):
            if unit == 256:
                if has_min:
                    dot_rows(256, True, w, d, m, dm, q[t], da[t], s[t], dots, acc, total)
                else:
                    dot_rows(256, False, w, d, m, dm, q[t], da[t], s[t], dots, acc, total)
            elif has_min:
                dot_rows(32, True, w, d, m, dm, q[t], da[t], s[t], dots, acc, total)
            else:
                dot_rows(32, False, w, d, m, dm, q[t], da[t], s[t], dots, acc, total)
            for k in range(count):
                out[t, r + k] = total[k]


@njit(cache=True, parallel=True, error_model="numpy")
def matmul_quantized(fmt, unit, has_min, src, q, da, s, shares, out):  # type: ignore[no-untyped-def]
    """Multiply packed rows src uint8 [R, row bytes] by quantized rows into out [n, R]; ``shares`` threads divide the rows."""
    step = (src.shape[0] + shares - 1) // shares
    step = (step + 3) // 4 * 4
    for c in prange(shares):
        first = c * step
        last = min(first + step, src.shape[0])
        if first < last:
            matmul_rows(fmt, unit, has_min, src, q, da, s, first, last, out)


@njit(cache=True, error_model="numpy")
def float_dot(w, x):  # type: ignore[no-untyped-def]
    """sum w[k] x[k] over float32 rows, in the float reduction order."""
    acc = np.zeros(FLOAT_CHAINS, np.float32)
    whole = x.size // FLOAT_CHAINS * FLOAT_CHAINS
    for k in range(0, whole, FLOAT_CHAINS):
        for c in range(FLOAT_CHAINS):
            acc[c] = fma(w[k + c], x[k + c], acc[c])
    for k in range(whole, x.size):
        acc[k - whole] = fma(w[k], x[k], acc[k - whole])
    return fold(acc, FLOAT_CHAINS)


@njit(cache=True, parallel=True, error_model="numpy")
def matmul_float(fmt, size, src, x, shares, out):  # type: ignore[no-untyped-def]
    """Multiply rows of a float format, src uint8 [R, K * size], by x float32 [n, K], into out [n, R]."""
    step = (src.shape[0] + shares - 1) // shares
    for c in prange(shares):
        w = np.empty(x.shape[1], np.float32)
        for r in range(c * step, min((c + 1) * step, src.shape[0])):
            for k in range(w.size):
                w[k] = load_float(fmt, src[r], k * size)
            for t in range(x.shape[0]):
                out[t, r] = float_dot(w, x[t])
