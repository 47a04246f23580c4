"""From records to tensor-core operands: the only place where the GPU backend knows how a format stores its bits, with the
files of formats that have a grid (``unpack_grid.py``) or few bits (``unpack_bits.py``).

Formula: weight[i] = d * w[i] + dm * m[i // 16], as ``engine/gguf/quants.py`` defines it.  ``engine/cpu/products/unpack.py``
    writes w with the scales of the sub-blocks multiplied in; here a lane gets the bare integers q, four to a word, and
    the scales beside them: w[i] = scale[i // group] * (q[i] - offset), so that q fits the int8 of ``mma32`` and the
    scales multiply its sums.
Shapes: a record of ``engine/cuda/products/repack.py``; lane 4 g + t of a warp works for rows g and g + 8.
Everything here is integer arithmetic, exact in any order.
"""

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda, njit

from engine.cuda.intrinsics import bits_float, pick_bytes
from engine.cuda.products import unpack_bits, unpack_grid
from engine.cuda.products.lanes import (
    OFFSET,
    Unpack,
    both_rows,
    byte_table,
    device,
    halves,
    high_half,
    low_half,
    minus,
    nibbles,
    no_header,
    no_scale,
    no_sums,
    signed_byte,
    spread,
    unsigned_byte,
    vectors,
    with_offset,
)
from engine.cuda.runtime.kinds import DeviceFunction
from engine.gguf.grids import FP4_VALUES, IQ4_VALUES

f32 = np.float32
i32 = np.int32
u32 = np.uint32


# --- 32-wide formats: a record is 16 rows of 32 weights --------------------------------------------------------


def _q4_0() -> Unpack:
    @njit
    def block(w, j):
        return (
            minus(nibbles(w[0], 0), 0x08080808),
            minus(nibbles(w[1], 0), 0x08080808),
            minus(nibbles(w[0], 4), 0x08080808),
            minus(nibbles(w[1], 4), 0x08080808),
        )

    @njit
    def factors(w):
        return halves(w[2])

    return Unpack(0, 0, False, ((2, 0, "lane"), (1, 64, "row")), no_header, block, no_scale, no_sums, factors)


def _q4_1() -> Unpack:
    @njit
    def block(w, j):
        return nibbles(w[0], 0), nibbles(w[1], 0), nibbles(w[0], 4), nibbles(w[1], 4)

    @njit
    def factors(w):
        return low_half(w[2]), low_half(w[3]), high_half(w[2]), high_half(w[3])

    return Unpack(0, 0, True, ((2, 0, "lane"), (2, 64, "row")), no_header, block, no_scale, no_sums, factors)


@device
def _fifth_bits(q, h, shift, first):
    """Four nibbles of q with bits of h as their fifth bits: those of the lane's positions, from ``first`` + 4 t on."""
    t = u32(cuda.threadIdx.x & 3)
    bits = spread(u32(h >> u32(u32(first) + u32(4) * t)))
    return u32(nibbles(q, shift) | u32(bits << u32(4)))


def _q5_0() -> Unpack:
    @device
    def block(w, j):
        return (
            minus(_fifth_bits(w[0], w[2], 0, 0), 0x10101010),
            minus(_fifth_bits(w[1], w[3], 0, 0), 0x10101010),
            minus(_fifth_bits(w[0], w[2], 4, 16), 0x10101010),
            minus(_fifth_bits(w[1], w[3], 4, 16), 0x10101010),
        )

    @njit
    def factors(w):
        return halves(w[4])

    pieces = ((2, 0, "lane"), (2, 64, "row"), (1, 80, "row"))
    return Unpack(0, 0, False, pieces, no_header, block, no_scale, no_sums, factors)


def _q5_1() -> Unpack:
    @device
    def block(w, j):
        return (
            _fifth_bits(w[0], w[2], 0, 0),
            _fifth_bits(w[1], w[3], 0, 0),
            _fifth_bits(w[0], w[2], 4, 16),
            _fifth_bits(w[1], w[3], 4, 16),
        )

    @njit
    def factors(w):
        return low_half(w[4]), low_half(w[5]), high_half(w[4]), high_half(w[5])

    pieces = ((2, 0, "lane"), (2, 64, "row"), (2, 80, "row"))
    return Unpack(0, 0, True, pieces, no_header, block, no_scale, no_sums, factors)


def _q8_0() -> Unpack:
    @njit
    def block(w, j):
        return w[0], w[1], w[2], w[3]

    @njit
    def factors(w):
        return halves(w[4])

    return Unpack(0, 0, False, ((4, 0, "lane"), (1, 128, "row")), no_header, block, no_scale, no_sums, factors)


def _iq4_nl() -> Unpack:
    low, high = byte_table(IQ4_VALUES)
    plain = _q4_0()

    @njit
    def block(w, j):
        return low(w[0]), low(w[1]), high(w[0]), high(w[1])

    return Unpack(0, 0, False, plain.pieces, no_header, block, no_scale, no_sums, plain.factors)


