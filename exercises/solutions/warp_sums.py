"""A solution of kernel 4, ``exercises/kernels/warp_sums.py``."""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import lane_xor
from engine.cuda.runtime.compiler import F32P, i32, kernel

I = np.int32  # noqa: E741


@kernel(F32P, F32P, i32, threads=256)
def warp_sums():
    @cuda.jit
    def warp_sums(x, out, n):
        value = x[cuda.threadIdx.x]
        value = value + lane_xor(value, I(16))
        value = value + lane_xor(value, I(8))
        value = value + lane_xor(value, I(4))
        value = value + lane_xor(value, I(2))
        value = value + lane_xor(value, I(1))
        if cuda.threadIdx.x & 31 == 0:
            out[cuda.threadIdx.x >> 5] = value

    return warp_sums
