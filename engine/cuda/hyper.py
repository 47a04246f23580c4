"""Hyper-connections of four streams: the weights of streams, and the sums with them.

Formula: ``engine/cpu/hyper.py``.
Shapes: m and weights float32 [rows, 24] or [rows, 4]; x float32 [rows, 4 n]; u, y float32 [rows, n].
Who owns what: ``stream_weights``: a warp owns a row, lane 4 s + d of its first half element (s, d) of C; the others: a thread
    owns an element of a stream, ``expand`` that of all four.
Reduction order: that of ``engine/cpu/hyper.py``.
Bytes moved: 20 n per row for u, 36 n for x'.
"""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import exp, finite, fma, lane_from, let_next_begin, sigmoid, wait_for_inputs
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import KernelCode
from engine.limits import STREAMS

f32 = np.float32
I = np.int32  # noqa: E741

N = STREAMS


@kernel(F32P, i32, i32, F32P, threads=256)
def repeat() -> KernelCode:
    """out [rows, n * width] = x [rows, width], n times.  Grid: (ceil(n * width / 256), rows)."""

    @cuda.jit
    def repeat(x, n, width, out):
        let_next_begin()
        t, i = np.int64(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if i < n * width:
            out[t * (n * width) + i] = x[t * width + i % width]

    return repeat


@device
def of_row(c, lane):
    """The sum of the four elements of C in the row of this lane."""
    first = I(lane & 12)
    a, b = lane_from(c, first), lane_from(c, I(first + 1))
    return ((a + b) + lane_from(c, I(first + 2))) + lane_from(c, I(first + 3))


@device
def of_column(c, lane):
    """The sum of the four elements of C in the column of this lane."""
    first = I(lane & 3)
    a, b = lane_from(c, first), lane_from(c, I(first + 4))
    return ((a + b) + lane_from(c, I(first + 8))) + lane_from(c, I(first + 12))


@device
def most_of_row(c, lane):
    """The largest of the four elements of C in the row of this lane."""
    first = I(lane & 12)
    a, b = lane_from(c, first), lane_from(c, I(first + 1))
    return max(max(a, b), max(lane_from(c, I(first + 2)), lane_from(c, I(first + 3))))


@kernel(F32P, i32, F32P, F32P, f32_t, i32, F32P, threads=32)
def stream_weights() -> KernelCode:
    """The weights of each row of m [rows, columns], 4 or 24 columns.  Grid: (rows,)."""

    @cuda.jit
    def stream_weights(m, columns, scale, base, epsilon, rounds, out):
        let_next_begin()
        lane = I(cuda.threadIdx.x)
        row = np.int64(cuda.blockIdx.x) * columns
        wait_for_inputs()
        if lane < N:
            out[row + lane] = sigmoid(fma(m[row + lane], scale[0], base[lane])) + epsilon
        if columns > N:
            if lane >= N and lane < 2 * N:
                out[row + lane] = f32(2.0) * sigmoid(fma(m[row + lane], scale[1], base[lane]))
            # The second half of the warp computes what the first does, and stores nothing.
            place = I(2 * N + (lane & 15))
            c = finite(fma(m[row + place], scale[2], base[place]))
            c = exp(c - most_of_row(c, lane))
            c = c / of_row(c, lane) + epsilon
            c = c / (of_column(c, lane) + epsilon)
            for _ in range(rounds - 1):
                c = c / (of_row(c, lane) + epsilon)
                c = c / (of_column(c, lane) + epsilon)
            if lane < N * N:
                out[row + place] = c

    return stream_weights


@kernel(F32P, F32P, i32, i32, F32P, threads=256)
def collapse() -> KernelCode:
    """out = u.  Grid: (ceil(n / 256), rows)."""

    @cuda.jit
    def collapse(x, weights, columns, n, out):
        let_next_begin()
        t, i = np.int64(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        wait_for_inputs()
        if i < n:
            total = f32(0.0)
            for s in range(N):
                total = fma(weights[t * columns + s], x[(t * N + s) * n + i], total)
            out[t * n + i] = total

    return collapse


@kernel(F32P, F32P, F32P, i32, F32P, threads=256)
def expand() -> KernelCode:
    """out = x', which is not x.  Grid: (ceil(n / 256), rows)."""

    @cuda.jit
    def expand(x, y, weights, n, out):
        let_next_begin()
        streams = cuda.local.array(N, np.float32)
        t, i = np.int64(cuda.blockIdx.y), I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        own = t * (N * (N + 2))
        wait_for_inputs()
        if i < n:
            for s in range(N):
                streams[s] = x[(t * N + s) * n + i]
            for d in range(N):
                total = weights[own + N + d] * y[t * n + i]
                for s in range(N):
                    total = fma(weights[own + 2 * N + N * s + d], streams[s], total)
                out[(t * N + d) * n + i] = total

    return expand
