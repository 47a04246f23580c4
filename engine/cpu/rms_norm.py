"""Root-mean-square normalization (Zhang and Sennrich 2019): plain, added to a residual, and of groups.

Formula: y[i] = (x[i] * r) * weight[i], r = 1 / sqrt(sum(x^2) / n + eps), NaN where the sum overflows.
Shapes: x float32 [rows, n], weight float32 [n], y float32 [rows, n]; of groups: weight float32 [groups, n], and row t is
    multiplied by weight[t % groups].
Who owns what: an item is a row.
Reduction order: chain c of 256 owns i with i % 256 == c, one fma(x, x, chain) each in rising i; then the halving tree
    (c0 + c128, c1 + c129, ...), (0 + 64, ...), ..., (0 + 1).  Rows shorter than 256 leave chains at 0.
Bytes moved: 8 n per row.
"""

import numpy as np
from numba import njit

from engine.cpu.fold import fold
from engine.numerics import fma, inverse_root

f32 = np.float32
NORM_CHAINS = 256


@njit(cache=True)
def norm_width(n):
    """The number of chains of a row of n: 256, or for n <= 128 the least power of two that is not below n."""
    width = NORM_CHAINS
    while width // 2 >= n:
        width //= 2
    return width


@njit(cache=True, error_model="numpy")
def squares(x, chains):
    """The sum of squares of one row x float32 [n]; chains is scratch, float32 [256]."""
    n = x.size
    width = norm_width(n)
    chains[:width] = f32(0.0)
    whole = n // width * width
    for k in range(0, whole, width):
        row = x[k : k + width]
        for c in range(width):
            chains[c] = fma(row[c], row[c], chains[c])
    for k in range(whole, n):
        chains[k - whole] = fma(x[k], x[k], chains[k - whole])
    return fold(chains, width)


@njit(cache=True, error_model="numpy")
def inverse_rms(x, eps, chains):
    """r of one row x float32 [n]; chains is scratch, float32 [256]."""
    return inverse_root(squares(x, chains), f32(x.size), eps)


@njit(cache=True, error_model="numpy")
def rms_norm(x, weight, eps, y, first, last):
    """y = normalized x for the rows [first, last); x, y float32 [rows, n], weight float32 [n], or [0] for ones."""
    chains = np.empty(NORM_CHAINS, np.float32)
    for t in range(first, last):
        r = inverse_rms(x[t], eps, chains)
        if weight.size == 0:
            for i in range(x.shape[1]):
                y[t, i] = x[t, i] * r
        else:
            for i in range(weight.size):
                y[t, i] = x[t, i] * r * weight[i]


@njit(cache=True, error_model="numpy")
def rms_norm_add(residual, x, weight, eps, scale, y, first, last):
    """y = (residual + normalized x) * scale, fma(x * r, weight, residual) * scale, for the rows [first, last)."""
    chains = np.empty(NORM_CHAINS, np.float32)
    for t in range(first, last):
        r = inverse_rms(x[t], eps, chains)
        for i in range(weight.size):
            y[t, i] = fma(x[t, i] * r, weight[i], residual[t, i]) * scale


@njit(cache=True, error_model="numpy")
def rms_norm_groups(x, weight, eps, y, first, last):
    """y = normalized x for the rows [first, last), each of which is a group of a longer row; weight float32 [groups, n]."""
    chains = np.empty(NORM_CHAINS, np.float32)
    groups, n = weight.shape
    for t in range(first, last):
        r = inverse_rms(x[t], eps, chains)
        own = weight[t % groups]
        for i in range(n):
            y[t, i] = x[t, i] * r * own[i]
