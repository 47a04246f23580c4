"""Integer sums of products by warpgroups: weights times their scales as one or two planes of bytes, 2**shift * high + low.

A product q * s usually needs more than 8 bits.  The tensor cores multiply both planes by the activations, and the sums of the
high plane are shifted.  Everything here is of integers, exact in any order, but for the floating-point part of a unit,
``close``.

    for 32 positions at a time: unpack their weights, start the products of the high plane, or of both
    where a block has more than 32 columns: shift the sums, start the products of the low plane
"""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import advance, bits_float, fma, pick_bytes, vector2
from engine.cuda.products.unpack import Unpack, device
from engine.cuda.runtime.kinds import DeviceFunction
from engine.cuda.warpgroups import barrier_wait, make_low_products, make_step_products, matrices

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

MOST_TOGETHER = 32
"""The most columns of a block that have products of both planes at the same time: more sums do not fit twice into
registers."""

ONE_PLANE = ("Q2_K", "Q3_K")
"""Formats whose products fit one plane: at most 3 * 15 in Q2_K, and -124 to 128 in Q3_K, whose negatives are int8."""


def _shift(fmt: Unpack) -> int:
    return 8 if fmt.offset else 3


def _make_split(offset: int) -> DeviceFunction:
    """The device function split(q, s): the bytes of both planes of four weights v = (q - offset) * s, which are in
    -4096 .. 4096: v >> 8, signed, and v & 255, unsigned.  Two weights are multiplied at a time, with 2**15 added, so that no
    product borrows from the other."""

    @device
    def split(q, s):
        even, odd = u32(q & u32(0x00FF00FF)), pick_bytes(q, u32(0), u32(0x4341))
        bias = u32(u32(0x80008000) - u32(u32(offset * 0x00010001) * s))
        even, odd = u32(even * s + bias), u32(odd * s + bias)
        return u32(pick_bytes(even, odd, u32(0x7351)) ^ u32(0x80808080)), pick_bytes(even, odd, u32(0x6240))

    return split


