# mypy: allow-untyped-defs
"""3. A warp for each row.

    python examples/ladder/3_warp_per_row.py

Against step 2: the 32 words of a block are read by the 32 lanes of a warp, one each.  Each lane multiplies its eight weights.
Then the lanes add their integers: ``lanes_sum`` is one instruction, and exact in any order.

Bytes: one load of the warp is 128 neighbouring bytes, in four or five sectors.
Instructions: more for each weight than in step 2, because 32 lanes compute the scales and the float part of the same block.
Latency: 32 times as many threads, so a multiprocessor has other warps to run while one waits.
"""

import numpy as np
from ladder import dp4a, product
from numba import cuda

from engine.cuda.intrinsics import fma, lanes_sum
from engine.cuda.products.lanes import high_half, low_half, nibbles, unsigned_byte
from engine.cuda.products.unpack import scale_min
from engine.cuda.runtime.compiler import F32P, I32P, U32P, i32, kernel

f32 = np.float32
I = np.int32  # noqa: E741


@kernel(U32P, U32P, F32P, I32P, F32P, i32, i32, threads=256)
def warp_per_row():
    """out[r] = sum_k weight[r, k] x[k], with weights in Q4_K.  A block has eight warps, which do not need each other."""

    @cuda.jit
    def warp_per_row(weights, q, d, sums, out, rows, units):
        lane = I(cuda.threadIdx.x & 31)
        row = I(cuda.blockIdx.x * 8 + (cuda.threadIdx.x >> 5))
        v, k = I(lane >> 3), I(lane & 7)  # word k of the v-th 32 bytes
        length = I((units + 7) // 8)
        total, chain = f32(0), f32(0)
        for u in range(units):
            block = np.int64(I(row * units + u)) * 36
            scales = scale_min(weights[block + 1], weights[block + 2], weights[block + 3])
            word = weights[block + 4 + lane]
            low = dp4a(nibbles(word, 0), q[64 * u + 16 * v + k], I(0))
            high = dp4a(nibbles(word, 4), q[64 * u + 16 * v + 8 + k], I(0))
            scale, j = scales[0] if v < 2 else scales[1], I(2 * (v & 1))
            dot = lanes_sum(I(I(unsigned_byte(scale, j) * low) + I(unsigned_byte(scale, j + 1) * high)))
            minimum = I(0)
            if lane < 8:
                least = scales[2] if lane < 4 else scales[3]
                minimum = I(unsigned_byte(least, lane & 3) * sums[8 * u + lane])
            minimum = lanes_sum(minimum)
            value = low_half(weights[block]) * f32(dot)
            value = fma(-high_half(weights[block]), f32(minimum), value)
            chain = fma(d[u], value, chain)
            if (u + 1) % length == 0 or u + 1 == units:
                total = total + chain
                chain = f32(0)
        if lane == 0:
            out[row] = total

    return warp_per_row


if __name__ == "__main__":
    product(__doc__, warp_per_row(), lambda rows, units: (rows // 8, 256))
