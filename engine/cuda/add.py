"""Sums of arrays: a residual, or a bias for every row.

Formula: z[i] = x[i] + y[i % m].
Shapes: x, z float32 [n]; y float32 [m], m = n for a residual.
Who owns what: a thread owns one element; grid ceil(n / 256), blocks of 256.
Reduction order: none.
Bytes moved: 12 n.
"""

from numba import cuda

from engine.cuda.intrinsics import let_next_begin, wait_for_inputs
from engine.cuda.runtime.compiler import F32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode


@kernel(F32P, F32P, i32, i32, F32P, threads=256)
def add() -> KernelCode:
    """z = x + y, y repeated."""

    @cuda.jit
    def add(x, y, n, m, z):  # type: ignore[no-untyped-def]
        let_next_begin()
        i = cuda.blockIdx.x * 256 + cuda.threadIdx.x
        wait_for_inputs()
        if i < n:
            z[i] = x[i] + y[i % m]

    return add
