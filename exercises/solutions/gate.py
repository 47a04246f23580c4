"""A solution of kernel 2, ``exercises/kernels/gate.py``."""

from numba import cuda

from engine.cuda.intrinsics import silu
from engine.cuda.runtime.compiler import F32P, i32, kernel


@kernel(F32P, F32P, F32P, i32, threads=128)
def gate():
    @cuda.jit
    def gate(g, u, out, n):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < n:
            out[i] = silu(g[i]) * u[i]

    return gate
