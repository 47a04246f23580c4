"""The embedding lookup: rows of the repacked matrix, dequantized.

Formula: out[t, i] = scale * weight[token[t], i], weight[i] = fma(d, w[i], dm * m[i // 16]).
Shapes: records of ``engine/cuda/products/repack.py`` (or rows of a float format) to float32 [rows, n_embd]; tokens
    int32 [rows].
Who owns what: a warp owns one block of a row and reads the record that contains it; the four lanes that hold the row write
it. Reduction order: none.
Bytes moved: the records of 16 rows, and 4 n_embd bytes out per token.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import advance, fma, let_next_begin, wait_for_inputs
from engine.cuda.products.matmul import make_load_float
from engine.cuda.products.unpack import device, signed_byte, unpack, unsigned_byte
from engine.cuda.runtime.compiler import F32P, I32P, U32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import KernelCode
from engine.gguf.quants import FORMATS

f32 = np.float32
I = np.int32  # noqa: E741

WARPS = 8
_SIGNED_SCALES = (T.Q3_K, T.Q6_K, T.IQ4_XS)


@kernel(U32P, I32P, i32, f32_t, F32P, threads=32 * WARPS)
def embed_quantized(format: str) -> KernelCode:
    """Rows of a quantized matrix.  Grid: (ceil(units / 8), rows), blocks of 8 warps."""
    type_ = T[format]
    entry, fmt = FORMATS[type_], unpack(type_)
    header, block, scale, sums, factors = fmt.header, fmt.block, fmt.scale, fmt.sums, fmt.factors
    load, n_words = fmt.make_load(), fmt.words
    size, unit, offset, mins = 4 * entry.block_bytes, entry.unit, fmt.offset, fmt.mins
    blocks, grouped, group = unit // 32, fmt.group > 0, fmt.group or 32
    apart = type_ in _SIGNED_SCALES

    @device
    def write(j, words, h, low, high, d, dm, r, factor, y):  # type: ignore[no-untyped-def]
        """Write the lane's 8 weights of positions 32 j .. 32 j + 31; j is a constant, so that words[k] is a register."""
        a = block(words, j)
        for part in range(2):
            q = a[2 * part + 1] if r == 1 else a[2 * part]
            g = (32 * j + 16 * part) // group
            s = I(1)
            if grouped:
                s = scale(h, 1, g) if r == 1 else scale(h, 0, g)
            minimum = I(1)
            if mins and grouped:
                minimum = unsigned_byte(high[g // 4], g % 4) if r == 1 else unsigned_byte(low[g // 4], g % 4)
            for k in range(4):
                w = I(signed_byte(q, k) - I(offset))
                if apart:
                    value = d * f32(s) * f32(w)
                else:
                    value = d * f32(I(w * s))
                    if mins and dm != f32(0.0):
                        value = fma(d, f32(I(w * s)), dm * f32(minimum))
                y[32 * j + 16 * part + k] = value * factor

    @cuda.jit
    def embed_quantized(records, tokens, units, factor, out):  # type: ignore[no-untyped-def]
        let_next_begin()
        lane = I(cuda.threadIdx.x & 31)
        u = I(cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5))
        t = I(cuda.blockIdx.y)
        wait_for_inputs()
        if u < units:
            token = tokens[t]
            row = I(token & 15)
            r = I(row >> 3)
            words = cuda.local.array(n_words, np.uint32)
            load(advance(records, (np.int64(token >> 4) * units + u) * size), lane, words)
            h = header(words)
            f = factors(words)
            d, dm = (f[1], f[3]) if r == 1 else (f[0], f[2])
            low, high = sums(h, 0), sums(h, 1)
            if (lane >> 2) == (row & 7):
                y = advance(out, (np.int64(t) * units + u) * unit + 4 * (lane & 3))
                write(0, words, h, low, high, d, dm, r, factor, y)
                if blocks == 8:
                    write(1, words, h, low, high, d, dm, r, factor, y)
                    write(2, words, h, low, high, d, dm, r, factor, y)
                    write(3, words, h, low, high, d, dm, r, factor, y)
                    write(4, words, h, low, high, d, dm, r, factor, y)
                    write(5, words, h, low, high, d, dm, r, factor, y)
                    write(6, words, h, low, high, d, dm, r, factor, y)
                    write(7, words, h, low, high, d, dm, r, factor, y)

    return embed_quantized


@kernel(U32P, I32P, i32, f32_t, F32P, threads=256)
def embed_float(format: str) -> KernelCode:
    """Rows of a float matrix.  Grid: (ceil(columns / 256), rows), blocks of 256."""
    load_float = make_load_float(T[format])

    @cuda.jit
    def embed_float(weight, tokens, columns, factor, out):  # type: ignore[no-untyped-def]
        let_next_begin()
        i = I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        t = np.int64(cuda.blockIdx.y)
        wait_for_inputs()
        if i < columns:
            out[t * columns + i] = load_float(weight, np.int64(tokens[t]) * columns + i) * factor

    return embed_float
