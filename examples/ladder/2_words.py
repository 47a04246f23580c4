# mypy: allow-untyped-defs
"""2. A thread for each row, four weights at a time.

    python examples/ladder/2_words.py

Against step 1: a load takes a word of four bytes, which holds eight weights, and ``dp4a`` multiplies and adds four of them in
one instruction.  The order of these additions is another one than before.  The sums are the same, because they are integers.

Instructions: about a tenth for each weight.
Bytes: as before.  The threads of a warp still read 32 rows at a time.
Latency: a thread waits for each word, so four times less often.
"""

import numpy as np
from ladder import dp4a, product
from numba import cuda

from engine.cuda.intrinsics import fma
from engine.cuda.products.lanes import high_half, low_half, nibbles, unsigned_byte
from engine.cuda.products.unpack import scale_min
from engine.cuda.runtime.compiler import F32P, I32P, U32P, i32, kernel

f32 = np.float32
I = np.int32  # noqa: E741


@kernel(U32P, U32P, F32P, I32P, F32P, i32, i32, threads=128)
def words():
    """out[r] = sum_k weight[r, k] x[k], with weights in Q4_K."""

    @cuda.jit
    def words(weights, q, d, sums, out, rows, units):
        row = I(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        if row < rows:
            length = I((units + 7) // 8)
            total, chain = f32(0), f32(0)
            for u in range(units):
                block = np.int64(I(row * units + u)) * 36
                scales = scale_min(weights[block + 1], weights[block + 2], weights[block + 3])
                dot, minimum = I(0), I(0)
                for v in range(4):  # 64 weights: the low nibbles of 32 bytes, then their high nibbles
                    low, high = I(0), I(0)
                    for k in range(8):
                        word = weights[block + 4 + 8 * v + k]
                        low = dp4a(nibbles(word, 0), q[64 * u + 16 * v + k], low)
                        high = dp4a(nibbles(word, 4), q[64 * u + 16 * v + 8 + k], high)
                    scale, least = scales[0] if v < 2 else scales[1], scales[2] if v < 2 else scales[3]
                    j = 2 * (v % 2)
                    dot = I(dot + I(unsigned_byte(scale, j) * low) + I(unsigned_byte(scale, j + 1) * high))
                    minimum = I(minimum + I(unsigned_byte(least, j) * sums[8 * u + 2 * v]))
                    minimum = I(minimum + I(unsigned_byte(least, j + 1) * sums[8 * u + 2 * v + 1]))
                value = low_half(weights[block]) * f32(dot)
                value = fma(-high_half(weights[block]), f32(minimum), value)
                chain = fma(d[u], value, chain)
                if (u + 1) % length == 0 or u + 1 == units:
                    total = total + chain
                    chain = f32(0)
            out[row] = total

    return words


if __name__ == "__main__":
    product(__doc__, words(), lambda rows, units: (-(-rows // 128), 128))
