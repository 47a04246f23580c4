"""Gates of which only the largest stay (Gemma 3n).

Formula: ``engine/cpu/sparsify.py``.
Shapes: x, y float32 [rows, n].
Who owns what: a block of 256 threads owns a row.
Reduction order: chain c of 256 is thread c, for both sums; then the halving tree (c0 + c128, c1 + c129, ...), ..., (0 + 1).
Bytes moved: 16 n per row.
"""

import numpy as np
from numba import cuda

from engine.cpu.rms_norm import NORM_CHAINS
from engine.cuda.fold import fold256
from engine.cuda.intrinsics import advance, fma, gaussian_cutoff, let_next_begin, rectified, wait_for_inputs
from engine.cuda.runtime.compiler import F32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import KernelCode

f32 = np.float32
I = np.int32  # noqa: E741


@kernel(F32P, f32_t, i32, F32P, threads=NORM_CHAINS)
def sparsify() -> KernelCode:
    """y = the gates x that stay.  Grid: (1, rows)."""

    @cuda.jit
    def sparsify(x, multiplier, n, y):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        row, thread = np.int64(cuda.blockIdx.y) * n, I(cuda.threadIdx.x)
        x, y = advance(x, row), advance(y, row)
        wait_for_inputs()
        total, i = f32(0.0), thread
        while i < n:
            total = total + x[i]
            i = I(i + NORM_CHAINS)
        mean = fold256(total, chains) / f32(n)
        cuda.syncthreads()  # before the chains are used again
        total, i = f32(0.0), thread
        while i < n:
            distance = x[i] - mean
            total = fma(distance, distance, total)
            i = I(i + NORM_CHAINS)
        cutoff = gaussian_cutoff(mean, fold256(total, chains), f32(n), multiplier)
        i = thread
        while i < n:
            y[i] = rectified(x[i] - cutoff)
            i = I(i + NORM_CHAINS)

    return sparsify
