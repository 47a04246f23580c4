"""The one tree that partial sums are joined by, as exchanges between the threads of a block.

Formula and order: ``engine/cpu/fold.py``; lanes that do not exist count as 0, which changes no sum of squares or weights.
"""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import lane_xor
from engine.cuda.unpack import device

I = np.int32  # noqa: E741


@device
def fold32(x):  # type: ignore[no-untyped-def]
    """The folded sum of the x of a warp's lanes, in every lane."""
    x = x + lane_xor(x, I(16))
    x = x + lane_xor(x, I(8))
    x = x + lane_xor(x, I(4))
    x = x + lane_xor(x, I(2))
    return x + lane_xor(x, I(1))


@device
def fold256(x, chains):  # type: ignore[no-untyped-def]
    """The folded sum of the x of a block's 256 threads, in every thread; ``chains`` is shared memory, float32 [256]."""
    thread = I(cuda.threadIdx.x)
    lane = I(thread & 31)
    chains[thread] = x
    cuda.syncthreads()
    a = (chains[lane] + chains[lane + 128]) + (chains[lane + 64] + chains[lane + 192])
    b = (chains[lane + 32] + chains[lane + 160]) + (chains[lane + 96] + chains[lane + 224])
    return fold32(a + b)
