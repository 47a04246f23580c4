# mypy: allow-untyped-defs
"""1. A thread for each row, byte by byte.

    python examples/ladder/1_thread_per_row.py

This is the formula, written as one would write it for a CPU.  It is the slowest step, for three reasons.

Bytes: neighbouring threads read bytes that are a whole row apart.  The memory delivers sectors of 32 bytes.  A warp that
asks for 32 bytes in 32 rows causes 32 sectors to be read, and uses one byte of each.  The rest is used only if it is still
in the cache when a thread comes to it.
Instructions: each weight takes a load, a shift, a mask, another load for the activation, a product and a sum.
Latency: a thread waits for each byte before it can continue.
"""

import numpy as np
from ladder import I8P, product
from numba import cuda

from engine.cuda.intrinsics import fma, octets
from engine.cuda.products.lanes import high_half, low_half, unsigned_byte
from engine.cuda.products.unpack import scale_min
from engine.cuda.runtime.compiler import F32P, I32P, U32P, i32, kernel

f32 = np.float32
I = np.int32  # noqa: E741


@kernel(U32P, I8P, F32P, I32P, F32P, i32, i32, threads=128)
def thread_per_row():
    """out[r] = sum_k weight[r, k] x[k], with weights in Q4_K."""

    @cuda.jit
    def thread_per_row(weights, q, d, sums, out, rows, units):
        row = I(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        if row < rows:
            length = I((units + 7) // 8)  # the units of a chain
            total, chain = f32(0), f32(0)
            for u in range(units):
                block = np.int64(I(row * units + u)) * 36  # in words of four bytes
                scales = scale_min(weights[block + 1], weights[block + 2], weights[block + 3])
                nibbles = octets(weights)
                dot, minimum = I(0), I(0)
                for g in range(8):  # a scale and a minimum for each 32 weights
                    part = I(0)
                    for k in range(32):
                        byte = I(nibbles[4 * block + 16 + 32 * (g // 2) + k])
                        nibble = byte >> 4 if g % 2 else byte & 15
                        part = I(part + I(nibble * I(q[256 * u + 32 * g + k])))
                    scale = scales[0] if g < 4 else scales[1]
                    least = scales[2] if g < 4 else scales[3]
                    dot = I(dot + I(unsigned_byte(scale, g % 4) * part))
                    minimum = I(minimum + I(unsigned_byte(least, g % 4) * sums[8 * u + g]))
                # Up to here everything is an exact integer.  These three lines round, in the order of the contract.
                value = low_half(weights[block]) * f32(dot)
                value = fma(-high_half(weights[block]), f32(minimum), value)
                chain = fma(d[u], value, chain)
                if (u + 1) % length == 0 or u + 1 == units:
                    total = total + chain
                    chain = f32(0)
            out[row] = total

    return thread_per_row


if __name__ == "__main__":
    product(__doc__, thread_per_row(), lambda rows, units: (-(-rows // 128), 128))
