"""What one of four warps does with a chunk of integer keys and values that they share (cache types i8 and i12).

    s = scores of the warp's 16 positions; their maximum to the board
    -- barrier
    p = 2**(s - maximum of the chunk); p and, for each block of values, the largest p * dv to the board
    -- barrier
    for each block of values: bytes of P = integers of p * dv to the board, and 2**(E - 11)
    -- barrier
    l = sum of p of the chunk, by two of the warps
    for each 16 dimensions of the values that are the warp's:
        o = 2**(E - 11) * float32(integer products of all P and the values)

Formula: ``engine/cpu/integer_attention.py``; pieces: ``engine/cuda/attention/integer_chunk.py``.
Shapes: the board is shared memory of a block, words: maxima float32 [2 (r), 8 (g), 4 (warp)], p float32 [4 (warp), 2 (r), 32
    lanes, 4 (e)], then for each block of values the bits of the largest products int32 [2, 8, 4], bytes P // 16 and P % 16
    [2, 2 (32 positions), 32 lanes, 4] in the layout of a tensor core, and 2**(E - 11) float32 [2, 8].
Who owns what: warp w owns positions 16 w .. 16 w + 15 of the chunk, and dimensions 16 i .. 16 i + 15 of the values for i = w,
    w + 4, ...; lane 4 g + t owns queries g and g + 8 (r = 0, 1), and of 16 positions or dimensions 4 t .. 4 t + 3 (e).
Reduction order: that of the mirror; maxima and integers are exact in any order.
Bytes moved: none but those of the chunk.
"""

from dataclasses import dataclass

import numpy as np
from numba import cuda

from engine.cpu.integer_attention import LN_2
from engine.cuda.attention.integer_chunk import (
    make_hide,
    make_products,
    power_above,
    sum_of_lanes,
    to_bytes,
)
from engine.cuda.intrinsics import advance, bits_float, exp2, fma, keep4, lane_xor, lane_xor_int, vector4
from engine.cuda.products.unpack import device
from engine.cuda.runtime.kinds import DeviceFunction

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

SHARERS = 4
"""Warps that share a chunk, one for each 16 positions."""


@dataclass(frozen=True)
class Board:
    """The words of shared memory by which four warps exchange what they know of a chunk with ``blocks`` blocks of values."""

    blocks: int

    @property
    def weights(self) -> int:
        return 64

    @property
    def largest(self) -> int:
        return self.weights + 4 * 2 * 32 * 4

    @property
    def integers(self) -> int:
        return self.largest + 64 * self.blocks

    @property
    def powers(self) -> int:
        return self.integers + 512 * self.blocks

    @property
    def size(self) -> int:
        return self.powers + 16 * self.blocks


@device
def show_top(s, r, lane, warp, board):
    """Write the largest of a warp's scores of query r."""
    top = max(max(s[4 * r], s[4 * r + 1]), max(s[4 * r + 2], s[4 * r + 3]))
    top = max(top, lane_xor(top, I(1)))
    top = max(top, lane_xor(top, I(2)))
    if lane & 3 == 0:
        board[I(32 * r + lane) + warp] = top


@device
def _largest_of_four(board, at):
    words = vector4(board, at)
    return max(
        max(bits_float(I(words[0])), bits_float(I(words[1]))), max(bits_float(I(words[2])), bits_float(I(words[3])))
    )


