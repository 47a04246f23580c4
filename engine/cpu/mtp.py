"""What multi-token prediction needs beside a layer: the trunk's outputs by position, and the input of the layer.

Formula: ring[s, p % length] = x_p for position p of the sequence in slot s; with e_t the embedding of the token at position
    p_t and h its sequence's row of position p_t - 1 (zeros where p_t is 0): out_t = rms_norm(e_t), rms_norm(h), one after the
    other (``engine/cpu/rms_norm.py``).  If h consists of several streams of n, each of them follows e_t in a row of its own.
Shapes: x, e float32 [rows, n]; ring float32 [slots, length, n]; positions, sequences (slots) int32 [rows]; weights float32
    [n]; out float32 [rows, 2 n].  With s streams: ring [slots, length, s n], out [rows * s, 2 n].
Who owns what: an item is a row.
Reduction order: that of ``engine/cpu/rms_norm.py``.
Bytes moved: 8 n per row; 16 n for the input.
"""

import numpy as np
from numba import njit

from engine.cpu.rms_norm import NORM_CHAINS, inverse_rms

f32 = np.float32


@njit(cache=True, error_model="numpy")
def keep_rows(ring, x, positions, sequences, first, last):
    """Store x[t] in row positions[t] % length of its sequence's ring for the rows [first, last); if a sequence has more rows
    than its ring, only the last ones are stored."""
    rows, length = x.shape[0], ring.shape[1]
    for t in range(first, last):
        stays = True
        # With no more rows than a ring has, each has a place of its own.
        for u in range(rows if rows > length else 0):
            if sequences[u] == sequences[t] and positions[u] >= positions[t] + length:
                stays = False
        if stays:
            kept = ring[sequences[t], positions[t] % length]
            for i in range(x.shape[1]):
                kept[i] = x[t, i]


@njit(cache=True)
def beside(e, hiddens, positions, sequences, out, first, last):
    """out [rows, n + m] = e [rows, n], and the row of the ring in hiddens [slots, length, m] for the position before."""
    n, m = e.shape[1], hiddens.shape[2]
    for t in range(first, last):
        h = hiddens[sequences[t], (positions[t] - 1) % hiddens.shape[1]]
        for i in range(n):
            out[t, i] = e[t, i]
        for i in range(m):
            out[t, n + i] = h[i]


@njit(cache=True, error_model="numpy")
def mtp_input(e, e_norm, hiddens, h_norm, positions, sequences, eps, out, first, last):
    """The input of the layer for the rows [first, last): the normalized token, then the normalized output of the trunk for
    the position before, or zeros, normalized, where there is none."""
    n = e.shape[1]
    streams, length = hiddens.shape[2] // n, hiddens.shape[1]
    chains = np.empty(NORM_CHAINS, np.float32)
    for t in range(first, last):
        r = inverse_rms(e[t], eps, chains)
        for s in range(streams):
            row = out[t * streams + s]
            for i in range(n):
                row[i] = e[t, i] * r * e_norm[i]
                row[n + i] = f32(0.0) * h_norm[i]  # -0 where the weight is negative, as in any row of zeros
        if positions[t] > 0:
            before = hiddens[sequences[t], (positions[t] - 1) % length]
            for s in range(streams):
                row, h = out[t * streams + s], before[s * n : (s + 1) * n]
                r = inverse_rms(h, eps, chains)
                for i in range(n):
                    row[n + i] = h[i] * r * h_norm[i]
