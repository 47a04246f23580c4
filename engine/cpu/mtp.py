"""What multi-token prediction needs beside a layer: the trunk's outputs by position, and the input of the layer.

Formula: ring[p % length] = x_p; with e_t the embedding of the token at position p_t and h the ring's row of position p_t - 1
    (zeros where p_t is 0): out_t = rms_norm(e_t), rms_norm(h), one after the other (``engine/cpu/rms_norm.py``).
Shapes: x, e float32 [rows, n]; ring float32 [length, n]; positions int32 [rows]; weights float32 [n]; out float32
    [rows, 2 n].
Who owns what: one call, one thread.
Reduction order: that of ``engine/cpu/rms_norm.py``.
Bytes moved: 8 n per row; 16 n for the input.
"""

import numpy as np
from numba import njit

from engine.cpu.rms_norm import rms_norm

f32 = np.float32


@njit(cache=True, error_model="numpy")
def keep_rows(ring, x, positions):  # type: ignore[no-untyped-def]
    """Store x[t] in ring row positions[t] % length; if there are more rows than that, the last ones stay."""
    rows, length = x.shape[0], ring.shape[0]
    for t in range(max(0, rows - length), rows):
        ring[positions[t] % length] = x[t]


@njit(cache=True, error_model="numpy")
def mtp_input(e, e_norm, hiddens, h_norm, positions, eps, out):  # type: ignore[no-untyped-def]
    """The input of the layer: the normalized token, then the normalized output of the trunk for the position before."""
    rows, n = e.shape
    h = np.zeros((rows, n), np.float32)
    for t in range(rows):
        if positions[t] > 0:
            h[t] = hiddens[(positions[t] - 1) % hiddens.shape[0]]
    rms_norm(e, e_norm, eps, out[:, :n])
    rms_norm(h, h_norm, eps, out[:, n:])
