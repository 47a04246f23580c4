"""Rounding to floats of 8 or 4 bits, as ds4 and DeepSeek's own implementation round what DeepSeek-V4 stores.

Formula: latents and compressed rows: blocks of 64 elements before the rotated tail, the last one perhaps shorter, share a
    scale, the smallest power of two s with max(|x|, 1e-4) <= 448 s; an element becomes the nearest s v, v a float of type
    E4M3 (``round_to_bits`` in ``engine/numerics.py``).  Then every element, also of the tail, is rounded to float16.
    Queries and keys of the indexer: H x / sqrt(d), H the Hadamard matrix of order d, a power of two; then blocks of 32 in
    the same way, with max(|x|, 6 * 2**-126) <= 6 s, v of type E2M1.
    (ds4, ``dsv4_fp8_kv_quantize_row_inplace_cpu`` and ``dsv4_indexer_qat_row_inplace_cpu``.)
Shapes: x, y float32 [rows, heads, d]; stored float32 [pages, 64, d], or for keys [pages, d, 64]: compressed row r of a
    sequence is in page table[sequence, r // 64], table int32 [sequences, chunks]; positions, sequences int32 [rows].
Who owns what: an item of ``round_heads`` is a head of a row; of ``round_rows`` a row of the pass, which may complete a block.
Reduction order: log2(d) steps of sums and differences of elements 1, 2, 4, ... apart; the maximum does not depend on any.
Bytes moved: 8 per element.
"""

import numpy as np
from numba import njit

from engine.cache.types import CHUNK
from engine.cpu.compressor import completed
from engine.numerics import half_to_float, round_to_bits, scale_exponent, stored_half

f32 = np.float32

EIGHT, FOUR = (64, f32(448.0), f32(1e-4), 3, -6), (32, f32(6.0), f32(6.0 * 2.0**-126), 1, 0)
"""The number of elements that share a scale, the largest float, the least maximum, bits of mantissa, the exponent of the
smallest normal float: of E4M3, and of E2M1."""


@njit(cache=True, error_model="numpy")
def transform(x):
    """Multiply x float32 [d], d a power of two, by the Hadamard matrix over sqrt(d), in place."""
    stride = 1
    while stride < x.size:
        for first in range(0, x.size, 2 * stride):
            for i in range(first, first + stride):
                a, b = x[i], x[i + stride]
                x[i] = a + b
                x[i + stride] = a - b
        stride *= 2
    factor = f32(1.0 / np.sqrt(np.float64(x.size)))
    for i in range(x.size):
        x[i] = x[i] * factor


@njit(cache=True, error_model="numpy")
def round_blocks(x, block, largest, floor, kept, least):
    """Round x float32 [n] in blocks, in place."""
    for first in range(0, x.size, block):
        last = min(first + block, x.size)
        most = floor
        for i in range(first, last):
            most = max(most, abs(x[i]))
        exponent = scale_exponent(most, largest)
        for i in range(first, last):
            x[i] = round_to_bits(x[i], exponent, np.int32(kept), np.int32(least))


@njit(cache=True, error_model="numpy")
def round_head(x, n_rot, four):
    """Round x float32 [d], in place: a query or key of the indexer if ``four``, else a latent of which the last ``n_rot``
    elements are rotated."""
    if four:
        transform(x)
        round_blocks(x, *FOUR)
    else:
        round_blocks(x[: x.size - n_rot], *EIGHT)
        for i in range(x.size):
            x[i] = half_to_float(stored_half(x[i]))


@njit(cache=True, error_model="numpy")
def round_heads(x, n_rot, four, y, first, last):
    """y = x rounded, for the items [first, last)."""
    heads = x.shape[1]
    for item in range(first, last):
        head = y[item // heads, item % heads]
        head[:] = x[item // heads, item % heads]
        round_head(head, n_rot, four)


@njit(cache=True, error_model="numpy")
def round_rows(positions, sequences, ratio, n_rot, four, table, stored, first, last):
    """Round the rows of the blocks that the rows [first, last) of a pass complete."""
    d = stored.shape[1] if four else stored.shape[2]
    x = np.empty(d, np.float32)
    for t in range(first, last):
        r = completed(positions, sequences, ratio, t)
        if r < 0:
            continue
        page, lane = stored[table[sequences[t], r // CHUNK]].reshape(-1), r % CHUNK
        place, stride = (lane, CHUNK) if four else (lane * d, 1)
        for j in range(d):
            x[j] = page[place + j * stride]
        round_head(x, n_rot, four)
        for j in range(d):
            page[place + j * stride] = x[j]
