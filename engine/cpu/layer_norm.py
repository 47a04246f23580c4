"""Layer normalization (Ba, Kiros and Hinton 2016).

Formula: y[i] = fma((x[i] - m) * r, weight[i], bias[i]), or ((x[i] - m) * r) * weight[i] without a bias, with m = sum(x) / n
    and r = 1 / sqrt(sum((x - m)^2) / n + eps), NaN where a sum overflows.
Shapes: x float32 [rows, n], weight, bias float32 [n], y float32 [rows, n].  Without a bias, weight may be [m, n]: row t uses
    row t mod m of it, as where rows are heads that have weights of their own.
Who owns what: an item is a row.
Reduction order: that of ``engine/cpu/rms_norm.py`` for both sums.  Chain c of 256 owns i with i % 256 == c, in rising i: one
    chain + x each, then one fma(x - m, x - m, chain) each; then the halving tree (c0 + c128, c1 + c129, ...), (0 + 64, ...),
    ..., (0 + 1).  Rows of at most 128 use the least power of two of chains.
Bytes moved: 8 n per row.
"""

import numpy as np
from numba import njit

from engine.cpu.fold import fold
from engine.cpu.rms_norm import NORM_CHAINS, norm_width
from engine.numerics import fma, inverse_root

f32 = np.float32


@njit(cache=True, error_model="numpy")
def mean_of(x, chains):
    """m of one row x float32 [n]; chains is scratch, float32 [256]."""
    n = x.size
    width = norm_width(n)
    chains[:width] = f32(0.0)
    whole = n // width * width
    for k in range(0, whole, width):
        row = x[k : k + width]
        for c in range(width):
            chains[c] = chains[c] + row[c]
    for k in range(whole, n):
        chains[k - whole] = chains[k - whole] + x[k]
    return f32(fold(chains, width) / f32(n))


@njit(cache=True, error_model="numpy")
def squares_about(x, mean, chains):
    """The sum of (x - mean)^2 of one row x float32 [n]; chains is scratch, float32 [256]."""
    n = x.size
    width = norm_width(n)
    chains[:width] = f32(0.0)
    whole = n // width * width
    for k in range(0, whole, width):
        row = x[k : k + width]
        for c in range(width):
            d = row[c] - mean
            chains[c] = fma(d, d, chains[c])
    for k in range(whole, n):
        d = x[k] - mean
        chains[k - whole] = fma(d, d, chains[k - whole])
    return fold(chains, width)


@njit(cache=True, error_model="numpy")
def inverse_deviation(x, mean, eps, chains):
    """r of one row x float32 [n] whose m is ``mean``; chains is scratch, float32 [256]."""
    return inverse_root(squares_about(x, mean, chains), f32(x.size), eps)


@njit(cache=True, error_model="numpy")
def layer_norm(x, weight, bias, eps, y, first, last):
    """y = normalized x for the rows [first, last); x, y float32 [rows, n], weight float32 [n], or [m * n] without a bias,
    bias float32 [n], or [0] for none."""
    n = x.shape[1]
    chains = np.empty(NORM_CHAINS, np.float32)
    for t in range(first, last):
        mean = mean_of(x[t], chains)
        r = inverse_deviation(x[t], mean, eps, chains)
        if bias.size == 0:
            own = weight[t % (weight.size // n) * n :]
            for i in range(n):
                y[t, i] = (x[t, i] - mean) * r * own[i]
        else:
            for i in range(n):
                y[t, i] = fma((x[t, i] - mean) * r, weight[i], bias[i])
