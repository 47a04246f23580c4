# mypy: allow-untyped-defs
"""6. Sixteen rows on tensor cores.

    python examples/ladder/6_tensor_cores.py

Against step 5: one instruction, ``mma32``, multiplies 16 rows of 32 weights by 8 columns of activations.  We have one column,
so seven eighths of its products are wasted.  It still replaces four ``dp4a`` of each lane.  Tensor cores want the bytes of 16
rows in an order of their own.  So the matrix is repacked once, when it is loaded, into records of 16 rows (``docs/gpu.md``).
A warp reads a record of 2304 bytes from end to end, in vectors.

Bytes: the same ones, in another order.
Instructions: no sums between lanes, and the scales of a row are decoded by 4 lanes instead of 8.
Latency: a lane has six vectors in flight instead of two.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from ladder import product
from numba import cuda

from engine.cuda.intrinsics import dot2_high, dot2_low, fma, load4, mma32, stream4
from engine.cuda.products.unpack import unpack
from engine.cuda.runtime.compiler import F32P, U32P, i32, kernel

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741


@kernel(U32P, U32P, F32P, U32P, F32P, i32, i32, threads=256)
def tensor_cores():
    """out[r] = sum_k weight[r, k] x[k], with records of Q4_K.  A block has 16 rows, and a warp for each chain."""
    fmt = unpack(T.Q4_K)
    header, block, scale, mins, factors = fmt.header, fmt.block, fmt.scale, fmt.sums, fmt.factors

    @cuda.jit
    def tensor_cores(records, q, d, sums, out, rows, units):
        parts = cuda.shared.array(128, np.float32)
        words = cuda.local.array(24, np.uint32)
        thread = I(cuda.threadIdx.x)
        warp, lane = I(thread >> 5), I(thread & 31)
        g, t = I(lane >> 2), I(lane & 3)  # the lane's rows are g and g + 8
        length = I((units + 7) // 8)
        first = I(warp * length)
        chain, chain8 = f32(0), f32(0)
        for u in range(first, min(I(first + length), units)):
            record = np.int64(I(cuda.blockIdx.x * units + u)) * 576
            for v in range(4):
                words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3] = stream4(
                    records, record + 128 * v + 4 * lane
                )
            for r in range(2):
                words[16 + 4 * r], words[17 + 4 * r], words[18 + 4 * r], words[19 + 4 * r] = stream4(
                    records, record + 512 + 4 * (g + 8 * r)
                )
            h = header(words)
            dot, dot8 = I(0), I(0)
            for v in range(4):  # 64 positions, two products
                x = (u32(0), u32(0), u32(0), u32(0))
                if lane < 4:  # column 0; the other columns are zeros
                    x = load4(q, 512 * u + 128 * v + 4 * lane)
                a, b = block(words, 2 * v), block(words, 2 * v + 1)
                low = mma32(a[0], a[1], a[2], a[3], x[0], x[1])
                high = mma32(b[0], b[1], b[2], b[3], x[2], x[3])
                dot = I(dot + I(low[0] * scale(h, 0, 2 * v)) + I(high[0] * scale(h, 0, 2 * v + 1)))
                dot8 = I(dot8 + I(low[2] * scale(h, 1, 2 * v)) + I(high[2] * scale(h, 1, 2 * v + 1)))
            s = load4(sums, 96 * u + 8)  # eight sums of 32 activations, int16, two to a word
            m, m8 = mins(h, 0), mins(h, 1)
            least = dot2_high(s[1], m[0], dot2_low(s[0], m[0], I(0)))
            least = dot2_high(s[3], m[1], dot2_low(s[2], m[1], least))
            least8 = dot2_high(s[1], m8[0], dot2_low(s[0], m8[0], I(0)))
            least8 = dot2_high(s[3], m8[1], dot2_low(s[2], m8[1], least8))
            f = factors(words)
            value = fma(f[2], f32(least), f[0] * f32(dot))
            value8 = fma(f[3], f32(least8), f[1] * f32(dot8))
            chain, chain8 = fma(d[8 * u], value, chain), fma(d[8 * u], value8, chain8)
        if t == 0:  # the lanes that have column 0
            parts[16 * warp + g] = chain
            parts[16 * warp + g + 8] = chain8
        cuda.syncthreads()
        if thread < 16:
            total = f32(0)
            for c in range(8):
                total = total + parts[16 * c + thread]
            out[cuda.blockIdx.x * 16 + thread] = total

    return tensor_cores


ARGUMENTS = ("records", "tensor_q", "tensor_d", "tensor_sums", "out", "rows", "units")

if __name__ == "__main__":
    product(__doc__, tensor_cores(), lambda rows, units: (rows // 16, 256), ARGUMENTS)
