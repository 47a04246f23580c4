"""Formats of few bits without a grid: three values (TQ1_0, TQ2_0), two (Q1_0), four (Q2_0), and sixteen (NVFP4).

Formula: weight[i] = d * q[i], with d for 256 weights (TQ1_0, TQ2_0), 128 (Q1_0), 64 (Q2_0) or 16 (NVFP4).
Shapes: a record of ``engine/cuda/products/repack.py``; lane 4 g + t of a warp works for rows g and g + 8.
Everything here is integer arithmetic, exact in any order.
"""

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda, njit

from engine.cuda.intrinsics import half_to_float, pick_bytes
from engine.cuda.products.lanes import (
    Unpack,
    both_rows,
    device,
    halves,
    make_four,
    minus,
    no_header,
    no_scale,
    no_sums,
    spread,
    unsigned_byte,
    vectors,
)
from engine.cuda.runtime.kinds import DeviceFunction
from engine.gguf.grids import FP4_VALUES

f32 = np.float32
i32 = np.int32
u16 = np.uint16
u32 = np.uint32

ONES = 0x01010101


def _make_factors(at: int) -> DeviceFunction:
    """``Unpack.factors`` of a format whose float16 of both rows are word ``at``."""

    @njit
    def factors(w):
        return halves(w[at])

    return factors


def _tq2_0() -> Unpack:
    """Words: positions 0 .. 127 in a vector, two bits each, and the rest in another; d."""

    @njit
    def two(w, j):
        return minus(u32((w >> u32(2 * (j % 4))) & u32(0x03030303)), ONES)

    @njit
    def block(w, j):
        k = 4 * (j // 4)
        return two(w[k], j), two(w[k + 1], j), two(w[k + 2], j), two(w[k + 3], j)

    pieces = (*vectors(0, 128), (1, 256, "row"))
    return Unpack(0, 0, False, pieces, no_header, block, no_scale, no_sums, _make_factors(8))


def _tq1_0() -> Unpack:
    """Words: a vector with five digits of positions 0 .. 159; for each row a word with five digits of positions 160 .. 239;
    for each row a word with four digits of positions 240 .. 255; d."""

    @njit
    def digits(w, n):
        """Digit n of each byte, less 1."""
        # A byte is a fraction of 256, in base 3: times 3**n without what exceeds 8 bits, and times 3, the digit exceeds them.
        power = u32(81) if n == 4 else u32(u32(u32(0x1B090301) >> u32(8 * n)) & u32(255))
        even = u32(u32(u32(w & u32(0x00FF00FF)) * power) & u32(0x00FF00FF))
        odd = u32(u32(u32(u32(w >> u32(8)) & u32(0x00FF00FF)) * power) & u32(0x00FF00FF))
        even = u32(u32(u32(even * u32(3)) >> u32(8)) & u32(0x00030003))
        odd = u32(u32(odd * u32(3)) & u32(0x03000300))
        return minus(u32(even | odd), ONES)

    @device
    def block(w, j):
        if j < 5:
            return digits(w[0], j), digits(w[1], j), digits(w[2], j), digits(w[3], j)
        if j < 7:
            n = 2 * j - 10
            return digits(w[4], n), digits(w[5], n), digits(w[4], n + 1), digits(w[5], n + 1)
        t = cuda.threadIdx.x & 3
        return digits(w[4], 4), digits(w[5], 4), digits(w[6], t), digits(w[7], t)

    pieces = (*vectors(0), (2, 128, "lane"), (2, 192, "row"), (1, 208, "row"))
    return Unpack(0, 0, False, pieces, no_header, block, no_scale, no_sums, _make_factors(8))


def _q1_0() -> Unpack:
    """Words: 128 bits of row g, then of row g + 8; d."""

    @njit
    def one(bits):
        """Bits 0 .. 3 as 1 and -1."""
        ones = spread(bits)
        return u32(ones | u32(u32(ones ^ u32(ONES)) * u32(255)))

    @device
    def block(w, j):
        first = u32(u32(4) * u32(cuda.threadIdx.x & 3))
        second = u32(first + u32(16))
        return (
            one(u32(w[j] >> first)),
            one(u32(w[4 + j] >> first)),
            one(u32(w[j] >> second)),
            one(u32(w[4 + j] >> second)),
        )

    pieces = (*both_rows(0), (1, 64, "row"))
    return Unpack(0, 0, False, pieces, no_header, block, no_scale, no_sums, _make_factors(8))


def _q2_0() -> Unpack:
    """Words: for each block, the bytes of the lane's four positions of a0 .. a3; d."""

    @njit
    def two(w, at):
        bits = u32(u32(w >> u32(8 * at)) & u32(255))
        bits = u32(u32(bits | u32(bits << u32(12))) & u32(0x000F000F))
        return minus(u32(u32(bits | u32(bits << u32(6))) & u32(0x03030303)), ONES)

    @njit
    def block(w, j):
        return two(w[j], 0), two(w[j], 1), two(w[j], 2), two(w[j], 3)

    pieces = ((2, 0, "lane"), (1, 64, "row"))
    return Unpack(0, 0, False, pieces, no_header, block, no_scale, no_sums, _make_factors(2))


def _nvfp4() -> Unpack:
    """Words: for each of four units, the bytes of the lane's positions, of row g and of row g + 8; d of the four units, a
    byte each, of row g, then of row g + 8.  Low nibbles are the first eight positions of a unit, high ones the rest."""
    four = make_four(FP4_VALUES)

    @device
    def own(w):
        """The values of the low or the high nibbles, which are moved next to each other."""
        q = u32(u32(w >> u32(u32(2) * u32(cuda.threadIdx.x & 2))) & u32(0x0F0F0F0F))
        return four(pick_bytes(u32(q | u32(q >> u32(4))), u32(0), u32(0x4420)))

    @device
    def block(w, j):
        return own(w[2 * j]), own(w[2 * j + 1])

    @njit
    def factor(code):
        """Half of an unsigned e4m3, whose largest code is zero, since the table holds doubled values."""
        # A float16 has the same fields, but a bias of 15 instead of 7, also where it is subnormal.
        value = half_to_float(u16(i32(code & i32(127)) << i32(7))) * f32(2.0**8 / 2)
        return f32(0.0) if code == i32(127) else value

    @njit
    def factors(w, j):
        return factor(unsigned_byte(w[8], j)), factor(unsigned_byte(w[9], j)), f32(0.0), f32(0.0)

    pieces = ((4, 0, "turn"), (4, 64, "turn"), (2, 128, "row"))
    return Unpack(0, 0, False, pieces, no_header, block, no_scale, no_sums, factors)


FORMATS: dict[T, Callable[[], Unpack]] = {T.TQ2_0: _tq2_0, T.TQ1_0: _tq1_0, T.Q1_0: _q1_0, T.NVFP4: _nvfp4}
"""What :func:`engine.cuda.products.unpack.unpack` calls for the formats of this file."""

if "Q2_0" in T.__members__:  # as in ``engine/gguf/quants.py``
    FORMATS[T["Q2_0"]] = _q2_0
