"""Quantized keys and values: how a warp rotates a block of 32 elements and stores it, one element per lane.

Formula, order: ``engine/cpu/quantized_cache.py``; shapes: ``engine/cache/types.py``.
"""

import numpy as np
from numba import cuda

from engine.cache.types import BLOCK, CHUNK
from engine.cpu.quantized_cache import UNIT
from engine.cuda.intrinsics import (
    bits_float,
    float_bits,
    fma,
    halves,
    lane_from,
    lane_xor,
    lane_xor_int,
    lanes_max,
    round_product,
    stored_half,
)
from engine.cuda.products.unpack import device
from engine.cuda.runtime.kinds import DeviceFunction
from engine.gguf.quants import TINY

F = np.float32
I = np.int32  # noqa: E741


@device
def hadamard(x):
    """The lane's element of the block times the Hadamard matrix of 32 rows; x is its element of the block."""
    lane = I(cuda.threadIdx.x & 31)
    # Both operands come from another register: x itself may be a product, and would be contracted with the sum.
    low, high = lane_from(x, I(lane & ~1)), lane_from(x, I(lane | 1))
    x = low - high if lane & 1 else low + high
    for k in range(1, 5):
        other = lane_xor(x, I(1 << k))
        x = other - x if lane & (1 << k) else x + other
    return x


@device
def rotate(x):
    """The lane's element of the rotated block; x is its element of the block."""
    return hadamard(x) * UNIT


@device
def largest(x):
    """The largest magnitude of a block, or 0 where that is below 2**-100."""
    amax = bits_float(lanes_max(I(float_bits(x) & I(0x7FFFFFFF))))
    return F(0.0) if amax < TINY else amax


@device
def to_int8(x, amax):
    """The lane's integer of a block whose largest magnitude is amax."""
    inverse = F(127.0) / amax
    return round_product(x, F(0.0) if amax == F(0.0) else inverse)


@device
def store_query(x, b, words, scales):
    """Store block b of a query as int8."""
    lane = I(cuda.threadIdx.x & 31)
    amax = largest(x)
    word = I(I(to_int8(x, amax) & I(0xFF)) << I(8 * (lane & 3)))
    word = I(word | lane_xor_int(word, I(1)))
    word = I(word | lane_xor_int(word, I(2)))
    if lane & 3 == 0:
        words[b * (BLOCK // 4) + (lane >> 2)] = np.uint32(word)
    if lane == 0:
        scales[b] = amax / F(127.0)


def make_store(d: int, bits: int, by_position: bool) -> DeviceFunction:
    """The device function ``store(chunk, j, b, x)``: store block b, rotated, of position j in a chunk of keys, or of values
    (``by_position``)."""
    of_block = bits
    of_position = d * bits // 32
    n_integers = CHUNK * d * bits // 16
    n_blocks = d // BLOCK

    @device
    def store(chunk, j, b, x):
        lane = I(cuda.threadIdx.x & 31)
        amax = largest(x)
        # Of four lanes, or of eight if an integer has four bits, each even one of the first four stores half a word.
        shift = I(8 * (lane & 1))
        if bits == 8:
            value, scale = I(to_int8(x, amax) & I(0xFF)), amax / F(127.0)
            word, first = I(lane >> 2), lane & 1 == 0
        else:
            m = -amax if lanes_max(I(1) if x == -amax else I(0)) > 0 else amax
            inverse = F(-8.0) / m
            if amax == F(0.0):
                inverse = F(0.0)
            value, scale = min(I(15), I(fma(x, inverse, F(8.5)))), m / F(-8.0)
            shift = I(shift | (lane & 4))
            word, first = I(lane >> 3), lane & 5 == 0
        if amax == F(0.0):
            scale = F(0.0)
        half = I(value << shift)
        half = I(half | lane_xor_int(half, I(1)))
        if bits == 4:
            half = I(half | lane_xor_int(half, I(4)))
        word = I(b * of_block + word)
        if by_position:
            at, scale_at = I(j * of_position + word), I(j * n_blocks + b)
        else:
            at, scale_at = I((I(word >> 2) * CHUNK + j) * 4 + (word & 3)), I(b * CHUNK + j)
        to = halves(chunk)
        if first:
            to[2 * at + ((lane >> 1) & 1)] = np.uint16(half)
        if lane == 0:
            to[n_integers + scale_at] = stored_half(scale)

    return store