@device
def _scale_parts(h, r, g):
    """s >> 3 and s & 7 of a scale s in 0 .. 63, byte g % 4 of word 4 r + g // 4 of the header; two instructions."""
    word, k = h[4 * r + g // 4], u32(0x4440 + g % 4)
    high, low = u32((word >> u32(3)) & u32(0x07070707)), u32(word & u32(0x07070707))
    return pick_bytes(high, u32(0), k), pick_bytes(low, u32(0), k)


@device
def _split_scale(q, s):
    """The bytes of both planes of four weights q * s, with q at most 31: q * (s >> 3) and q * (s & 7)."""
    return u32(q * s[0]), u32(q * s[1])


def _make_negative(offset: int) -> DeviceFunction:
    """The device function negative(q, s): the bytes of four products (offset - q) * s, which are in -128 .. 127."""

    @device
    def negative(q, s):
        even, odd = u32(q & u32(0x00FF00FF)), pick_bytes(q, u32(0), u32(0x4341))
        # The higher of two products borrows only from this bit of the lower one.
        bias = u32(u32(0x00008000) + u32(u32(offset * 0x00010001) * s))
        return pick_bytes(u32(bias - even * s), u32(bias - odd * s), u32(0x6240))

    return negative


@device
def _times(q, s):
    """The bytes of four products q * s."""
    return u32(q * s)


def _make_unsigned_scale(fmt: Unpack) -> DeviceFunction:
    """``Unpack.scale`` as uint32, modulo 2**32."""
    of = fmt.scale

    @device
    def scale(h, r, g):
        return u32(of(h, r, g))

    return scale


def _make_part(fmt: Unpack, one_plane: bool) -> DeviceFunction:
    """The device function part(words, header, j): the lane's four words of the high plane, then those of the low one, or of
    the only plane, for positions 32 j .. 32 j + 31 of a record."""
    block, sixteen = fmt.block, fmt.group == 16
    scale = _make_unsigned_scale(fmt) if fmt.offset or one_plane else _scale_parts
    split = _make_split(fmt.offset) if fmt.offset else _split_scale
    product = _make_negative(fmt.offset) if fmt.offset else _times

    @device
    def part(words, h, j):
        q = block(words, j)
        first, second = (I(2 * j), I(2 * j + 1)) if sixteen else (I(j), I(j))
        a0, b0 = split(q[0], scale(h, 0, first))
        a1, b1 = split(q[1], scale(h, 1, first))
        a2, b2 = split(q[2], scale(h, 0, second))
        a3, b3 = split(q[3], scale(h, 1, second))
        return a0, a1, a2, a3, b0, b1, b2, b3

    @device
    def part_of_one(words, h, j):
        q = block(words, j)
        first, second = (I(2 * j), I(2 * j + 1)) if sixteen else (I(j), I(j))
        return (
            product(q[0], scale(h, 0, first)),
            product(q[1], scale(h, 1, first)),
            product(q[2], scale(h, 0, second)),
            product(q[3], scale(h, 1, second)),
        )

    return part_of_one if one_plane else part


def make_products(fmt: Unpack, columns: int, one_plane: bool) -> DeviceFunction:
    """The device function products(words, header, shared, x, full, parity, dots): the integer sums of a record times a stage
    of activations at shared[x], which is there when the barrier ``full`` ends a phase of this parity."""
    part, shift, negative, n_dots = _make_part(fmt, one_plane), _shift(fmt), one_plane and fmt.offset > 0, columns // 2
    together = columns <= MOST_TOGETHER and not one_plane
    low_later = not together and not one_plane
    planes = 2 if together else 1
    n_sums, n_words = planes * n_dots, 4 * planes
    begin_products, add_products, finish_products = make_step_products(columns, fmt.offset > 0, planes)
    low_products = make_low_products(columns, shift)

    @device
    def unpack_part(words, h, j, low):
        own = part(words, h, j)
        if low_later:
            for k in range(4):
                low[4 * j + k] = own[4 + k]
        return own[:n_words]

    @device
    def add(words, h, j, x, low, sums):
        add_products(unpack_part(words, h, j, low), x, I(j), sums)

    @device
    def products(words, h, shared, x, full, parity, dots):
        low = cuda.local.array(32, np.uint32)
        sums = cuda.local.array(n_sums, np.int32)
        x = matrices(shared, x)
        own = unpack_part(words, h, 0, low)
        barrier_wait(shared, full, parity)
        cuda.syncwarp()
        begin_products(own, x, I(0), sums)
        add(words, h, 1, x, low, sums)
        add(words, h, 2, x, low, sums)
        add(words, h, 3, x, low, sums)
        add(words, h, 4, x, low, sums)
        add(words, h, 5, x, low, sums)
        add(words, h, 6, x, low, sums)
        add(words, h, 7, x, low, sums)
        if low_later:
            low_products(low, x, sums)
        else:
            finish_products(sums)
        for k in range(n_dots):
            if together:
                dots[k] = I(I(sums[k] << shift) + sums[n_dots + k])
            else:
                dots[k] = I(-sums[k]) if negative else sums[k]

    return products


def make_close(mins: bool, single: bool, n: int) -> DeviceFunction:
    """The device function close(scales, f, dots, least, acc): the floating-point part of a unit, for n tiles of columns,
    without a loop; scales are the lane's, of the first tile; acc: the chain, or if every chain is a single unit, the sum."""
    if n > 1:
        first, second, further = make_close(mins, single, n // 2), make_close(mins, single, n - n // 2), n // 2
        middle, end = 4 * further, 4 * n

        @device
        def close(scales, f, dots, least, acc):
            first(scales, f, dots[:middle], least[:middle], acc[:middle])
            second(advance(scales, 8 * further), f, dots[middle:end], least[middle:end], acc[middle:end])

        return close

    @device
    def close_one(scales, f, dots, least, acc):
        da = vector2(scales, 0)
        for k in range(4):
            value = f[k // 2] * f32(dots[k])
            if mins:
                value = fma(f[2 + k // 2], least[k], value)
            if single:
                acc[k] = acc[k] + fma(bits_float(I(da[k % 2])), value, f32(0.0))
            else:
                acc[k] = fma(bits_float(I(da[k % 2])), value, acc[k])

    return close_one
