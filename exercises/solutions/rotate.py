"""A solution of kernel 7, ``exercises/kernels/rotate.py``."""

from numba import cuda

from engine.cuda.intrinsics import fma
from engine.cuda.runtime.compiler import F32P, i32, kernel


@kernel(F32P, F32P, F32P, i32, threads=128)
def rotate():
    @cuda.jit
    def rotate(x, cos, sin, half):
        i = cuda.threadIdx.x
        at = cuda.blockIdx.x * 2 * half + i
        a, b = x[at], x[at + half]
        x[at] = fma(a, cos[i], -(b * sin[i]))
        x[at + half] = fma(a, sin[i], b * cos[i])

    return rotate
