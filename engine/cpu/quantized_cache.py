"""Quantized keys and values: their rotation, their storage, and their products with a query.

Formula: rotate(x) = H x / sqrt(32) for each block of 32 elements, H the Hadamard matrix of Sylvester: orthonormal, its own
    inverse, so rotation does not change q . k, and it spreads a block's outliers over all its elements before rounding.
    q8_0: scale = half(amax / 127), integer = round(x * (127 / amax)).
    q4_0: scale = half(m / -8), integer = trunc(x * (-8 / m) + 8.5) - 8, at most 7, m the element of the largest
    magnitude, the negative one of two.
    Blocks whose largest magnitude is below 2**-100 count as zero.
    score = sum over blocks of (dq * dk) * I, I the integer dot product of a block of the key and one of the query, which is
    int8 as in q8_0 but with a float32 scale dq.
Shapes: x float32 [n * 32]; a chunk of keys or values of one head: words (``engine/cache/types.py``).
Who owns what: one call, one thread.
Reduction order: rotation: levels h = 1, 2, 4, 8, 16, (a, b) -> (a + b, a - b) for elements i and i + h, then the product;
    score: acc = fma(dq_b * dk_b, float32(I_b), acc) in rising b, from 0.  I is exact in any order.
Bytes moved: d * bits / 8 + d / 16 for a key or value of d elements.
"""

import numpy as np
from numba import njit

from engine.cache.types import BLOCK, CHUNK
from engine.cpu.intrinsics import dot32_four
from engine.gguf.quants import TINY
from engine.numerics import bits_float, float_bits, float_to_half, fma, half_to_float, round_product

f32 = np.float32
i8 = np.int8
i32 = np.int32
u32 = np.uint32

UNIT = f32(BLOCK**-0.5)


@njit(cache=True, error_model="numpy")
def rotate(x):  # type: ignore[no-untyped-def]
    """Rotate each block of 32 of x float32 [n], in place."""
    for b in range(0, x.size, BLOCK):
        h = 1
        while h < BLOCK:
            for i in range(BLOCK):
                if i & h == 0:
                    low, high = x[b + i], x[b + i + h]
                    x[b + i] = low + high
                    x[b + i + h] = low - high
            h *= 2
        for i in range(BLOCK):
            x[b + i] = x[b + i] * UNIT


@njit(cache=True, error_model="numpy")
def rotate_rows(x):  # type: ignore[no-untyped-def]
    """Rotate each block of 32 of every row of x float32 [rows, n], in place."""
    for t in range(x.shape[0]):
        rotate(x[t])


# --- blocks ----------------------------------------------------------------------------------------------------


@njit(cache=True, error_model="numpy")
def largest(x):  # type: ignore[no-untyped-def]
    """The largest magnitude in x, or 0 where that is below 2**-100."""
    bits = i32(0)
    for i in range(x.size):
        bits = max(bits, i32(float_bits(x[i]) & i32(0x7FFFFFFF)))
    amax = bits_float(bits)
    return f32(0.0) if amax < TINY else amax


@njit(cache=True, error_model="numpy")
def quantize_query(x, q, d):  # type: ignore[no-untyped-def]
    """Quantize x float32 [n] to q int8 [n] and a scale d float32 [n / 32] for each block."""
    for b in range(d.size):
        block = x[b * BLOCK : (b + 1) * BLOCK]
        amax = largest(block)
        inverse = f32(0.0) if amax == f32(0.0) else f32(127.0) / amax
        for i in range(BLOCK):
            q[b * BLOCK + i] = i8(round_product(block[i], inverse))
        d[b] = amax / f32(127.0)


@njit(cache=True, error_model="numpy")
def quantize_queries(x, q, d):  # type: ignore[no-untyped-def]
    """Quantize x float32 [rows, n] to q int8 [rows, n] and scales d float32 [rows, n / 32]."""
    for t in range(x.shape[0]):
        quantize_query(x[t], q[t], d[t])


@njit(cache=True, error_model="numpy")
def quantize_block(x, bits, q):  # type: ignore[no-untyped-def]
    """Quantize x float32 [32] to integers q int8 [32]; returns the bits of the float16 scale."""
    amax = largest(x)
    if amax == f32(0.0):
        q[:] = i8(0)
        return float_to_half(f32(0.0))
    if bits == 8:
        inverse = f32(127.0) / amax
        for i in range(BLOCK):
            q[i] = i8(round_product(x[i], inverse))
        return float_to_half(amax / f32(127.0))
    m = amax
    for i in range(BLOCK):
        if x[i] == -amax:
            m = -amax
    inverse = f32(-8.0) / m
    for i in range(BLOCK):
        q[i] = i8(min(i32(15), i32(fma(x[i], inverse, f32(8.5)))) - i32(8))
    return float_to_half(m / f32(-8.0))


# --- a cache's words -------------------------------------------------------------------------------------------


