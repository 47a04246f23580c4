"""The embedding lookup: rows of the repacked matrix, dequantized.

Formula: out[t, i] = scale * weight[token[t], i], weight[i] = fma(d, w[i], dm * m[i // 16]).
Shapes: records of ``engine/cuda/products/repack.py`` (or rows of a float format) to float32 [rows, n_embd]; tokens
    int32 [rows].
Who owns what: a warp owns one block of a row and reads the record that contains it; the four lanes that hold the row write
it.  Reduction order: none.
Bytes moved: the records of 16 rows, and 4 n_embd bytes out per token.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import advance, fma, let_next_begin, wait_for_inputs
from engine.cuda.products.chain import make_factors
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
    """Rows of a quantized matrix of so many ``blocks`` per row.  Grid: (ceil(blocks / 8), rows), blocks of 8 warps."""
    type_ = T[format]
    entry, fmt = FORMATS[type_], unpack(type_)
    header, block, scale, sums = fmt.header, fmt.block, fmt.scale, fmt.sums
    factors = make_factors(fmt, entry.parts)
    load, n_words = fmt.make_load(), fmt.words
    size, length, offset, mins = 4 * entry.block_bytes, entry.block, fmt.offset, fmt.mins
    n, grouped, group = length // 32, fmt.group > 0, fmt.group or 32
    of_units = entry.parts > 1
    apart = type_ in _SIGNED_SCALES

    @device
    def write(j, words, h, low, high, d, dm, r, factor, y):
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

    @device
    def write_unit(j, words, r, factor, y):
        """Write the lane's 4 weights of unit j, of 16 positions."""
        a, f = block(words, j), factors(words, j)
        q, d = (a[1], f[1]) if r == 1 else (a[0], f[0])
        for k in range(4):
            y[16 * j + k] = d * f32(signed_byte(q, k)) * factor

    @device
    def write_all(words, r, factor, y):
        """Write the lane's weights of a block of one unit."""
        h = header(words)
        f = factors(words, 0)
        d, dm = (f[1], f[3]) if r == 1 else (f[0], f[2])
        low, high = sums(h, 0), sums(h, 1)
        write(0, words, h, low, high, d, dm, r, factor, y)
        if n >= 2:
            write(1, words, h, low, high, d, dm, r, factor, y)
        if n >= 4:
            write(2, words, h, low, high, d, dm, r, factor, y)
            write(3, words, h, low, high, d, dm, r, factor, y)
        if n == 8:
            write(4, words, h, low, high, d, dm, r, factor, y)
            write(5, words, h, low, high, d, dm, r, factor, y)
            write(6, words, h, low, high, d, dm, r, factor, y)
            write(7, words, h, low, high, d, dm, r, factor, y)

    @device
    def write_units(words, r, factor, y):
        """Write the lane's weights of a block of four units."""
        write_unit(0, words, r, factor, y)
        write_unit(1, words, r, factor, y)
        write_unit(2, words, r, factor, y)
        write_unit(3, words, r, factor, y)

    write_block = write_units if of_units else write_all

    @cuda.jit
    def embed_quantized(records, tokens, blocks, factor, out):
        let_next_begin()
        lane = I(cuda.threadIdx.x & 31)
        u = I(cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5))
        t = I(cuda.blockIdx.y)
        wait_for_inputs()
        if u < blocks:
            token = tokens[t]
            row = I(token & 15)
            words = cuda.local.array(n_words, np.uint32)
            load(advance(records, (np.int64(token >> 4) * blocks + u) * size), lane, words)
            if (lane >> 2) == (row & 7):
                y = advance(out, (np.int64(t) * blocks + u) * length + 4 * (lane & 3))
                write_block(words, I(row >> 3), factor, y)

    return embed_quantized


@kernel(U32P, I32P, i32, f32_t, F32P, threads=256)
def embed_float(format: str) -> KernelCode:
    """Rows of a float matrix.  Grid: (ceil(columns / 256), rows), blocks of 256."""
    load_float = make_load_float(T[format])

    @cuda.jit
    def embed_float(weight, tokens, columns, factor, out):
        let_next_begin()
        i = I(cuda.blockIdx.x * 256 + cuda.threadIdx.x)
        t = np.int64(cuda.blockIdx.y)
        wait_for_inputs()
        if i < columns:
            out[t * columns + i] = load_float(weight, np.int64(tokens[t]) * columns + i) * factor

    return embed_float
