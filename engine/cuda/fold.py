"""The one tree in which partial sums are added, as exchanges between the threads of a block.

Formula and order: ``engine/cpu/fold.py``; lanes that do not exist count as 0, which changes no sum of squares or weights.
"""

import numpy as np
from numba import cuda

from engine.cpu.rms_norm import norm_width
from engine.cuda.intrinsics import fma, lane_from, lane_xor
from engine.cuda.products.unpack import device
from engine.cuda.runtime.kinds import DeviceFunction

F = np.float32
I = np.int32  # noqa: E741


@device
def fold32(x):
    """The folded sum of the x of a warp's lanes, in every lane."""
    x = x + lane_xor(x, I(16))
    x = x + lane_xor(x, I(8))
    x = x + lane_xor(x, I(4))
    x = x + lane_xor(x, I(2))
    return x + lane_xor(x, I(1))


@device
def fold256(x, chains):
    """The folded sum of the x of a block's 256 threads, in every thread; ``chains`` is shared memory, float32 [256]."""
    thread = I(cuda.threadIdx.x)
    lane = I(thread & 31)
    chains[thread] = x
    cuda.syncthreads()
    a = (chains[lane] + chains[lane + 128]) + (chains[lane + 64] + chains[lane + 192])
    b = (chains[lane + 32] + chains[lane + 160]) + (chains[lane + 96] + chains[lane + 224])
    return fold32(a + b)


def make_squares(n: int) -> DeviceFunction:
    """The device function ``squares(x)``: the sum of squares of n values, by the chains of ``engine/cpu/rms_norm.py``, in
    every lane of a warp whose lane l holds value l + 32 k in x[k], 0 where there is none."""
    width = norm_width.py_func(n)
    n_x = -(-n // 32)
    n_chains = max(width // 32, 1)

    @device
    def squares(x):
        chains = cuda.local.array(n_chains, np.float32)
        for c in range(n_chains):
            chains[c] = F(0.0)
        for k in range(n_x):
            chains[k % n_chains] = fma(x[k], x[k], chains[k % n_chains])
        if width >= 256:
            for c in range(4):
                chains[c] = chains[c] + chains[c + 4]
        if width >= 128:
            for c in range(2):
                chains[c] = chains[c] + chains[c + 2]
        if width >= 64:
            chains[0] = chains[0] + chains[1]
        total = chains[0]
        if width >= 32:
            total = total + lane_xor(total, I(16))
        if width >= 16:
            total = total + lane_xor(total, I(8))
        if width >= 8:
            total = total + lane_xor(total, I(4))
        if width >= 4:
            total = total + lane_xor(total, I(2))
        if width >= 2:
            total = total + lane_xor(total, I(1))
        if width < 32:
            total = lane_from(total, I(0))
        return total

    return squares