@njit(cache=True)
def n_words(d, bits):  # type: ignore[no-untyped-def]
    """The number of words that hold the integers of a chunk; the scales follow them."""
    return CHUNK * d * bits // 32


@njit(cache=True)
def place_of(j, i, d, bits, by_position):  # type: ignore[no-untyped-def]
    """Where element i of position j of a chunk is stored: (the word, the number of bits below it)."""
    each = 32 // bits
    word = i // each
    within = i % each
    shift = 8 * within if bits == 8 else 8 * (within % 4) + 4 * (within // 4)
    if by_position:
        return j * (d // each) + word, shift
    return (word // 4 * CHUNK + j) * 4 + word % 4, shift


@njit(cache=True)
def scale_of(j, b, d, by_position):  # type: ignore[no-untyped-def]
    """The index of the scale of block b of position j among those of a chunk."""
    return j * (d // BLOCK) + b if by_position else b * CHUNK + j


@njit(cache=True, error_model="numpy")
def store(chunk, j, x, bits, by_position):  # type: ignore[no-untyped-def]
    """Store x float32 [d], rotated, at position j of a chunk of keys, or of values (``by_position``)."""
    d = x.size
    q = np.empty(BLOCK, np.int8)
    halves = chunk[n_words(d, bits) :].view(np.uint16)
    mask = u32((1 << bits) - 1)
    for b in range(d // BLOCK):
        halves[scale_of(j, b, d, by_position)] = quantize_block(x[b * BLOCK : (b + 1) * BLOCK], bits, q)
        for i in range(BLOCK):
            word, shift = place_of(j, b * BLOCK + i, d, bits, by_position)
            value = u32(i32(q[i]) + (i32(8) if bits == 4 else i32(0))) & mask
            chunk[word] = (chunk[word] & ~(mask << u32(shift))) | (value << u32(shift))


@njit(cache=True, error_model="numpy")
def append(x, positions, bits, by_position, ring):  # type: ignore[no-untyped-def]
    """Store x float32 [rows, n_head_kv, d], rotated, at positions int32 [rows] of a ring [n_head_kv, chunks, words]."""
    for t in range(x.shape[0]):
        for h in range(x.shape[1]):
            chunk = ring[h, positions[t] // CHUNK % ring.shape[1]]
            store(chunk, positions[t] % CHUNK, x[t, h], bits, by_position)


@njit(cache=True, error_model="numpy")
def integers(chunk, d, bits, by_position, out):  # type: ignore[no-untyped-def]
    """Unpack the integers of a chunk into out int8 or int16 [64, d]; runs of 16 bytes are contiguous in either layout."""
    runs = chunk[: n_words(d, bits)].view(np.uint8).reshape(-1, 16)
    per_row = d * bits // 128
    for j in range(CHUNK):
        for g in range(per_row):
            run = runs[j * per_row + g if by_position else g * CHUNK + j]
            # Slices are compiled in a third of the time that indices into out take.
            if bits == 8:
                row = out[j, 16 * g : 16 * g + 16]
                for i in range(16):
                    row[i] = i8(run[i])
            else:
                row = out[j, 32 * g : 32 * g + 32]
                for w in range(4):
                    for i in range(4):
                        row[8 * w + i] = i8(i32(run[4 * w + i] & 15) - i32(8))
                        row[8 * w + 4 + i] = i8(i32(run[4 * w + i] >> 4) - i32(8))


@njit(cache=True, error_model="numpy")
def scores(keys, chunk, bits, q, dq, dots, p):  # type: ignore[no-untyped-def]
    """p[j] = score of position j: keys int16 [64, d], the integers of a chunk, q int8 [d], dq float32 [d / 32]; dots
    int32 [64] is scratch."""
    d = q.size
    scales = chunk[n_words(d, bits) :].view(np.uint16)
    flat = keys.reshape(-1)
    for j in range(CHUNK):
        p[j] = f32(0.0)
    for b in range(dq.size):
        for j in range(0, CHUNK, 4):
            dot32_four(flat, j * d + b * BLOCK, d, q, b * BLOCK, dots, j)
        for j in range(CHUNK):
            p[j] = fma(dq[b] * half_to_float(scales[scale_of(j, b, d, False)]), f32(dots[j]), p[j])


@njit(cache=True, error_model="numpy")
def values(chunk, d, bits, scratch, out):  # type: ignore[no-untyped-def]
    """Unpack the values of a chunk into out float32 [64, d]: a float16 times eight bits is exact; scratch int8 [64, d]."""
    integers(chunk, d, bits, True, scratch)
    scales = chunk[n_words(d, bits) :].view(np.uint16)
    for j in range(CHUNK):
        for b in range(d // BLOCK):
            scale = half_to_float(scales[scale_of(j, b, d, True)])
            for i in range(b * BLOCK, (b + 1) * BLOCK):
                out[j, i] = scale * f32(scratch[j, i])
