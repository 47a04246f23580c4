"""What precedes latent attention: rotation of queries, the norm of latents, and the rows that positions leave behind.

Formula: query = [q, rope(r)] of each head, times the factor of its position; row = [rms_norm(c), rope(k)], pairs (2i, 2i + 1)
    (``engine/cpu/rms_norm.py``, ``engine/cpu/rope.py``, ``engine/cpu/latent_attention.py``).
Shapes: q float32 [rows, n_head, rank]; r float32 [rows, n_head, n_rope]; c float32 [rows, rank]; k float32 [rows, n_rope];
    positions, sequences (slots) int32 [rows]; table int32 [slots, stride]; angles float32 [positions, 2, n_rope / 2] (cos,
    sin); norm float32 [rank]; factors float32 [positions]; query float32 [rows, n_head, rank + n_rope]; latents [pages, 64,
    rank + n_rope], as words of one float32 or two float16: position j of slot s is row j % 64 of page table[s, j // 64]
    (``engine/cache/latent.py``).
Who owns what: a warp is a block and owns a head of a row, or the row of its position; lane l owns elements l, l + 32, ... and
    pairs l, l + 32, ...
Reduction order: ``engine/cuda/fold.py`` (``make_squares``) for the norm; rotation: fma(a, cos, -(b sin)), fma(a, sin, b cos).
Bytes moved: 8 per element of a query; 4 in and 2 or 4 out per element of a row.
"""

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK
from engine.cuda.fold import make_squares
from engine.cuda.intrinsics import advance, fma, inverse_root, let_next_begin, wait_for_inputs
from engine.cuda.products.unpack import device
from engine.cuda.rope import put_float, put_half
from engine.cuda.runtime.compiler import F32P, I32P, U32P, f32, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

F = np.float32
I = np.int32  # noqa: E741

BLOCK = 32
"""Threads of a block."""


@kernel(*(F32P, F32P, F32P, F32P, I32P, I32P, I32P, F32P, F32P, F32P, f32, i32, i32, i32, F32P, U32P), threads=BLOCK)
def latent_rope(half: bool, rank: int, n_rope: int, scaled: bool, early: bool, turned: bool = True) -> KernelCode:
    """All queries, and the row of each position.

    Arguments: q, r, c, k, positions, sequences, table, angles, norm, factors, eps, n_head (0: only rows are stored), stride
    (chunks of a row of the table), mixed (1: each row has its own slot; 0: all have that of the first row), query, latents.
    ``half``: rows are float16; ``scaled``: queries are multiplied by the factors of their positions; ``early``: no kernel of
    the same chain writes the positions, so they, the angles and the page are read before ``wait_for_inputs``; ``turned``: r
    and k are rotated; otherwise ``angles`` is not read.
    Grid: (n_head + 1, rows), blocks of ``BLOCK``.
    """
    pairs, n_x, n_pairs = n_rope // 2, -(-rank // 32), max(1, -(-n_rope // 64))
    squares, put = make_squares(rank), put_half if half else put_float
    width = rank + n_rope
    page_words = CHUNK * width // (2 if half else 1)

    @device
    def turn(source, i, cos, sin):
        a, b = source[2 * i], source[2 * i + 1]
        if not turned:
            return a, b
        return fma(a, cos, -(b * sin)), fma(a, sin, b * cos)

    @cuda.jit
    def latent_rope(
        q, r, c, k, positions, sequences, table, angles, norm, factors, eps, n_head, stride, mixed, query, latents
    ):
        let_next_begin()
        lane, head, row = I(cuda.threadIdx.x & 31), I(cuda.blockIdx.x), I(cuda.blockIdx.y)
        cos = cuda.local.array(n_pairs, np.float32)
        sin = cuda.local.array(n_pairs, np.float32)
        x = cuda.local.array(n_x, np.float32)
        if not early:
            wait_for_inputs()
        position = positions[row]
        turns = advance(angles, np.int64(position) * n_rope)
        for j in range(n_pairs):
            cos[j], sin[j] = F(0.0), F(0.0)
            if turned and lane + 32 * j < pairs:
                cos[j] = turns[lane + 32 * j]
                sin[j] = turns[pairs + lane + 32 * j]
        factor, page = F(1.0), I(0)
        if scaled and head < n_head:
            factor = factors[position]
        if head == n_head:
            page = table[I(sequences[row * mixed] * stride) + (position >> 6)]
        if early:
            wait_for_inputs()
        if head < n_head:
            at = I(row * n_head + head)
            source, out = advance(r, np.int64(at) * n_rope), advance(query, np.int64(at) * width)
            own = advance(q, np.int64(at) * rank)
            for j in range(n_x):
                if lane + 32 * j < rank:
                    value = own[lane + 32 * j]
                    out[lane + 32 * j] = value * factor if scaled else value
            for j in range(n_pairs):
                i = I(lane + 32 * j)
                if i < pairs:
                    a, b = turn(source, i, cos[j], sin[j])
                    out[rank + 2 * i] = a * factor if scaled else a
                    out[rank + 2 * i + 1] = b * factor if scaled else b
            return
        c, k = advance(c, I(row * rank)), advance(k, I(row * n_rope))
        to, first = advance(latents, np.int64(page) * page_words), I((position & 63) * width)
        for j in range(n_x):
            x[j] = F(0.0)
            if lane + 32 * j < rank:
                x[j] = c[lane + 32 * j]
        scale = inverse_root(squares(x), F(rank), eps)
        for j in range(n_x):
            i = I(lane + 32 * j)
            if i < rank:
                put(to, I(first + i), x[j] * scale * norm[i])
        for j in range(n_pairs):
            i = I(lane + 32 * j)
            if i < pairs:
                a, b = turn(k, i, cos[j], sin[j])
                put(to, I(first + rank + 2 * i), a)
                put(to, I(first + rank + 2 * i + 1), b)

    return latent_rope