def _mxfp4() -> Unpack:
    low, high = byte_table(FP4_VALUES)

    @njit
    def block(w, j):
        return low(w[0]), low(w[1]), high(w[0]), high(w[1])

    @njit
    def power(e):
        """2**(e - 128), subnormal below e = 2."""
        return bits_float(i32(e * i32(1 << 23)) - i32(1 << 23) if e >= i32(2) else i32(e + i32(1)) * i32(0x00200000))

    @device
    def factors(w):
        # The word holds the exponents of rows g, g + 8, g + 1, g + 9 of an even g; index 4 chooses a zero.
        own = u32(u32(0x4440) + u32(2) * u32((cuda.threadIdx.x >> 2) & 1))
        e, e8 = pick_bytes(w[2], u32(0), own), pick_bytes(w[2], u32(0), u32(own + u32(1)))
        return power(i32(e)), power(i32(e8)), f32(0.0), f32(0.0)

    return Unpack(0, 0, False, ((2, 0, "lane"), (1, 64, "pair")), no_header, block, no_scale, no_sums, factors)


# --- 256-wide formats: a record is 16 rows of eight 32-blocks --------------------------------------------------


@njit
def scale_min(h1, h2, h3):
    """Eight 6-bit scales and eight minimums of Q4_K and Q5_K, a byte each, from the three packed words."""
    low, six, high = u32(0x0F0F0F0F), u32(0x3F3F3F3F), u32(0x30303030)
    return (
        u32(h1 & six),
        u32((h3 & low) | ((h1 >> u32(2)) & high)),
        u32(h2 & six),
        u32(((h3 >> u32(4)) & low) | ((h2 >> u32(2)) & high)),
    )


