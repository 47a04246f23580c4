"""A solution of kernel 1, ``exercises/kernels/add.py``."""

from numba import cuda

from engine.cuda.runtime.compiler import F32P, i32, kernel


@kernel(F32P, F32P, F32P, i32, threads=128)
def add():
    @cuda.jit
    def add(x, y, out, n):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        if i < n:
            out[i] = x[i] + y[i]

    return add
