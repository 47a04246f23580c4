"""Gates of which only the largest stay, as Gemma 3n has them in its first layers: those above a number of standard
deviations, which for gates with a normal distribution are a known share.

Formula: y[i] = max(x[i] - (mean + multiplier * sqrt(sum((x - mean)^2) / n)), 0), mean = sum(x) / n; NaN where a sum
    overflows.
Shapes: x, y float32 [rows, n].
Who owns what: an item is a row.
Reduction order: for both sums, chain c of 256 owns i with i % 256 == c, from 0 in rising i, one addition or one fma(d, d,
    chain) each, d = x - mean; then the halving tree of ``engine/cpu/fold.py``; fma(deviation, multiplier, mean).
Bytes moved: 8 n per row.
"""

import numpy as np
from numba import njit

from engine.cpu.fold import fold
from engine.numerics import fma, gaussian_cutoff, rectified

f32 = np.float32
CHAINS = 256


@njit(cache=True, error_model="numpy")
def sparsify(x, multiplier, y, first, last):
    """y = the gates x that stay, for the rows [first, last)."""
    chains, n = np.empty(CHAINS, np.float32), x.shape[1]
    for t in range(first, last):
        chains[:] = f32(0.0)
        for k in range(0, n, CHAINS):
            part = x[t, k : k + CHAINS]
            for c in range(part.size):
                chains[c] = chains[c] + part[c]
        mean = fold(chains, CHAINS) / f32(n)
        chains[:] = f32(0.0)
        for k in range(0, n, CHAINS):
            part = x[t, k : k + CHAINS]
            for c in range(part.size):
                chains[c] = fma(part[c] - mean, part[c] - mean, chains[c])
        cutoff = gaussian_cutoff(mean, fold(chains, CHAINS), f32(n), multiplier)
        for i in range(n):
            y[t, i] = rectified(x[t, i] - cutoff)
