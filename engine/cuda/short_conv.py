"""The gated short convolution of LFM2 (Liquid AI 2025).

Formula: ``engine/cpu/short_conv.py``.
Shapes: bcx float32 [rows, 3 n]: b, c, x of each row; weight float32 [n, taps]; positions, sequences int32 [rows]; ring
    float32 [sequences, length, n]; y float32 [rows, n].  Without ``mixed`` all rows are a run: those of sequences[0] at
    positions[0] and after.
Who owns what: a thread owns an element of a row.  If the ring has room for the rows beside what they read, the thread stores
    u of its row; otherwise ``keep_inputs`` does so for all rows afterwards.
Reduction order: that of ``engine/cpu/short_conv.py``.
Bytes moved: 4 n (2 taps + 2) per row, of which 12 n come from memory and the rest from caches, and 8 n for the ring.
"""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import fma, let_next_begin, wait_for_inputs
from engine.cuda.runs import make_find_run, make_overwritten
from engine.cuda.runtime.compiler import F32P, I32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

f32 = np.float32
I = np.int32  # noqa: E741


@kernel(F32P, F32P, i32, I32P, I32P, i32, F32P, F32P, threads=256)
def short_conv(taps: int, mixed: bool, keeps: bool) -> KernelCode:
    """Compute y; ``keeps``: also store u, for which the ring must have room beside the inputs that the rows read.

    Arguments: bcx, weight, n, positions, sequences, length, ring, y.  ``mixed``: rows may belong to several sequences, and
    copies of a row may follow it.  Grid: (ceil(n / 256), rows).
    """
    most = taps - 1
    find_run = make_find_run(mixed, most)

    @cuda.jit
    def short_conv(bcx, weight, n, positions, sequences, length, ring, y):
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if i >= n:
            return
        position, sequence = I(positions[t]), I(sequences[t if mixed else I(0)])
        own, since = find_run(positions, sequences, t, position, sequence)
        total = f32(0.0)
        for j in range(taps):
            back = most - j
            if position >= back:
                if since >= back:
                    row = np.int64(own - back) * 3 * n + i
                    u = bcx[row] * bcx[row + 2 * n]
                else:
                    u = ring[np.int64(sequence * length + (position - back) % length) * n + i]
                total = fma(u, weight[I(i * taps) + j], total)
        row = np.int64(t) * 3 * n + i
        y[np.int64(t) * n + i] = bcx[row + n] * total
        if keeps:
            ring[np.int64(sequence * length + position % length) * n + i] = bcx[row] * bcx[row + 2 * n]

    return short_conv


@kernel(F32P, i32, i32, I32P, I32P, i32, F32P, threads=256)
def keep_inputs(mixed: bool) -> KernelCode:
    """Store u of each row in the ring of its sequence; if a run has more rows than it holds, the last ones stay.

    Arguments: bcx, rows, n, positions, sequences, length, ring.  ``mixed``: rows may belong to several sequences.  Grid:
    (ceil(n / 256), rows).
    """
    overwritten = make_overwritten(mixed)

    @cuda.jit
    def keep_inputs(bcx, rows, n, positions, sequences, length, ring):
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if i >= n:
            return
        position, sequence = I(positions[t]), I(sequences[t if mixed else I(0)])
        if not overwritten(positions, sequences, rows, t, position, sequence, length):
            row = np.int64(t) * 3 * n + i
            ring[np.int64(sequence * length + position % length) * n + i] = bcx[row] * bcx[row + 2 * n]

    return keep_inputs
