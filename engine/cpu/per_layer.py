"""Per-layer embeddings (Gemma 4 E2B and E4B): what every layer receives about the token itself.

Formula: out[l, t] = (rms_norm(m[t, l] * scale, weight) + e[t, l]) / sqrt(2): of token t, m is a projection of its embedding
    and e a row of a table, both with n elements for each layer.
Shapes: m, e float32 [rows, layers * n]; weight float32 [n]; out float32 [layers, rows, n].
Who owns what: an item is a layer of a row, layer * rows + row.
Reduction order: r by ``engine/cpu/rms_norm.py``; then fma(x * r, weight, e) * float32(sqrt(1/2)), x = m * scale.
Bytes moved: 12 layers n per row.
"""

import numpy as np
from numba import njit

from engine.cpu.rms_norm import NORM_CHAINS, inverse_rms
from engine.numerics import fma

f32 = np.float32

ROOT_HALF = f32(0.5**0.5)


@njit(cache=True, error_model="numpy")
def per_layer_inputs(m, e, weight, scale, eps, out, first, last):
    """The inputs of the items [first, last): m, e float32 [rows, layers * n], weight [n] to out [layers, rows, n]."""
    n = weight.size
    chains, x = np.empty(NORM_CHAINS, np.float32), np.empty(n, np.float32)
    for item in range(first, last):
        il, t = item // out.shape[1], item % out.shape[1]
        for i in range(n):
            x[i] = m[t, il * n + i] * scale
        r = inverse_rms(x, eps, chains)
        for i in range(n):
            out[il, t, i] = fma(x[i] * r, weight[i], e[t, il * n + i]) * ROOT_HALF
