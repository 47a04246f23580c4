"""Integer sums of products by warpgroups: weights times their scales as two planes of bytes, 2**shift * high + low.

A product q * s needs more than 8 bits.  The tensor cores multiply both planes by the activations, and the sums of the high
plane are shifted.  Everything here is of integers, exact in any order, but for the floating-point part of a unit, ``close``.
"""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import advance, bits_float, fma, pick_bytes, vector2
from engine.cuda.products.unpack import Unpack, device
from engine.cuda.runtime.kinds import DeviceFunction
from engine.cuda.warpgroups import barrier_wait, make_plane_products, make_step_products, matrices

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

MOST_STEPPED = 32
"""The most columns of a block that are multiplied in steps of 32 positions: more sums do not fit twice into registers."""


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


def _make_scale_parts(bits: int) -> DeviceFunction:
    """The device function scale_parts(h, r, g): s >> 3 and s & 7 of a scale s, the lowest ``bits`` bits of byte g % 4 of word
    4 r + g // 4 of the header; two instructions."""
    mask = 0x01010101 * ((1 << bits - 3) - 1)

    @device
    def scale_parts(h, r, g):
        word, k = h[4 * r + g // 4], u32(0x4440 + g % 4)
        high, low = u32((word >> u32(3)) & u32(mask)), u32(word & u32(0x07070707))
        return pick_bytes(high, u32(0), k), pick_bytes(low, u32(0), k)

    return scale_parts


@device
def _split_scale(q, s):
    """The bytes of both planes of four weights q * s, with q at most 31: q * (s >> 3) and q * (s & 7)."""
    return u32(q * s[0]), u32(q * s[1])


def _make_part(fmt: Unpack) -> DeviceFunction:
    """The device function part(words, header, j): the lane's four words of the high plane and of the low one, for positions
    32 j .. 32 j + 31 of a record."""
    block, signed, sixteen = fmt.block, fmt.scale, fmt.group == 16
    split = _make_split(fmt.offset) if fmt.offset else _split_scale

    @device
    def signed_scale(h, r, g):
        return u32(signed(h, r, g))

    scale = signed_scale if fmt.offset else _make_scale_parts(4 if sixteen else 6)

    @device
    def part(words, h, j):
        q = block(words, j)
        first, second = (I(2 * j), I(2 * j + 1)) if sixteen else (I(j), I(j))
        a0, b0 = split(q[0], scale(h, 0, first))
        a1, b1 = split(q[1], scale(h, 1, first))
        a2, b2 = split(q[2], scale(h, 0, second))
        a3, b3 = split(q[3], scale(h, 1, second))
        return (a0, a1, a2, a3), (b0, b1, b2, b3)

    return part


def make_products(fmt: Unpack, columns: int) -> DeviceFunction:
    """The device function products(words, header, shared, x, full, parity, dots): the integer sums of a record times a stage
    of activations at shared[x], which is there when the barrier ``full`` ends a phase of this parity."""
    part, shift, signed, n_dots, n_both = _make_part(fmt), _shift(fmt), fmt.offset > 0, columns // 2, columns
    if columns > MOST_STEPPED:
        plane_products = make_plane_products(columns, shift, signed, 2 if columns > 64 else 1)

        @device
        def unpack_part(words, h, j, planes):
            a, b = part(words, h, j)
            for k in range(4):
                planes[4 * j + k], planes[32 + 4 * j + k] = a[k], b[k]

        @device
        def products(words, h, shared, x, full, parity, dots):
            planes = cuda.local.array(64, np.uint32)
            unpack_part(words, h, 0, planes)
            unpack_part(words, h, 1, planes)
            unpack_part(words, h, 2, planes)
            unpack_part(words, h, 3, planes)
            unpack_part(words, h, 4, planes)
            unpack_part(words, h, 5, planes)
            unpack_part(words, h, 6, planes)
            unpack_part(words, h, 7, planes)
            barrier_wait(shared, full, parity)
            cuda.syncwarp()
            plane_products(planes, shared, x, dots)

        return products
    begin_products, add_products, finish_products = make_step_products(columns, signed)

    @device
    def add(words, h, j, x, both):
        a, b = part(words, h, j)
        add_products(a, b, x, I(j), both)

    @device
    def products_in_steps(words, h, shared, x, full, parity, dots):
        both = cuda.local.array(n_both, np.int32)
        x = matrices(shared, x)
        a, b = part(words, h, 0)
        barrier_wait(shared, full, parity)
        cuda.syncwarp()
        begin_products(a, b, x, I(0), both)
        add(words, h, 1, x, both)
        add(words, h, 2, x, both)
        add(words, h, 3, x, both)
        add(words, h, 4, x, both)
        add(words, h, 5, x, both)
        add(words, h, 6, x, both)
        add(words, h, 7, x, both)
        finish_products(both)
        for k in range(n_dots):
            dots[k] = I(I(both[k] << shift) + both[n_dots + k])

    return products_in_steps


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
