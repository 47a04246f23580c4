"""Quantized keys and values: their rotation, their storage, and their products with a query.

Formula: rotate(x) = H x / sqrt(32) for each block of 32 elements, H the Hadamard matrix of Sylvester: orthonormal, its own
    inverse, so rotation does not change q . k, and it spreads a block's outliers over all its elements before rounding.
    q8_0: scale = half(amax / 127), integer = round(x * (127 / amax)).
    q4_0: scale = half(m / -8), integer = trunc(x * (-8 / m) + 8.5) - 8, at most 7, m the element of the largest
    magnitude, the negative one of two.
    Blocks whose largest magnitude is below 2**-100 count as zero; a scale that is too large for float16 is NaN.
    score = sum over blocks of (dq * dk) * I, I the integer dot product of a block of the key and one of the query, which is
    int8 as in q8_0 but with a float32 scale dq.  A query is rotated, multiplied by the scale of attention, and quantized.
Shapes: x float32 [n * 32]; a chunk of keys or values of one head: words (``engine/cache/types.py``).
Who owns what: a call owns the items [first, last) that its docstring names.
Reduction order: rotation: levels h = 1, 2, 4, 8, 16, (a, b) -> (a + b, a - b) for elements i and i + h, then the product;
    score: acc = fma(dq_b * dk_b, float32(I_b), acc) in rising b, from 0.  I is exact in any order, even as a sum of
    floats: no partial sum exceeds 32 * 127 * 127 < 2**24.
Bytes moved: d * bits / 8 + d / 16 for a key or value of d elements.
"""

import numpy as np
from numba import njit

from engine.cache.types import BLOCK, CHUNK
from engine.cpu.lanes import add_weighted, clear
from engine.gguf.quants import TINY
from engine.numerics import bits_float, float_bits, fma, half_to_float, round_product, stored_half

f32 = np.float32
i8 = np.int8
i32 = np.int32
i64 = np.int64
u32 = np.uint32

UNIT = f32(BLOCK**-0.5)

add_products = add_weighted(False)


@njit(cache=True, error_model="numpy")
def rotate(x):
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
def rotate_rows(x, first, last):
    """Rotate each block of 32 of the rows [first, last) of x float32 [rows, n], in place."""
    for t in range(first, last):
        rotate(x[t])


# --- blocks ----------------------------------------------------------------------------------------------------


@njit(cache=True, error_model="numpy")
def largest(x):
    """The largest magnitude in x, or 0 where that is below 2**-100."""
    bits = i32(0)
    for i in range(x.size):
        bits = max(bits, i32(float_bits(x[i]) & i32(0x7FFFFFFF)))
    amax = bits_float(bits)
    return f32(0.0) if amax < TINY else amax


@njit(cache=True, error_model="numpy")
def quantize_query(x, q, d):
    """Quantize x float32 [n] to q int8 [n] and a scale d float32 [n / 32] for each block."""
    for b in range(d.size):
        block = x[b * BLOCK : (b + 1) * BLOCK]
        amax = largest(block)
        inverse = f32(0.0) if amax == f32(0.0) else f32(127.0) / amax
        for i in range(BLOCK):
            q[b * BLOCK + i] = i8(round_product(block[i], inverse))
        d[b] = amax / f32(127.0)


@njit(cache=True, error_model="numpy")
def quantize_queries(x, scale, q, d, first, last):
    """Rotate each block of the rows [first, last) of x float32 [rows, n], multiply it by ``scale``, and quantize it to q int8
    [rows, n] and scales d float32 [rows, n / 32]; x is not changed."""
    row = np.empty(x.shape[1], np.float32)
    for t in range(first, last):
        for i in range(row.size):
            row[i] = x[t, i]
        rotate(row)
        for i in range(row.size):
            row[i] = row[i] * scale
        quantize_query(row, q[t], d[t])


@njit(cache=True, error_model="numpy")
def quantize_block(x, bits, q):
    """Quantize x float32 [32] to integers q int8 [32]; returns the bits of the float16 scale."""
    amax = largest(x)
    if amax == f32(0.0):
        q[:] = i8(0)
        return stored_half(f32(0.0))
    if bits == 8:
        inverse = f32(127.0) / amax
        for i in range(BLOCK):
            q[i] = i8(round_product(x[i], inverse))
        return stored_half(amax / f32(127.0))
    m = amax
    for i in range(BLOCK):
        if x[i] == -amax:
            m = -amax
    inverse = f32(-8.0) / m
    for i in range(BLOCK):
        q[i] = i8(min(i32(15), i32(fma(x[i], inverse, f32(8.5)))) - i32(8))
    return stored_half(m / f32(-8.0))


# --- a cache's words -------------------------------------------------------------------------------------------


@njit(cache=True)
def n_words(d, bits):
    """The number of words that hold the integers of a chunk; the scales follow them."""
    return CHUNK * d * bits // 32


