"""Kernel 4. The sum of a warp.

out[w] = the sum of x[32 w] .. x[32 w + 31], for each warp w.

Add in halves: lane l adds the value of lane l + 16, then of lane l + 8, 4, 2 and 1.  ``lane_xor(x, m)`` is the x of the lane
whose number is that of this lane XOR m.  All 32 lanes must call it.  One block; n is its number of threads, a multiple of 32.
"""

from numba import cuda

from engine.cuda.runtime.compiler import F32P, i32, kernel
from exercises.stub import unwritten


@kernel(F32P, F32P, i32, threads=256)
def warp_sums():
    @cuda.jit
    def warp_sums(x, out, n):
        unwritten("warp_sums")

    return warp_sums
