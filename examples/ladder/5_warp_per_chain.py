# mypy: allow-untyped-defs
"""5. A warp for each chain.

    python examples/ladder/5_warp_per_chain.py

Against step 4: a row consists of eight chains, and no chain needs another one.  So the eight warps of a block take one chain
each of the same four rows.  A thread joins the results, which it finds in shared memory, in the order of the contract.

Bytes: the same.
Instructions: a few more, for the joining.
Latency: eight times as many warps, each with an eighth of the units.  This matters most for matrices of few rows: without it,
4096 rows would occupy a quarter of the warps that an H200 can have.  For 24576 rows there were almost enough already.
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
def warp_per_chain():
    """out[r] = sum_k weight[r, k] x[k], with weights in Q4_K.  A block has four rows, and a warp for each chain."""

    @cuda.jit
    def warp_per_chain(weights, q, d, sums, out, rows, units):
        parts = cuda.shared.array(32, np.float32)
        thread = I(cuda.threadIdx.x)
        warp, lane = I(thread >> 5), I(thread & 31)
        row = I(cuda.blockIdx.x * 4 + (lane >> 3))
        j = I(lane & 7)
        v, half = I(j >> 1), I(j & 1)
        length = I((units + 7) // 8)
        first = I(warp * length)
        chain = f32(0)
        for u in range(first, min(I(first + length), units)):
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
            for k in range(3):
                dot = I(dot + lane_xor_int(dot, I(1 << k)))
                minimum = I(minimum + lane_xor_int(minimum, I(1 << k)))
            value = fma(-high_half(header[0]), f32(minimum), low_half(header[0]) * f32(dot))
            chain = fma(d[u], value, chain)
        if j == 0:
            parts[4 * warp + (lane >> 3)] = chain
        cuda.syncthreads()
        if thread < 4:
            total = f32(0)
            for c in range(8):
                total = total + parts[4 * c + thread]
            out[cuda.blockIdx.x * 4 + thread] = total

    return warp_per_chain


if __name__ == "__main__":
    product(__doc__, warp_per_chain(), lambda rows, units: (rows // 4, 256))
