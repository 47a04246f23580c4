"""Kernel 7. A rotation.

Rotate the pairs (a, b) = (x[h, i], x[h, i + half]) of each head h by the angles of position p:

    x[h, i] = fma(a, cos[i], -(b * sin[i]))
    x[h, i + half] = fma(a, sin[i], b * cos[i])

In place.  A block has a head, and 2 * half = d elements; a thread has a pair, so a block has half threads.
"""

from numba import cuda

from engine.cuda.runtime.compiler import F32P, i32, kernel
from exercises.stub import unwritten


@kernel(F32P, F32P, F32P, i32, threads=128)
def rotate():
    @cuda.jit
    def rotate(x, cos, sin, half):
        unwritten("rotate")

    return rotate
