# mypy: allow-untyped-defs
"""4. Sixteen bytes in each load.

    python examples/ladder/4_vectors.py

Against step 3: a lane loads four words at once, the most that one instruction can load.  Eight lanes are enough for a block,
so a warp has four rows at a time.  Weights are read past the L1 cache, since nobody reads them again.  Activations stay in
it, since all rows read them.

Bytes: the same.
Instructions: a quarter of the loads; the scales and the float part of a block are now computed by 8 lanes instead of 32.
Latency: each load has four times as many bytes in flight.
"""

import numpy as np
from ladder import dp4a, product
from numba import cuda

from engine.cuda.intrinsics import fma, lane_xor_int, load4, stream4
from engine.cuda.products.lanes import high_half, low_half, nibbles, unsigned_byte
from engine.cuda.products.unpack import scale_min
from engine.cuda.runtime.compiler import F32P, I32P, U32P, i32, kernel

f32 = np.float32
I = np.int32  # noqa: E741


@kernel(U32P, U32P, F32P, I32P, F32P, i32, i32, threads=256)
def vectors():
    """out[r] = sum_k weight[r, k] x[k], with weights in Q4_K.  A block has 32 rows, four for each of its warps."""

    @cuda.jit
    def vectors(weights, q, d, sums, out, rows, units):
        lane = I(cuda.threadIdx.x & 31)
        row = I(cuda.blockIdx.x * 32 + (cuda.threadIdx.x >> 3))
        inside = row < rows
        row = min(row, I(rows - 1))  # a warp whose rows do not exist computes others, and stores nothing
        j = I(lane & 7)  # bytes 16 j .. 16 j + 15 of the nibbles
        v, half = I(j >> 1), I(j & 1)
        length = I((units + 7) // 8)
        total, chain = f32(0), f32(0)
        for u in range(units):
            block = np.int64(I(row * units + u)) * 36
            header = stream4(weights, block)
            words = stream4(weights, block + 4 + 4 * j)
            x = load4(q, 64 * u + 16 * v + 4 * half)
            y = load4(q, 64 * u + 16 * v + 8 + 4 * half)
            low, high = I(0), I(0)
            for k in range(4):
                low = dp4a(nibbles(words[k], 0), x[k], low)
                high = dp4a(nibbles(words[k], 4), y[k], high)
            scales = scale_min(header[1], header[2], header[3])
            scale, least = scales[0] if v < 2 else scales[1], scales[2] if j < 4 else scales[3]
            dot = I(I(unsigned_byte(scale, 2 * (v & 1)) * low) + I(unsigned_byte(scale, 2 * (v & 1) + 1) * high))
            minimum = I(unsigned_byte(least, j & 3) * sums[8 * u + j])
            for k in range(3):  # the sums of eight lanes
                dot = I(dot + lane_xor_int(dot, I(1 << k)))
                minimum = I(minimum + lane_xor_int(minimum, I(1 << k)))
            value = fma(-high_half(header[0]), f32(minimum), low_half(header[0]) * f32(dot))
            chain = fma(d[u], value, chain)
            if (u + 1) % length == 0 or u + 1 == units:
                total = total + chain
                chain = f32(0)
        if j == 0 and inside:
            out[row] = total

    return vectors


if __name__ == "__main__":
    product(__doc__, vectors(), lambda rows, units: (-(-rows // 32), 256))
