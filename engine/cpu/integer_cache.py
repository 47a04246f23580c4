"""Integer keys and values (cache types i8 and i12): their rotation, their rounding, and where they are stored.

Formula: rotate(x) = H x / sqrt(B) for each block of B elements, H the Hadamard matrix of Sylvester: orthonormal, its own
    inverse, so rotation does not change q . k, and it spreads a block's outliers over all its elements before rounding.
    d = half(amax / most), integer = round(clamp(x, most * d) * (1 / d)), most = 127 (i8) or 2047 (i12): the integers fit the
    scale that is stored, also where float16 is subnormal.
    A query has integers of magnitude at most 1023 and a float32 scale: d = amax / 1023, integer = round(x * (1023 / amax)).
    Blocks whose largest magnitude is below 2**-100, and those with d = 0, count as zero.  The scale of a block that is not
    finite, or too large for float16, is NaN in a key, so that its score is, and inf in a value: its product with a weight
    above 0 is inf, with 0 NaN.
Shapes: a chunk of keys or values of one head: words (``engine/cache/types.py``); B the block of the head there.
Who owns what: a call owns the items [first, last) that its docstring names; no two items write the same byte.
Reduction order: rotation: levels h = 1, 2, ..., B / 2, (a, b) -> (a + b, a - b) for elements i and i + h, then the product
    with 1 / sqrt(B), rounded once.
Bytes moved: d * bits / 8 + 2 d / B for a key or value of d elements.
"""

import numpy as np
from numba import njit

from engine.cache.types import CHUNK
from engine.cpu.quantized_cache import largest
from engine.numerics import HALF_END, float_to_half, half_to_float, round_product

f32 = np.float32
i16 = np.int16
i32 = np.int32
u8 = np.uint8

QUERY = 1023
"""The largest magnitude of an integer of a query: 128 * 1023 * 127 < 2**24."""

KEY_OVERFLOWED, VALUE_OVERFLOWED = np.uint16(0x7E00), np.uint16(0x7C00)
"""Scales of blocks that are not finite, or too large: NaN and inf."""

LOG2_E = 1.4426950408889634
"""log2(e): scores are in units of factors of two, so that a weight is a power of two."""


@njit(cache=True, error_model="numpy")
def rotate(x, block):
    """Rotate each block of x float32 [n], in place."""
    unit = f32(1.0 / np.sqrt(block))
    for b in range(0, x.size, block):
        h = 1
        while h < block:
            for start in range(b, b + block, 2 * h):
                for i in range(start, start + h):
                    low, high = x[i], x[i + h]
                    x[i] = low + high
                    x[i + h] = low - high
            h *= 2
        for i in range(b, b + block):
            x[i] = x[i] * unit


@njit(cache=True, error_model="numpy")
def rotate_rows(x, block, first, last):
    """Rotate each block of the rows [first, last) of x float32 [rows, n], in place."""
    for t in range(first, last):
        rotate(x[t], block)


@njit(cache=True, error_model="numpy")
def quantize_block(x, most, overflowed, q):
    """Quantize x float32 [n] to integers q int16 [n]; returns the bits of the float16 scale, ``overflowed`` if x is not
    finite or float16 has no such scale."""
    top = largest(x) / f32(most)
    scale = float_to_half(top) if top < HALF_END else overflowed
    d = half_to_float(scale)
    if d == f32(0.0):
        q[:] = i16(0)
        return scale
    limit, inverse = f32(most) * d, f32(1.0) / d
    for i in range(x.size):
        value = x[i]
        if value > limit:
            value = limit
        if value < -limit:
            value = -limit
        q[i] = i16(round_product(value, inverse))
    return scale


@njit(cache=True, error_model="numpy")
def quantize_query(x, block, q, d):
    """Quantize x float32 [n] to q int16 [n] and a scale d float32 [n / block] for each block."""
    for b in range(d.size):
        own = x[b * block : (b + 1) * block]
        amax = largest(own)
        inverse = f32(0.0) if amax == f32(0.0) else f32(QUERY) / amax
        for i in range(block):
            q[b * block + i] = i16(round_product(own[i], inverse))
        d[b] = amax / f32(QUERY)


@njit(cache=True, error_model="numpy")
def quantize_queries(x, scale, block, q, d, first, last):
    """Rotate each block of the rows [first, last) of x float32 [rows, n], multiply it by ``scale``, and quantize it to q
    int16 [rows, n] and scales d float32 [rows, n / block]; x is not changed."""
    row = np.empty(x.shape[1], np.float32)
    for t in range(first, last):
        for i in range(row.size):
            row[i] = x[t, i]
        rotate(row, block)
        for i in range(row.size):
            row[i] = row[i] * scale
        quantize_query(row, block, q[t], d[t])


@njit(cache=True, error_model="numpy")
def store(chunk, j, x, bits, block, by_position):
    """Store x float32 [d], rotated, at position j of a chunk of keys, or of values (``by_position``)."""
    d = x.size
    q = np.empty(block, np.int16)
    data, halves = chunk.view(np.uint8), chunk[CHUNK * d * bits // 32 :].view(np.uint16)
    low = CHUNK * d  # the byte where the low bits begin
    overflowed = VALUE_OVERFLOWED if by_position else KEY_OVERFLOWED
    for b in range(d // block):
        halves[b * CHUNK + j] = quantize_block(x[b * block : (b + 1) * block], (1 << (bits - 1)) - 1, overflowed, q)
        for k in range(block):
            i, value = b * block + k, i32(q[k])
            at = 4 * (j // 4 * d + i) + j % 4 if by_position else 4 * (i // 4 * CHUNK + j) + i % 4
            data[at] = u8((value if bits == 8 else value >> 4) & 255)
        # A row may occur twice in a pass, so a byte of low bits is made of both its elements before it is stored.
        half = block // 2
        for k in range(half if bits == 12 else 0):
            if by_position:
                at, one, other = 4 * (j // 4 * (d // 2) + b * half + k) + j % 4, k, k + half
            else:
                one = k // 4 * 8 + k % 4
                at, other = 4 * ((b * block + one) // 8 * CHUNK + j) + k % 4, one + 4
            data[low + at] = u8((i32(q[one]) & 15) | ((i32(q[other]) & 15) << 4))


@njit(cache=True, error_model="numpy")
def append(x, positions, sequences, table, bits, block, by_position, memory, first, last):
    """Rotate keys or values (``by_position``) x float32 [rows, n_head_kv, d] and store them at positions int32 [rows] of
    the sequences in slots int32 [rows], in ``memory`` uint32 [n_head_kv, pages, words]; table int32 [slots, chunks]; x is not
    changed.  An item is a pair of a row and a head, row by row."""
    heads = x.shape[1]
    row = np.empty(x.shape[2], np.float32)
    for item in range(first, last):
        t, h = item // heads, item % heads
        for i in range(row.size):
            row[i] = x[t, h, i]
        rotate(row, block)
        page = table[sequences[t], positions[t] // CHUNK]
        store(memory[h, page], positions[t] % CHUNK, row, bits, block, by_position)
