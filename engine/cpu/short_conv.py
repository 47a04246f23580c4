"""The gated short convolution of LFM2 (Liquid AI 2025).

Formula, for the token at position p, with b, c and x its three parts, element by element:
    u_p = b_p * x_p, and 0 before position 0;
    y_p = c_p * sum_j w[j] * u_(p - taps + 1 + j), j = 0 .. taps - 1.
Shapes: bcx float32 [rows, 3 n]: b, c, x of each row; positions, sequences int32 [rows]: the position of each row in its
    sequence, and the slot of the sequence; weight float32 [n, taps]; ring float32 [sequences, length, n], u of position p in
    row p % length; y float32 [rows, n].
Runs: consecutive rows of one sequence at consecutive positions are a run (``engine/cpu/runs.py``).  It sees what earlier
    passes have stored for its sequence and its own rows, nothing else.  Rows may be repeated as in
    ``engine/cpu/delta_net.py``: copies store the same bits in the same places.
Who owns what: an item is a block of 64 elements, for all rows.
Reduction order: u rounded; one fma per tap from 0, the oldest first, those before position 0 left out; the product with c.
    Everything depends on the tokens up to p only: not on the division of the rows into passes.
Bytes moved: 20 n per row, and 4 n (taps - 1) more per run.
"""

import numpy as np
from numba import njit

from engine.cpu.runs import find_runs, overwritten
from engine.numerics import fma

f32 = np.float32
ELEMENTS = 64


@njit(cache=True, error_model="numpy")
def short_conv(bcx, positions, sequences, weight, ring, y, first, last):
    """Compute y for the blocks [first, last) of 64 elements, then store u in the ring, as far as the ring holds it."""
    rows, n = y.shape
    taps, length = weight.shape[1], ring.shape[1]
    begin, end = ELEMENTS * first, min(ELEMENTS * last, n)
    w = np.empty((taps, end - begin), np.float32)
    for j in range(taps):
        for i in range(end - begin):
            w[j, i] = weight[begin + i, j]
    own, since = find_runs(positions, sequences)
    for t in range(rows):
        out, c = y[t, begin:end], bcx[t, n + begin : n + end]
        out[:] = f32(0.0)
        for j in range(taps):
            back, of_tap = taps - 1 - j, w[j]
            if positions[t] < back:
                continue
            if since[t] >= back:
                given = bcx[own[t] - back]
                b, x = given[begin:end], given[2 * n + begin : 2 * n + end]
                for i in range(out.size):
                    out[i] = fma(b[i] * x[i], of_tap[i], out[i])
            else:
                u = ring[sequences[t], (positions[t] - back) % length, begin:end]
                for i in range(out.size):
                    out[i] = fma(u[i], of_tap[i], out[i])
        for i in range(out.size):
            out[i] = c[i] * out[i]
    for t in range(rows):
        if not overwritten(positions, sequences, t, length):
            kept = ring[sequences[t], positions[t] % length, begin:end]
            b, x = bcx[t, begin:end], bcx[t, 2 * n + begin : 2 * n + end]
            for i in range(kept.size):
                kept[i] = b[i] * x[i]
