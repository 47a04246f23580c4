"""Kernel 10. A chunk of attention.

The part of a softmax over n <= 64 positions, for one head of 64 elements:

    m = max scores[j];  w[j] = exp(scores[j] - m), 0 for j >= n
    s = the sum of the 64 w in halves: w[j] + w[j + 32], then 16, 8, 4, 2, 1
    o[e] = fma(w[j], values[j, e], o[e]) for j = 0 .. n - 1, from 0

out = o[0] .. o[63], m, s.  One block of 64 threads.  ``engine.cuda.intrinsics`` has ``exp``, and ``engine.cuda.fold.fold32``
adds the values of a warp in halves.
"""

from numba import cuda

from engine.cuda.runtime.compiler import F32P, i32, kernel
from exercises.stub import unwritten


@kernel(F32P, F32P, F32P, i32, threads=64)
def chunk():
    @cuda.jit
    def chunk(scores, values, out, n):
        unwritten("chunk")

    return chunk
