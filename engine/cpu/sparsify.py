"""Gates of which only the largest stay, as Gemma 3n has them in its first layers: those above a number of standard
deviations, which for gates with a normal distribution are a known share.

Formula: y[i] = max(x[i] - (mean + multiplier * sqrt(sum((x - mean)^2) / n)), 0), mean = sum(x) / n; NaN where a sum
    overflows.
Shapes: x, y float32 [rows, n].
Who owns what: an item is a row.
Reduction order: that of ``engine/cpu/layer_norm.py`` for both sums; then fma(deviation, multiplier, mean).
Bytes moved: 8 n per row.
"""

import numpy as np
from numba import njit

from engine.cpu.layer_norm import mean_of, squares_about
from engine.cpu.rms_norm import NORM_CHAINS
from engine.numerics import gaussian_cutoff, rectified

f32 = np.float32


@njit(cache=True, error_model="numpy")
def sparsify(x, multiplier, y, first, last):
    """y = the gates x that stay, for the rows [first, last)."""
    chains, n = np.empty(NORM_CHAINS, np.float32), x.shape[1]
    for t in range(first, last):
        mean = mean_of(x[t], chains)
        cutoff = gaussian_cutoff(mean, squares_about(x[t], mean, chains), f32(n), multiplier)
        for i in range(n):
            y[t, i] = rectified(x[t, i] - cutoff)