def _k_functions(
    block: DeviceFunction, at: int
) -> tuple[DeviceFunction, DeviceFunction, DeviceFunction, DeviceFunction, DeviceFunction]:
    """header, block, scale, sums, factors of Q4_K and Q5_K, whose d, dmin and scales of both rows are the words from ``at``
    on."""

    @njit
    def header(w):
        a = scale_min(w[at + 1], w[at + 2], w[at + 3])
        b = scale_min(w[at + 5], w[at + 6], w[at + 7])
        return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]

    @njit
    def scale(h, r, g):
        return unsigned_byte(h[4 * r + g // 4], g % 4)

    @njit
    def sums(h, r):
        return h[4 * r + 2], h[4 * r + 3], u32(0), u32(0)

    @njit
    def factors(w):
        return low_half(w[at]), low_half(w[at + 4]), -high_half(w[at]), -high_half(w[at + 4])

    return header, block, scale, sums, factors


def _q4_k() -> Unpack:
    @njit
    def block(w, j):
        k, shift = 4 * (j // 2), 4 * (j % 2)
        return nibbles(w[k], shift), nibbles(w[k + 1], shift), nibbles(w[k + 2], shift), nibbles(w[k + 3], shift)

    return Unpack(32, 0, True, (*vectors(0, 128, 256, 384), *both_rows(512)), *_k_functions(block, 16))


def _q5_k() -> Unpack:
    @njit
    def five(q, h, shift, j):
        return u32(nibbles(q, shift) | u32(u32((h >> u32(j)) & u32(0x01010101)) << u32(4)))

    @njit
    def block(w, j):
        k, s = 4 * (j // 2), 4 * (j % 2)
        return (
            five(w[k], w[16], s, j),
            five(w[k + 1], w[17], s, j),
            five(w[k + 2], w[18], s, j),
            five(w[k + 3], w[19], s, j),
        )

    return Unpack(32, 0, True, (*vectors(0, 128, 256, 384, 512), *both_rows(640)), *_k_functions(block, 20))


def _q6_k() -> Unpack:
    """Words: low bits of positions 0 .. 127 in two vectors, of the rest in two, high bits of each half in one, scales, d."""

    @njit
    def six(low, high, j):
        two = u32(u32((high >> u32(2 * (j % 4))) & u32(0x03030303)) << u32(4))
        return u32(nibbles(low, 4 * ((j % 4) // 2)) | two)

    @njit
    def block(w, j):
        k, h = 8 * (j // 4) + 4 * (j % 2), 16 + 4 * (j // 4)
        return six(w[k], w[h], j), six(w[k + 1], w[h + 1], j), six(w[k + 2], w[h + 2], j), six(w[k + 3], w[h + 3], j)

    @njit
    def header(w):
        return w[24], w[25], w[26], w[27], w[28], w[29], w[30], w[31]

    @njit
    def factors(w):
        return halves(w[32])

    pieces = (*vectors(0, 128, 256, 384, 512, 640), *both_rows(768), (1, 832, "row"))
    return Unpack(16, 32, False, pieces, header, block, signed_scale, all_sums, factors)


@njit
def signed_scale(h, r, g):
    """Scales that are int8, 16 per row."""
    return signed_byte(h[4 * r + g // 4], g % 4)


@njit
def all_sums(h, r):
    """All 16 bytes of a row's header."""
    return h[4 * r], h[4 * r + 1], h[4 * r + 2], h[4 * r + 3]


def _q2_k() -> Unpack:
    @njit
    def two(w, j):
        return u32((w >> u32(2 * (j % 4))) & u32(0x03030303))

    @njit
    def block(w, j):
        k = 4 * (j // 4)
        return two(w[k], j), two(w[k + 1], j), two(w[k + 2], j), two(w[k + 3], j)

    @njit
    def header(w):
        return w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15]

    @njit
    def scale(h, r, g):
        return i32(unsigned_byte(h[4 * r + g // 4], g % 4) & i32(15))

    @njit
    def sums(h, r):
        return nibbles(h[4 * r], 4), nibbles(h[4 * r + 1], 4), nibbles(h[4 * r + 2], 4), nibbles(h[4 * r + 3], 4)

    @njit
    def factors(w):
        return low_half(w[16]), low_half(w[17]), -high_half(w[16]), -high_half(w[17])

    pieces = (*vectors(0, 128), *both_rows(256), (2, 320, "row"))
    return Unpack(16, 0, True, pieces, header, block, scale, sums, factors)


def _q3_k() -> Unpack:
    """Words: low bits of positions 0 .. 127, those of the rest, all high bits, thrice a word of scales of both rows, d."""

    @njit
    def three(low, high, j):
        top = u32(u32((high >> u32(j)) & u32(0x01010101)) << u32(2))
        return u32(u32((low >> u32(2 * (j % 4))) & u32(0x03030303)) | top)

    @njit
    def block(w, j):
        k = 4 * (j // 4)
        return three(w[k], w[8], j), three(w[k + 1], w[9], j), three(w[k + 2], w[10], j), three(w[k + 3], w[11], j)

    @njit
    def six(w, r, g):
        """Scales 4 g .. 4 g + 3, less 32 each: the low four bits from the first two words of a row, the high two
        from the third."""
        low = nibbles(w[12 + 2 * (g % 2) + r], 4 * (g // 2))
        high = u32(u32((w[16 + r] >> u32(2 * g)) & u32(0x03030303)) << u32(4))
        return minus(u32(low | high), 0x20202020)

    @njit
    def header(w):
        return (
            *(six(w, 0, 0), six(w, 0, 1), six(w, 0, 2), six(w, 0, 3)),
            *(six(w, 1, 0), six(w, 1, 1), six(w, 1, 2), six(w, 1, 3)),
        )

    @njit
    def factors(w):
        return halves(w[18])

    pieces = (*vectors(128, 256, 0), (2, 384, "row"), (2, 400, "row"), (2, 416, "row"), (1, 432, "row"))
    return Unpack(16, 4, False, pieces, header, block, signed_scale, all_sums, factors)


def _iq4_xs(unsigned: bool = False) -> Unpack:
    low, high = byte_table(with_offset(IQ4_VALUES) if unsigned else IQ4_VALUES)

    @njit
    def block(w, j):
        k = 4 * (j // 2) + 2 * (j % 2)
        return low(w[k]), low(w[k + 1]), high(w[k]), high(w[k + 1])

    @njit
    def header(w):
        return w[16], w[17], w[18], w[19]

    @njit
    def scale(h, r, g):
        four = i32((h[1 + 2 * r] >> u32(4 * g)) & u32(15))
        two = i32((h[2 * r] >> u32(16 + 2 * g)) & u32(3))
        return i32((four | two << i32(4)) - i32(32))

    @njit
    def factors(w):
        return low_half(w[16]), low_half(w[18]), f32(0.0), f32(0.0)

    pieces = (*vectors(0, 128, 256, 384), (4, 512, "row"))
    return Unpack(32, OFFSET * unsigned, False, pieces, header, block, scale, no_sums, factors)


_FORMATS: dict[T, Callable[[], Unpack]] = {
    T.Q4_0: _q4_0,
    T.Q4_1: _q4_1,
    T.Q5_0: _q5_0,
    T.Q5_1: _q5_1,
    T.Q8_0: _q8_0,
    T.IQ4_NL: _iq4_nl,
    T.MXFP4: _mxfp4,
    T.Q2_K: _q2_k,
    T.Q3_K: _q3_k,
    T.Q4_K: _q4_k,
    T.Q5_K: _q5_k,
    T.Q6_K: _q6_k,
    T.IQ4_XS: _iq4_xs,
    **unpack_bits.FORMATS,
}


def unpack(type_: T, near: bool = False, unsigned: bool = False) -> Unpack:
    """How lanes read a format; returns new functions at every call, since Numba keeps what it compiled for one target.

    near: if the format has a table, ``Unpack.fill`` copies it to shared memory.
    unsigned: q of a unit of 256 are unsigned bytes, from which an offset is subtracted where weights are negative; tables are
    near.
    """
    if type_ in unpack_grid.FORMATS:
        return unpack_grid.FORMATS[type_](near or unsigned, unsigned)
    if unsigned and type_ == T.IQ4_XS:
        return _iq4_xs(unsigned)
    return _FORMATS[type_]()