@njit(cache=True)
def place_of(j, i, d, bits, by_position):
    """Where element i of position j of a chunk is stored: (the word, the number of bits below it)."""
    each = 32 // bits
    word = i // each
    within = i % each
    shift = 8 * within if bits == 8 else 8 * (within % 4) + 4 * (within // 4)
    if by_position:
        return j * (d // each) + word, shift
    return (word // 4 * CHUNK + j) * 4 + word % 4, shift


@njit(cache=True)
def scale_of(j, b, d, by_position):
    """The index of the scale of block b of position j among those of a chunk."""
    return j * (d // BLOCK) + b if by_position else b * CHUNK + j


@njit(cache=True, error_model="numpy")
def store(chunk, j, x, bits, by_position):
    """Store x float32 [d], rotated, at position j of a chunk of keys, or of values (``by_position``)."""
    d = x.size
    q = np.empty(BLOCK, np.int8)
    halves = chunk[n_words(d, bits) :].view(np.uint16)
    each, mask = 32 // bits, u32((1 << bits) - 1)
    for b in range(d // BLOCK):
        halves[scale_of(j, b, d, by_position)] = quantize_block(x[b * BLOCK : (b + 1) * BLOCK], bits, q)
        # A row may occur twice in a pass, so a word is made of all its elements before it is stored.
        for first in range(0, BLOCK, each):
            whole = u32(0)
            for i in range(first, first + each):
                value = u32(i32(q[i]) + (i32(8) if bits == 4 else i32(0))) & mask
                whole |= value << u32(place_of(j, i, d, bits, by_position)[1])
            chunk[place_of(j, b * BLOCK + first, d, bits, by_position)[0]] = whole


@njit(cache=True, error_model="numpy")
def append(x, positions, sequences, table, bits, by_position, memory, first, last):
    """Rotate keys or values (``by_position``) x float32 [rows, n_head_kv, d] and store them at positions int32 [rows] of
    the sequences in slots int32 [rows], in ``memory`` uint32 [n_head_kv, pages, words]; table int32 [slots, chunks]; x is not
    changed.  An item is a pair of a row and a head, row by row."""
    heads = x.shape[1]
    row = np.empty(x.shape[2], np.float32)
    for item in range(first, last):
        t, h = item // heads, item % heads
        for i in range(row.size):
            row[i] = x[t, h, i]
        rotate(row)
        page = table[sequences[t], positions[t] // CHUNK]
        store(memory[h, page], positions[t] % CHUNK, row, bits, by_position)


# --- what attention reads --------------------------------------------------------------------------------------


@njit(cache=True, error_model="numpy")
def unpack_keys(chunk, bits, scales, out):
    """The integers of a chunk of keys as float32 [d, 64], and their scales [d / 32, 64]."""
    each, ones = 32 // bits, u32((1 << bits) - 1)
    for w in range(out.shape[0] // each):
        words = chunk[w // 4 * 4 * CHUNK + w % 4 : (w // 4 + 1) * 4 * CHUNK : 4]
        for i in range(each):
            # An element of 4 bits is stored plus 8; the sign of one of 8 bits is that of the byte.
            shift, offset = place_of(0, i, 0, bits, True)[1], 1 << (bits - 1)
            row = out[w * each + i]
            for j in range(CHUNK):
                value = i32((words[j] >> u32(shift)) & ones)
                row[j] = f32((value ^ offset) - offset if bits == 8 else value - offset)
    halves = chunk[n_words(out.shape[0], bits) :].view(np.uint16)
    flat = scales.reshape(-1)
    for i in range(flat.size):
        flat[i] = half_to_float(halves[i])


@njit(cache=True, error_model="numpy")
def query_floats(q, integers, scales, scale, t, h, queries, dq, at):
    """Copy a quantized query, integers int8 [t, h] and scales [t, h], to float32 queries[at] and dq[at]; q and scale are
    those of queries that are not quantized."""
    for i in range(integers.shape[2]):
        queries[at, i] = f32(integers[t, h, i])
    for b in range(scales.shape[2]):
        dq[at, b] = scales[t, h, b]


@njit(cache=True, error_model="numpy")
def scores(queries, dq, at, rows, keys, j, dk, dots, p):
    """p[r, i] = score of position i and query ``at`` + r, for 1 or 4 ``rows``: queries float32 [n, d], integers, dq float32
    [n, d / 32]; keys [d, 64], from element j, and dk [d / 32, 64] by ``unpack_keys``; dots float32 [4, 64] is scratch."""
    d, lanes = queries.shape[1], i64(CHUNK)
    clear(p, rows * CHUNK)
    for b in range(dq.shape[1]):
        clear(dots, rows * CHUNK)
        first = at * d + b * BLOCK
        add_products(
            queries, first, d, rows, i64(BLOCK), keys, j + b * BLOCK * CHUNK, lanes, lanes, dots, i64(0), lanes
        )
        own = dk[b]
        for r in range(rows):
            scale, score, products = dq[at + r, b], p[r], dots[r]
            for i in range(CHUNK):
                score[i] = fma(scale * own[i], products[i], score[i])


@njit(cache=True, error_model="numpy")
def unpack_values(chunk, bits, out):
    """The values of a chunk as float32 [64, d]: a float16 times eight bits is exact."""
    d = out.shape[1]
    runs = chunk[: n_words(d, bits)].view(np.uint8)
    halves = chunk[n_words(d, bits) :].view(np.uint16)
    size = BLOCK * bits // 8
    for n in range(CHUNK * d // BLOCK):
        scale = half_to_float(halves[n])
        run = runs[n * size : (n + 1) * size]
        block = out.reshape(-1)[n * BLOCK : (n + 1) * BLOCK]
        if bits == 8:
            for i in range(BLOCK):
                block[i] = scale * f32(i8(run[i]))
        else:
            for w in range(4):
                for i in range(4):
                    block[8 * w + i] = scale * f32(i32(run[4 * w + i] & 15) - i32(8))
                    block[8 * w + 4 + i] = scale * f32(i32(run[4 * w + i] >> 4) - i32(8))
