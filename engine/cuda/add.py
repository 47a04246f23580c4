"""Sums of arrays: a residual, or a bias for every row, optionally times a number; rows times a gate; products with a number.

Formula: z[i] = x[i] + y[i % m]; with a factor fma(scale, y[i % m], x[i]); with gates fma(sigmoid(gate of the row), y[i],
    x[i]); products x[i] * factor.
Shapes: x, z float32 [n]; y float32 [m], m = n for a residual; with gates x, y, z float32 [rows, n] and gates float32 [rows,
    stride], of which the last column counts.
Who owns what: a thread owns one element; grid ceil(n / 256), blocks of 256.
Reduction order: none.
Bytes moved: 12 n, products 8 n.
"""

from numba import cuda

from engine.cuda.intrinsics import fma, let_next_begin, sigmoid, wait_for_inputs
from engine.cuda.runtime.compiler import F32P, f32, i32, kernel
from engine.cuda.runtime.kinds import KernelCode


@kernel(F32P, F32P, i32, i32, f32, F32P, threads=256)
def add(scaled: bool = False) -> KernelCode:
    """z = x + y, y repeated; if ``scaled``, y is multiplied by ``factor``."""

    @cuda.jit
    def add(x, y, n, m, factor, z):
        let_next_begin()
        i = cuda.blockIdx.x * 256 + cuda.threadIdx.x
        wait_for_inputs()
        if i < n:
            if scaled:
                z[i] = fma(factor, y[i % m], x[i])
            else:
                z[i] = x[i] + y[i % m]

    return add


@kernel(F32P, F32P, F32P, i32, i32, F32P, threads=256)
def add_gated() -> KernelCode:
    """z = x + sigmoid(gate) * y.  Grid: (ceil(n / 256), rows)."""

    @cuda.jit
    def add_gated(x, y, gates, stride, n, z):
        let_next_begin()
        row = cuda.blockIdx.y
        i = cuda.blockIdx.x * 256 + cuda.threadIdx.x
        wait_for_inputs()
        if i < n:
            at = row * n + i
            z[at] = fma(sigmoid(gates[row * stride + stride - 1]), y[at], x[at])

    return add_gated


@kernel(F32P, f32, i32, F32P, threads=256)
def scale() -> KernelCode:
    """z = x * factor."""

    @cuda.jit
    def scale(x, factor, n, z):
        let_next_begin()
        i = cuda.blockIdx.x * 256 + cuda.threadIdx.x
        wait_for_inputs()
        if i < n:
            z[i] = x[i] * factor

    return scale
