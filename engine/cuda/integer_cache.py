"""Integer keys, values and queries (cache types i8 and i12): how a warp rotates a head and stores it.

Formula, order: ``engine/cpu/integer_cache.py``; shapes: ``engine/cache/types.py``.  A query of integers q of up to 1023 is
    stored as two heads of bytes, for tensor cores: q = 8 h + l, h = floor(q / 8) and l from 0 to 7.
Who owns what: a lane owns elements ``lane + 32 k`` of a head.
"""

import math

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK, CacheType
from engine.cpu.integer_cache import KEY_OVERFLOWED, QUERY, VALUE_OVERFLOWED
from engine.cuda.intrinsics import (
    bits_float,
    float_bits,
    float_to_half,
    half_to_float,
    halves,
    lane_xor_int,
    lanes_max,
    octets,
    round_product,
)
from engine.cuda.products.unpack import device
from engine.cuda.quantized_cache import hadamard
from engine.cuda.runtime.kinds import DeviceFunction
from engine.gguf.quants import TINY
from engine.numerics import HALF_END

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32


def make_rotate(d: int, block: int) -> DeviceFunction:
    """The device function ``rotate(x)``: rotate each block of a head of d elements in place, the lane's in x [d / 32]."""
    n_x, per = d // 32, block // 32
    unit = F(1.0 / np.sqrt(block))
    levels = int(math.log2(per))

    @device
    def rotate(x):
        for k in range(n_x):
            x[k] = hadamard(x[k])
        for level in range(levels):
            apart = 1 << level
            for k in range(n_x):
                if k & apart == 0:
                    low, high = x[k], x[k + apart]
                    x[k] = low + high
                    x[k + apart] = low - high
        for k in range(n_x):
            x[k] = x[k] * unit

    return rotate


def _make_largest(per: int) -> DeviceFunction:
    """The device function ``largest(x, first)``: the largest magnitude of the block in registers first .. first + ``per`` - 1
    of x, or 0 where that is below 2**-100."""

    @device
    def largest(x, first):
        bits = I(0)
        for k in range(per):
            bits = max(bits, I(float_bits(x[first + k]) & I(0x7FFFFFFF)))
        amax = bits_float(lanes_max(bits))
        return F(0.0) if amax < TINY else amax

    return largest


@device
def _word(byte):
    """The word of the low bytes of four adjacent lanes, in each of them."""
    lane = I(cuda.threadIdx.x & 31)
    word = I(I(byte & I(0xFF)) << I(8 * (lane & 3)))
    word = I(word | lane_xor_int(word, I(1)))
    return I(word | lane_xor_int(word, I(2)))


def make_store_query(d: int, block: int) -> DeviceFunction:
    """The device function ``store_query(x, words, scales)``: store a query of d elements, rotated and scaled, the lane's in
    x, as words [2, d / 4], h and then l, and its scales [d / block]."""
    per, blocks, apart = block // 32, d // block, d // 4
    largest = _make_largest(per)

    @device
    def store_query(x, words, scales):
        lane = I(cuda.threadIdx.x & 31)
        for b in range(blocks):
            amax = largest(x, b * per)
            inverse = F(QUERY) / amax
            if amax == F(0.0):
                inverse = F(0.0)
            for k in range(per):
                q = round_product(x[b * per + k], inverse)
                high, low = _word(I(q >> I(3))), _word(I(q & I(7)))
                if lane & 3 == 0:
                    at = I(8 * (b * per + k) + (lane >> 2))
                    words[at] = U(high)
                    words[at + apart] = U(low)
            if lane == 0:
                scales[b] = amax / F(QUERY)

    return store_query


def make_store(of: CacheType, d: int, by_position: bool) -> DeviceFunction:
    """The device function ``store(chunk, j, x)``: store a head of d elements, rotated, the lane's in x, at position j of a
    chunk of keys, or of values (``by_position``)."""
    bits, block, most = of.bits, of.block(d), of.most
    per, blocks = block // 32, d // block
    low_words, scale_at = CHUNK * d // 4, 2 * of.integer_words(d)
    largest = _make_largest(per)
    half, n_low = block // 2, max(1, per // 2)
    overflowed = VALUE_OVERFLOWED if by_position else KEY_OVERFLOWED

    @device
    def put_key(chunk, j, k, value):
        """Store the integer of element ``lane + 32 k``."""
        lane = I(cuda.threadIdx.x & 31)
        word = _word(I(value >> I(bits - 8)))
        if lane & 3 == 0:
            chunk[I(I(8 * k + (lane >> 2)) * CHUNK + j)] = U(word)
        if bits == 12:
            low = I(_word(I(value & I(15))) << (lane & I(4)))
            low = I(low | lane_xor_int(low, I(4)))
            if lane & 7 == 0:
                chunk[I(low_words + I(4 * k + (lane >> 3)) * CHUNK + j)] = U(low)

    @device
    def put_value(data, j, k, value):
        """Store the upper 8 bits."""
        lane = I(cuda.threadIdx.x & 31)
        data[I(I(I(j >> 2) * d + I(lane + 32 * k)) * 4 + (j & 3))] = np.uint8(I(value >> I(bits - 8)) & I(0xFF))

    @device
    def put_low(data, j, b, k, low, high):
        """Store the lower 4 bits of elements k and k + B / 2 of block b, which share a byte."""
        data[I(I(low_words + I(j >> 2) * (d // 2) + I(b * half + k)) * 4 + (j & 3))] = np.uint8(
            I(low & I(15)) | I(I(high & I(15)) << I(4))
        )

    @device
    def store(chunk, j, x):
        lane, data = I(cuda.threadIdx.x & 31), octets(chunk)
        values = cuda.local.array(per, np.int32)
        scales = halves(chunk)
        for b in range(blocks):
            top = largest(x, b * per) / F(most)
            scale = float_to_half(top)
            if not top < HALF_END:
                scale = overflowed
            d_b = half_to_float(scale)
            limit, inverse = F(most) * d_b, F(1.0) / d_b
            if d_b == F(0.0):
                limit, inverse = F(0.0), F(0.0)
            for k in range(per):
                clamped = max(min(x[b * per + k], limit), -limit)
                values[k] = round_product(clamped, inverse)
                if by_position:
                    put_value(data, j, I(b * per + k), values[k])
                else:
                    put_key(chunk, j, I(b * per + k), values[k])
            if by_position and bits == 12:
                for k in range(n_low):
                    if per > 1:
                        put_low(data, j, b, I(lane + 32 * k), values[k], values[n_low + k])
                    else:
                        other = lane_xor_int(values[0], I(16))
                        if lane < 16:
                            put_low(data, j, b, lane, values[0], other)
            if lane == 0:
                scales[I(scale_at + b * CHUNK + j)] = scale

    return store
