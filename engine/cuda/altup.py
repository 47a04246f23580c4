"""Alternating updates of four streams: predicting and correcting them, and how they begin and end.

Formula: ``engine/cpu/altup.py``.
Shapes: m float32 [rows, 4]; coef [16, 4] or [4, 4]; scale [n]; x, y, u, first float32 [rows, n]; a float32 [rows, 3 n];
    streams float32 [rows, 5 n].
Who owns what: ``altup_enter`` and ``altup_leave``: a block of 256 threads owns a row; ``columns``: a thread owns an element;
    the others: a thread owns an element of all streams, and the first 16 or 4 threads of a block compute its coefficients.
Reduction order: that of ``engine/cpu/altup.py``.
Bytes moved: 36 n per row to predict, 24 n for u, 44 n to correct, 44 n to enter, 32 n to leave.
"""

import numpy as np
from numba import cuda

from engine.cpu.rms_norm import NORM_CHAINS, norm_width
from engine.cuda.fold import fold256
from engine.cuda.intrinsics import advance, fma, let_next_begin, magnitude_ratio, tanh, wait_for_inputs
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode
from engine.limits import STREAMS

f32 = np.float32
I = np.int32  # noqa: E741

N = STREAMS
WIDTH = STREAMS + 1
"""Vectors of n elements in a row of streams."""

OTHERS = STREAMS - 1
"""Streams but the first."""

PAIRS = STREAMS * STREAMS
"""Coefficients of predictions."""


@device
def coefficient(m, coef, j):
    """Row j of coef [.., 4] times tanh(m [4])."""
    total = f32(0.0)
    for k in range(N):
        total = fma(coef[j * N + k], tanh(m[k]), total)
    return total


@device
def squares(x, n, chains):
    """The sum of squares of the row at x, in every thread of the block; ``chains`` is shared memory, float32 [256]."""
    thread, width = I(cuda.threadIdx.x), I(norm_width(n))
    total = f32(0.0)
    if thread < width:
        i = thread
        while i < n:
            total = fma(x[i], x[i], total)
            i = I(i + width)
    found = fold256(total, chains)
    cuda.syncthreads()  # before the chains are used again
    return found


@kernel(F32P, i32, i32, i32, F32P, threads=256)
def columns() -> KernelCode:
    """out [rows, n] = x [rows, width] from column ``begin`` on.  Grid: (ceil(n / 256), rows)."""

    @cuda.jit
    def columns(x, width, begin, n, out):
        let_next_begin()
        t, i = np.int64(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if i < n:
            out[t * n + i] = x[t * width + I(begin + i)]

    return columns


@kernel(F32P, F32P, i32, F32P, threads=256)
def altup_enter() -> KernelCode:
    """out = the streams of x with its projections a.  Grid: (1, rows)."""

    @cuda.jit
    def altup_enter(x, a, n, out):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        t = np.int64(cuda.blockIdx.y)
        x, a, out = advance(x, t * n), advance(a, t * (OTHERS * n)), advance(out, t * (WIDTH * n))
        wait_for_inputs()
        wanted = squares(x, n, chains)
        i = I(cuda.threadIdx.x)
        while i < n:
            out[i] = x[i]
            out[N * n + i] = f32(0.0)
            i = I(i + 256)
        for s in range(1, N):
            ratio = magnitude_ratio(wanted, squares(advance(a, (s - 1) * n), n, chains), f32(n))
            i = I(cuda.threadIdx.x)
            while i < n:
                out[s * n + i] = a[(s - 1) * n + i] * ratio
                i = I(i + 256)

    return altup_enter


@kernel(F32P, F32P, F32P, i32, F32P, threads=256)
def altup_predict() -> KernelCode:
    """out = p.  Grid: (ceil(n / 256), rows)."""

    @cuda.jit
    def altup_predict(x, m, coef, n, out):
        let_next_begin()
        c = cuda.shared.array(PAIRS, np.float32)
        streams = cuda.local.array(N, np.float32)
        t, thread = np.int64(cuda.blockIdx.y), I(cuda.threadIdx.x)
        i = I(cuda.blockIdx.x * 256 + thread)
        row = t * (WIDTH * n)
        wait_for_inputs()
        if thread < PAIRS:
            c[thread] = coefficient(advance(m, t * N), coef, thread)
        cuda.syncthreads()
        if i < n:
            for s in range(N):
                streams[s] = x[row + s * n + i]
            for d in range(N):
                total = streams[d]
                for s in range(N):
                    total = fma(c[N * d + s], streams[s], total)
                out[row + d * n + i] = total
            out[row + N * n + i] = f32(0.0)

    return altup_predict


@kernel(F32P, F32P, F32P, F32P, F32P, i32, F32P, threads=256)
def altup_active() -> KernelCode:
    """out = u.  Grid: (ceil(n / 256), rows)."""

    @cuda.jit
    def altup_active(p, y, m, coef, scale, n, out):
        let_next_begin()
        c = cuda.shared.array(1, np.float32)
        t, thread = np.int64(cuda.blockIdx.y), I(cuda.threadIdx.x)
        i = I(cuda.blockIdx.x * 256 + thread)
        wait_for_inputs()
        if thread == 0:
            c[0] = coefficient(advance(m, t * N), coef, I(0)) + f32(1.0)
        cuda.syncthreads()
        if i < n:
            before = p[t * (WIDTH * n) + i]
            out[t * n + i] = fma(y[t * n + i] - before, c[0], before) * scale[i]

    return altup_active


@kernel(F32P, F32P, F32P, F32P, F32P, i32, F32P, threads=256)
def altup_correct() -> KernelCode:
    """out = x'; added: ``first`` of the formula.  Grid: (ceil(n / 256), rows)."""

    @cuda.jit
    def altup_correct(p, y, m, coef, added, n, out):
        let_next_begin()
        c = cuda.shared.array(N, np.float32)
        t, thread = np.int64(cuda.blockIdx.y), I(cuda.threadIdx.x)
        i = I(cuda.blockIdx.x * 256 + thread)
        row = t * (WIDTH * n)
        wait_for_inputs()
        if thread < N:
            c[thread] = coefficient(advance(m, t * N), coef, thread) + f32(1.0)
        cuda.syncthreads()
        if i < n:
            change, first = y[t * n + i] - p[row + i], added[t * n + i]
            out[row + i] = fma(change, c[0], p[row + i])
            for d in range(1, N):
                out[row + d * n + i] = fma(change, c[d], p[row + d * n + i]) + first
            out[row + N * n + i] = f32(0.0)

    return altup_correct


@kernel(F32P, F32P, i32, F32P, threads=256)
def altup_leave() -> KernelCode:
    """out = the mean of x_0 and the projections a of the other streams.  Grid: (1, rows)."""

    @cuda.jit
    def altup_leave(x, a, n, out):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        ratios = cuda.local.array(OTHERS, np.float32)
        t = np.int64(cuda.blockIdx.y)
        x, a, out = advance(x, t * (WIDTH * n)), advance(a, t * (OTHERS * n)), advance(out, t * n)
        wait_for_inputs()
        wanted = squares(x, n, chains)
        for s in range(OTHERS):
            ratios[s] = magnitude_ratio(wanted, squares(advance(a, s * n), n, chains), f32(n))
        i = I(cuda.threadIdx.x)
        while i < n:
            total = x[i]
            for s in range(OTHERS):
                total = fma(a[s * n + i], ratios[s], total)
            out[i] = total * f32(0.25)
            i = I(i + 256)

    return altup_leave
