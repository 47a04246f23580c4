# mypy: allow-untyped-defs
"""7. The next record, before it is needed.

    python examples/ladder/7_two_records.py

Against step 6: a warp requests the next record, and only then computes with this one.  While it multiplies, the memory works.
The kernel is also divided into functions, as the engine's is: ``load`` and ``unit`` are compiled into it.

Bytes and instructions: the same.
Latency: a warp of step 6 asks for a record, waits, computes, asks for the next one.  This one waits only for the first.

On an H200 it is slower than step 6.  The second record needs registers, 98 for each thread instead of 70, so two blocks fit
on a multiprocessor instead of three.  A third block seems to hide more latency than a second record.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from ladder import product
from numba import cuda

from engine.cuda.intrinsics import advance, dot2_high, dot2_low, fma, load4, mma32
from engine.cuda.products.unpack import device, unpack
from engine.cuda.runtime.compiler import F32P, U32P, i32, kernel

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741


@kernel(U32P, U32P, F32P, U32P, F32P, i32, i32, threads=256)
def two_records():
    """out[r] = sum_k weight[r, k] x[k], with records of Q4_K.  A block has 16 rows, and a warp for each chain."""
    fmt = unpack(T.Q4_K)
    header, block, scale, mins, factors = fmt.header, fmt.block, fmt.scale, fmt.sums, fmt.factors
    load = fmt.make_load()  # the six vectors of step 6

    @device
    def least_of(s, m):
        """The minimums, eight bytes, times the sums of the activations, eight int16."""
        part = dot2_high(s[1], m[0], dot2_low(s[0], m[0], I(0)))
        return dot2_high(s[3], m[1], dot2_low(s[2], m[1], part))

    @device
    def unit(words, u, lane, q, sums):
        """The values of rows g and g + 8 for unit u."""
        h = header(words)
        dot, dot8 = I(0), I(0)
        for v in range(4):
            x = (u32(0), u32(0), u32(0), u32(0))
            if lane < 4:
                x = load4(q, 512 * u + 128 * v + 4 * lane)
            a, b = block(words, 2 * v), block(words, 2 * v + 1)
            low = mma32(a[0], a[1], a[2], a[3], x[0], x[1])
            high = mma32(b[0], b[1], b[2], b[3], x[2], x[3])
            dot = I(dot + I(low[0] * scale(h, 0, 2 * v)) + I(high[0] * scale(h, 0, 2 * v + 1)))
            dot8 = I(dot8 + I(low[2] * scale(h, 1, 2 * v)) + I(high[2] * scale(h, 1, 2 * v + 1)))
        s, f = load4(sums, 96 * u + 8), factors(words)
        value = fma(f[2], f32(least_of(s, mins(h, 0))), f[0] * f32(dot))
        return value, fma(f[3], f32(least_of(s, mins(h, 1))), f[1] * f32(dot8))

    @cuda.jit
    def two_records(records, q, d, sums, out, rows, units):
        parts = cuda.shared.array(128, np.float32)
        words, following = cuda.local.array(24, np.uint32), cuda.local.array(24, np.uint32)
        thread = I(cuda.threadIdx.x)
        warp, lane = I(thread >> 5), I(thread & 31)
        length = I((units + 7) // 8)
        first = I(warp * length)
        last = min(I(first + length), units)
        record = np.int64(I(cuda.blockIdx.x * units)) * 576
        chain, chain8 = f32(0), f32(0)
        if first < last:
            load(advance(records, record + 576 * first), lane, following)
        for u in range(first, last):
            for k in range(24):
                words[k] = following[k]
            if u + 1 < last:
                load(advance(records, record + 576 * (u + 1)), lane, following)
            value, value8 = unit(words, u, lane, q, sums)
            chain, chain8 = fma(d[8 * u], value, chain), fma(d[8 * u], value8, chain8)
        if lane & 3 == 0:
            parts[16 * warp + (lane >> 2)] = chain
            parts[16 * warp + (lane >> 2) + 8] = chain8
        cuda.syncthreads()
        if thread < 16:
            total = f32(0)
            for c in range(8):
                total = total + parts[16 * c + thread]
            out[cuda.blockIdx.x * 16 + thread] = total

    return two_records


ARGUMENTS = ("records", "tensor_q", "tensor_d", "tensor_sums", "out", "rows", "units")

if __name__ == "__main__":
    product(__doc__, two_records(), lambda rows, units: (rows // 16, 256), ARGUMENTS)
