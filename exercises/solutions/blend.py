"""A solution of kernel 3, ``exercises/kernels/blend.py``."""

from numba import cuda

from engine.cuda.intrinsics import fma
from engine.cuda.runtime.compiler import F32P, i32, kernel


@kernel(F32P, F32P, F32P, F32P, i32, threads=64)
def blend():
    @cuda.jit
    def blend(a, x, y, out, n):
        for i in range(cuda.threadIdx.x, n, 64):
            out[i] = fma(a[i], x[i], y[i])

    return blend