def make_show_weights(blocks: int, scales_pitch: int, load: DeviceFunction) -> DeviceFunction:
    """The device function ``show_weights(s, r, scales, lane, warp, board)``: turn a warp's scores of query r into weights,
    all 0 if no position of the chunk is visible, and write these and the largest product with the scales of each block of
    values, ``scales_pitch`` words apart; returns ln 2 * maximum of the chunk."""
    places, products = Board(blocks), make_products(load, 1)
    weights_at, largest_at = places.weights, places.largest

    @device
    def show_weights(s, r, scales, lane, warp, board):
        top = _largest_of_four(board, I(32 * r) + I(lane & ~3))
        base = top if top > F(-np.inf) else F(0.0)
        for e in range(4):
            s[4 * r + e] = exp2(s[4 * r + e] - base)
        at = I(I(I(2 * warp + r) * 32 + lane) * 4 + weights_at)
        keep4(board, at, s[4 * r], s[4 * r + 1], s[4 * r + 2], s[4 * r + 3])
        w = cuda.local.array(4, np.float32)
        for b in range(blocks):
            bits = products(s, r, advance(scales, I(b * scales_pitch)), I(lane & 3), w)
            bits = max(bits, lane_xor_int(bits, I(1)))
            bits = max(bits, lane_xor_int(bits, I(2)))
            if lane & 3 == 0:
                board[I(I(64 * b + 32 * r + largest_at) + I(lane + warp))] = bits_float(bits)
        return fma(top, LN_2, F(-0.0))

    return show_weights


def make_show_integers(blocks: int, scales_pitch: int, load: DeviceFunction) -> DeviceFunction:
    """The device function ``show_integers(p, r, scales, lane, warp, board, words)``: write the bytes of the integers of a
    warp's weights of query r, for each block of values, and what their sums are multiplied by.  ``words``: the board as
    uint32."""
    places, products = Board(blocks), make_products(load, 1)
    largest_at, integers_at, powers_at = places.largest, places.integers, places.powers

    @device
    def show_integers(p, r, scales, lane, warp, board, words):
        w = cuda.local.array(4, np.float32)
        for b in range(blocks):
            products(p, r, advance(scales, I(b * scales_pitch)), I(lane & 3), w)
            # Products are not negative, so their order is that of their bits.
            found = vector4(words, I(I(64 * b + 32 * r + largest_at) + I(lane & ~3)))
            bits = max(max(I(found[0]), I(found[1])), max(I(found[2]), I(found[3])))
            up, power = power_above(bits)
            high, low = to_bytes(w, 0, up)
            at = I(I(I(512 * b + 128 * (warp >> 1)) + I(4 * lane)) + I(I(2 * (warp & 1) + r) + integers_at))
            words[at], words[I(at + 256)] = high, low
            if warp == 0 and lane & 3 == 0:
                board[I(I(16 * b + 8 * r + powers_at) + I(lane >> 2))] = power

    return show_integers


def make_clear_integers(blocks: int) -> DeviceFunction:
    """The device function ``clear_integers(lane, warp, words)``: integers of 0 for query 1, where there is none."""
    integers_at = Board(blocks).integers

    @device
    def clear_integers(lane, warp, words):
        for b in range(blocks):
            at = I(I(I(512 * b + 128 * (warp >> 1)) + I(4 * lane)) + I(I(2 * (warp & 1) + 1) + integers_at))
            words[at], words[I(at + 256)] = U(0), U(0)

    return clear_integers


@device
def sum_weights(r, lane, board):
    """The sum of the weights of query r in the chunk; board: from the weights on."""
    x = cuda.local.array(16, np.float32)
    for m in range(4):
        words = vector4(board, I(I(256 * m + 128 * r) + I(4 * lane)))
        for e in range(4):
            x[4 * m + e] = bits_float(I(words[e]))
    # The halving tree of 64: 32 and 16 apart here, 8 and less in other lanes.
    return sum_of_lanes(
        (x[0] + x[8]) + (x[4] + x[12]),
        (x[1] + x[9]) + (x[5] + x[13]),
        (x[2] + x[10]) + (x[6] + x[14]),
        (x[3] + x[11]) + (x[7] + x[15]),
        lane,
    )


def make_take_integers(blocks: int) -> DeviceFunction:
    """The device function ``take_integers(b, lane, words, high, low)``: the bytes of all integers of block b, in the order
    [strip, r] that the products with values expect."""
    integers_at = Board(blocks).integers

    @device
    def take_integers(b, lane, words, high, low):
        at = I(I(512 * b + integers_at) + I(4 * lane))
        for step in range(2):
            x, y = vector4(words, I(at + 128 * step)), vector4(words, I(at + 256 + 128 * step))
            for k in range(4):
                high[4 * step + k], low[4 * step + k] = x[k], y[k]

    return take_integers


hide_strip = make_hide(1)
