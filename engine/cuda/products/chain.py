"""What a warp does with a run of records: the chain of a row, for 16 rows at once.

A record (16 weight rows, one block of each) is used directly in the registers of the warp, and the load of the next one is
issued as soon as it has been used.  The first load is issued before the warp waits for its inputs, so that weights are in
flight while the preceding kernel ends.  A *deep* chain keeps two records in flight, for matrices of so few rows that a
multiprocessor has no other warps to fill the time.

Where all blocks of a product are resident on the GPU at once and a row is short, a warp has a single unit and does as much
as possible with it before it waits: the record is unpacked, and only activations, products and sums are left after the wait.

The columns of a *gathered* chain are arbitrary activation rows: those that use an expert
(``engine/cuda/products/experts.py``).

The sums and their order are those of ``engine/cuda/products/matmul.py``.
"""

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import (
    advance,
    dot2_high,
    dot2_high_signed,
    dot2_low,
    dot2_low_signed,
    fma,
    hold,
    load1,
    load2,
    load4,
    mma16,
    mma32,
    mma32_onto,
    wait_for_inputs,
)
from engine.cuda.products.columns import make_columns_chain
from engine.cuda.products.unpack import Unpack, device, unpack
from engine.cuda.runtime.kinds import DeviceFunction
from engine.gguf.quants import FORMATS

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

ZERO = (u32(0), u32(0), u32(0), u32(0))

GROUP_BYTES = 2304
"""Bytes of records of a format with units of less than 256 that a warp has in flight."""

GROUP_WORDS = 40
"""The most registers of a lane for these records."""


def make_chain(type_: T, most: int, deep: bool, single: bool, gathered: bool = False) -> DeviceFunction:
    """The device function chain(records, first, last, units, rows, q, d, s, acc): wait for the inputs, then add units
    [first, last) of the rows, whose records begin at ``records``, to acc float32 [4 tiles].

    most: of activation rows: 1, or a multiple of 8, the columns of a tile.  With one row, only every other sum that a
        tensor-core product gives a lane is used.
    single: one unit and one tile of activation rows.  The chain continues in other warps, so acc [4 + 2] holds values, which
        are still to be multiplied by da, and da of columns 2 t and 2 t + 1.
    gathered: instead of ``rows`` the function takes the places that the function of :func:`make_gather` has found.
    """
    if most == 1 and FORMATS[type_].unit == 32:
        return make_columns_chain(type_, gathered, deep)
    if FORMATS[type_].unit < 256:
        return _make_small(type_, most, gathered)
    parts = make_parts(type_, most, single, gathered)
    return _make_single(type_, parts) if single else _make_256(type_, parts, deep)


# --- where activations lie -------------------------------------------------------------------------------------


def n_places(most: int) -> int:
    """Size of ``places`` in a gathered chain: the lane's own column of each tile, its one or two sums of each tile, and the
    number of columns."""
    return -(-most // 8) * (1 + min(most, 2)) + 1


def make_gather(unit: int, most: int) -> DeviceFunction:
    """The device function gather(listed, count, units, places): column j of a gathered chain is activation row listed[j], for
    j < count; places int32 [``n_places``] are those of this lane.  A chain of one row takes that row instead of a list."""
    tiles, columns = -(-most // 8), min(most, 2)
    last = n_places(most) - 1
    tile_words, column_words = 2 * unit, {256: 16, 16: 4}.get(unit, 8)

    @device
    def words(t, units):
        return I(I(I(t >> 3) * units) * tile_words + I(t & 7) * column_words)

    @device
    def sums(t, units):
        return I(I(I(t >> 3) * units) * 8 + I(t & 7))

    @device
    def gather_one(t, count, units, places):
        places[0] = words(t, units) if cuda.threadIdx.x & 31 < 4 else I(-1)
        places[1] = sums(t, units)
        places[2] = I(1)

    @device
    def gather(listed, count, units, places):
        lane = I(cuda.threadIdx.x & 31)
        for n in range(tiles):
            j = I(8 * n + (lane >> 2))
            place = I(-1)
            if j < count:
                place = words(listed[j], units)
            places[n] = place
            for c in range(columns):
                # Columns that do not exist get the sums of the last one, which are never read.
                k = min(I(8 * n + 2 * (lane & 3) + c), I(count - 1))
                places[tiles + columns * n + c] = sums(listed[k], units)
        places[last] = count

    return gather_one if most == 1 else gather


@dataclass(frozen=True)
class _Where:
    """Where a lane finds the activations of a unit, relative to those of the first tile.

    own(lane), pair(lane): the lane and the column that the first tile begins with; tile(rows, n): whether tile n has columns;
    inside(rows, column, n): whether the lane's own column of tile n exists; x(rows, units, n): its words; scale(rows, units,
    n, c) and sums(rows, units, n, c): the scale and the sums (in words of a unit of 256) of the lane's c-th output column.
    """

    own: DeviceFunction
    pair: DeviceFunction
    tile: DeviceFunction
    inside: DeviceFunction
    x: DeviceFunction
    scale: DeviceFunction
    sums: DeviceFunction


def _make_where(unit: int, most: int, gathered: bool) -> _Where:
    tiles, columns = -(-most // 8), min(most, 2)
    tile_words, last = 2 * unit, n_places(most) - 1

    @device
    def own(lane):
        return lane

    @device
    def pair(lane):
        return I(2 * (lane & 3))

    @device
    def tile(rows, n):
        return True

    @device
    def inside(rows, column, n):
        return column < rows - 8 * n

    @device
    def x(rows, units, n):
        return n * units * tile_words

    @device
    def scale(rows, units, n, c):
        return n * units * 8 + c

    @device
    def sums(rows, units, n, c):
        return n * units * 96 + 12 * c

    if not gathered:
        return _Where(own, pair, tile, inside, x, scale, sums)

    @device
    def gathered_own(lane):
        return I(lane & 3)

    @device
    def gathered_pair(lane):
        return I(0)

    @device
    def gathered_tile(places, n):
        return places[last] > 8 * n

    @device
    def gathered_inside(places, column, n):
        return places[n] >= 0

    @device
    def gathered_x(places, units, n):
        return places[n]

    @device
    def gathered_scale(places, units, n, c):
        return places[tiles + columns * n + c]

    @device
    def gathered_sums(places, units, n, c):
        return I(12 * places[tiles + columns * n + c])

    return _Where(
        gathered_own,
        gathered_pair,
        tile if tiles == 1 else gathered_tile,
        gathered_inside,
        gathered_x,
        gathered_scale,
        gathered_sums,
    )


# --- units of 256 ----------------------------------------------------------------------------------------------


def _make_add(mins: bool, single: bool = False) -> DeviceFunction:
    """The device function add(acc, k, da, f, dot, dot8, minimum, minimum8): add a unit to the sums of rows g and g + 8,
    acc[k] and acc[k + 2]; da: the activations' scale; f: ``Unpack.factors``; the others: the unit's integer sums."""

    @device
    def add(acc, k, da, f, dot, dot8, minimum, minimum8):
        value, value8 = f[0] * f32(dot), f[1] * f32(dot8)
        if mins:
            value = fma(f[2], f32(minimum), value)
            value8 = fma(f[3], f32(minimum8), value8)
        if single:
            acc[k], acc[k + 2], acc[k + 4] = value, value8, da
        else:
            acc[k] = fma(da, value, acc[k])
            acc[k + 2] = fma(da, value8, acc[k + 2])

    return add


@dataclass(frozen=True)
class Parts:
    """The building blocks of the chains of a 256-wide format.

    fmt: how a lane reads it; load, n_words: its words of a record, of ``size`` words; multiply(a, b, y, v, h, n, dots):
    positions 64 v .. 64 v + 63 of a unit, blocks a and b times activations y of tile n, to its four dots; load_sums(xs, at):
    the sums of the activations that it needs; close(low, high, f, sums, da, k, c, dots, acc): the float part of a unit for
    column c of the tile whose sums begin at acc[k].
    """

    fmt: Unpack
    load: DeviceFunction
    n_words: int
    size: int
    tiles: int
    columns: int
    where: _Where
    multiply: DeviceFunction
    load_sums: DeviceFunction
    close: DeviceFunction


def make_parts(
    type_: T, most: int, single: bool, gathered: bool = False, read: DeviceFunction = load4, near: bool = True
) -> Parts:
    """The parts of a chain, new functions at every call; read(p, i) loads four words of activations; near: :func:`unpack`."""
    tiles, columns = -(-most // 8), min(most, 2)
    several = columns > 1
    fmt = unpack(type_, near)
    scale, add = fmt.scale, _make_add(fmt.mins, single)
    sixteen, offset, mins, corrected = fmt.group == 16, I(fmt.offset), fmt.mins, fmt.offset > 0
    summed, unscaled = mins or corrected, fmt.group == 0

    @device
    def weighted(a, s, low):
        """Sum of unsigned (minimums) or signed (scales) bytes times int16 sums of activations."""
        if corrected:
            low = dot2_low_signed(s[0], a[0], low)
            low = dot2_high_signed(s[1], a[0], low)
            low = dot2_low_signed(s[2], a[1], low)
            return dot2_high_signed(s[3], a[1], low)
        low = dot2_low(s[0], a[0], low)
        low = dot2_high(s[1], a[0], low)
        low = dot2_low(s[2], a[1], low)
        return dot2_high(s[3], a[1], low)

    @device
    def multiply(a, b, y, v, h, n, dots):
        """Positions 64 v .. 64 v + 63 of a unit: blocks a and b times activations y of tile n, into its four dots."""
        if sixteen:
            parts = (mma16(a[0], a[1], y[0]), mma16(a[2], a[3], y[1]), mma16(b[0], b[1], y[2]), mma16(b[2], b[3], y[3]))
            for k in range(4):
                low, high = scale(h, 0, 4 * v + k), scale(h, 1, 4 * v + k)
                dots[4 * n] = I(dots[4 * n] + I(parts[k][0] * low))
                dots[4 * n + 2] = I(dots[4 * n + 2] + I(parts[k][2] * high))
                if several:
                    dots[4 * n + 1] = I(dots[4 * n + 1] + I(parts[k][1] * low))
                    dots[4 * n + 3] = I(dots[4 * n + 3] + I(parts[k][3] * high))
        elif unscaled:
            total = dots[4 * n], dots[4 * n + 1], dots[4 * n + 2], dots[4 * n + 3]
            total = mma32_onto(a[0], a[1], a[2], a[3], y[0], y[1], total[0], total[1], total[2], total[3])
            total = mma32_onto(b[0], b[1], b[2], b[3], y[2], y[3], total[0], total[1], total[2], total[3])
            for k in range(4):
                dots[4 * n + k] = total[k]
        else:
            pairs = (mma32(a[0], a[1], a[2], a[3], y[0], y[1]), mma32(b[0], b[1], b[2], b[3], y[2], y[3]))
            for k in range(2):
                low, high = scale(h, 0, 2 * v + k), scale(h, 1, 2 * v + k)
                dots[4 * n] = I(dots[4 * n] + I(pairs[k][0] * low))
                dots[4 * n + 2] = I(dots[4 * n + 2] + I(pairs[k][2] * high))
                if several:
                    dots[4 * n + 1] = I(dots[4 * n + 1] + I(pairs[k][1] * low))
                    dots[4 * n + 3] = I(dots[4 * n + 3] + I(pairs[k][3] * high))

    @device
    def load_sums(xs, at):
        """The sums of a unit's activations that the format needs: one for each 16, or for each 32."""
        if sixteen and summed:
            return read(xs, at), read(xs, at + 4)
        if mins:
            return read(xs, at + 8), ZERO
        return ZERO, ZERO

    @device
    def close(low, high, f, sums, da, k, c, dots, acc):
        """The float part of a unit, for column c of the tile whose sums begin at acc[k]."""
        minimum, minimum8 = I(0), I(0)
        if sixteen and summed:
            e, g = sums
            minimum = weighted((low[2], low[3]), g, weighted((low[0], low[1]), e, I(0)))
            minimum8 = weighted((high[2], high[3]), g, weighted((high[0], high[1]), e, I(0)))
        elif mins:
            minimum = weighted((low[0], low[1]), sums[0], I(0))
            minimum8 = weighted((high[0], high[1]), sums[0], I(0))
        dot, dot8 = dots[k + c], dots[k + 2 + c]
        if corrected:
            dot = I(dot - I(offset * minimum))
            dot8 = I(dot8 - I(offset * minimum8))
        add(acc, k + c, da, f, dot, dot8, minimum, minimum8)

    where = _make_where(256, most, gathered)
    size = 4 * FORMATS[type_].block_bytes
    return Parts(fmt, fmt.make_load(), fmt.words, size, tiles, columns, where, multiply, load_sums, close)


def _make_single(type_: T, parts: Parts) -> DeviceFunction:
    fmt, several, n_acc, n_words = parts.fmt, parts.columns > 1, 4 * parts.tiles, parts.n_words
    fill = fmt.make_fill()
    header, block, sums, factors = fmt.header, fmt.block, fmt.sums, fmt.factors
    load, multiply, load_sums, close = parts.load, parts.multiply, parts.load_sums, parts.close

    @device
    def single_unit(p, first, last, units, rows, q, d, s, acc):
        lane = I(cuda.threadIdx.x & 31)
        column, pair = I(lane >> 2), I(2 * (lane & 3)) if several else I(0)
        words = cuda.local.array(n_words, np.uint32)
        load(p, lane, words)
        fill()
        x = advance(q, I(first * 512 + lane * 4))
        xs = advance(s, I((first * 8 + pair) * 12))
        xd = advance(d, I(first * 8 + pair))
        blocks = (
            *(block(words, 0), block(words, 1), block(words, 2), block(words, 3)),
            *(block(words, 4), block(words, 5), block(words, 6), block(words, 7)),
        )
        h, f = header(words), factors(words)
        low, high = sums(h, 0), sums(h, 1)
        hold((blocks, h, f), I(units < 0))
        wait_for_inputs()
        y = (ZERO, ZERO, ZERO, ZERO)
        if column < (rows if several else I(1)):
            y = load4(x, 0), load4(x, 128), load4(x, 256), load4(x, 384)
        own, da = load_sums(xs, 0), xd[0]
        if several:
            other, other_da = load_sums(xs, 12), xd[1]
        dots = cuda.local.array(n_acc, np.int32)
        for n in range(n_acc):
            dots[n] = I(0)
        multiply(blocks[0], blocks[1], y[0], 0, h, 0, dots)
        multiply(blocks[2], blocks[3], y[1], 1, h, 0, dots)
        multiply(blocks[4], blocks[5], y[2], 2, h, 0, dots)
        multiply(blocks[6], blocks[7], y[3], 3, h, 0, dots)
        close(low, high, f, own, da, 0, 0, dots, acc)
        if several:
            close(low, high, f, other, other_da, 0, 1, dots, acc)

    return single_unit


def _make_256(type_: T, parts: Parts, deep: bool) -> DeviceFunction:
    fmt, tiles, columns, n_acc, n_words = parts.fmt, parts.tiles, parts.columns, 4 * parts.tiles, parts.n_words
    header, block, sums, factors, size = fmt.header, fmt.block, fmt.sums, fmt.factors, parts.size
    load, multiply, load_sums, close = parts.load, parts.multiply, parts.load_sums, parts.close
    where, fill = parts.where, fmt.make_fill()
    own, pair_of, has_tile, inside = where.own, where.pair, where.tile, where.inside
    x_at, scale_at, sums_at = where.x, where.scale, where.sums

    @device
    def quarter(v, words, h, x, units, rows, dots):
        """Positions 64 v .. 64 v + 63 of a unit, for every tile.  Called with a constant v: a loop of this length is
        not unrolled, and words[k] with a k known only at run time would be kept in memory instead of registers."""
        column = I((cuda.threadIdx.x & 31) >> 2)
        a = block(words, 2 * v)
        b = block(words, 2 * v + 1)
        for n in range(tiles):
            if has_tile(rows, n):
                y = ZERO
                if inside(rows, column, n):
                    y = load4(x, v * 128 + x_at(rows, units, n))
                multiply(a, b, y, v, h, n, dots)

    @device
    def step(words, lane, x, xs, xd, units, rows, acc):
        """One unit."""
        dots = cuda.local.array(n_acc, np.int32)
        h = header(words)
        for k in range(n_acc):
            dots[k] = I(0)
        quarter(0, words, h, x, units, rows, dots)
        quarter(1, words, h, x, units, rows, dots)
        quarter(2, words, h, x, units, rows, dots)
        quarter(3, words, h, x, units, rows, dots)
        f = factors(words)
        low, high = sums(h, 0), sums(h, 1)
        for n in range(tiles):
            if has_tile(rows, n):
                for c in range(columns):
                    both = load_sums(xs, sums_at(rows, units, n, c))
                    close(low, high, f, both, xd[scale_at(rows, units, n, c)], 4 * n, c, dots, acc)

    @device
    def chain(p, first, last, units, rows, q, d, s, acc):
        lane = I(cuda.threadIdx.x & 31)
        pair = pair_of(lane)
        words = cuda.local.array(n_words, np.uint32)
        if first < last:
            load(p, lane, words)
        fill()
        wait_for_inputs()
        x = advance(q, I(first * 512 + own(lane) * 4))
        xs = advance(s, I((first * 8 + pair) * 12))
        xd = advance(d, I(first * 8 + pair))
        for u in range(first, last):
            step(words, lane, x, xs, xd, units, rows, acc)
            p = advance(p, size)
            if u + 1 < last:
                load(p, lane, words)
            x, xs, xd = advance(x, 512), advance(xs, 96), advance(xd, 8)

    @device
    def deep_chain(p, first, last, units, rows, q, d, s, acc):
        lane = I(cuda.threadIdx.x & 31)
        pair = pair_of(lane)
        even = cuda.local.array(n_words, np.uint32)
        odd = cuda.local.array(n_words, np.uint32)
        if first < last:
            load(p, lane, even)
        p = advance(p, size)
        if first + 1 < last:
            load(p, lane, odd)
        fill()
        wait_for_inputs()
        x = advance(q, I(first * 512 + own(lane) * 4))
        xs = advance(s, I((first * 8 + pair) * 12))
        xd = advance(d, I(first * 8 + pair))
        for u in range(first, last, 2):
            step(even, lane, x, xs, xd, units, rows, acc)
            p = advance(p, size)
            if u + 2 < last:
                load(p, lane, even)
            x, xs, xd = advance(x, 512), advance(xs, 96), advance(xd, 8)
            if u + 1 < last:
                step(odd, lane, x, xs, xd, units, rows, acc)
                p = advance(p, size)
                if u + 3 < last:
                    load(p, lane, odd)
                x, xs, xd = advance(x, 512), advance(xs, 96), advance(xd, 8)

    return deep_chain if deep else chain


# --- units of 32, 64, 128 and 16 ------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitProducts:
    """The tensor-core products of a unit of at most 128 positions.

    words: of q for one activation row of a tile and 16 positions: 1, or 2 for the 32 that one product takes.
    quants(words, j): the operands of unit j of a record; dots(a, x, i, there): their four sums with the activations from
    x[i] on, words of the lane's column, ``apart`` apart for each 32 positions; zero if the column does not exist.
    """

    words: int
    quants: DeviceFunction
    dots: DeviceFunction


def make_products(unit: int, block: DeviceFunction, load: DeviceFunction, apart: int) -> UnitProducts:
    """The products of a format with these units; block: :class:`Unpack`; load(p, i) loads ``UnitProducts.words`` words."""

    @device
    def quants16(words, j):
        return block(words, j)

    @device
    def dots16(a, x, i, there):
        y = u32(0)
        if there:
            y = load(x, i)
        return mma16(a[0], a[1], y)

    @device
    def quants32(words, j):
        return block(words, 0)

    @device
    def dots32(a, x, i, there):
        y0, y1 = u32(0), u32(0)
        if there:
            y0, y1 = load(x, i)
        return mma32(a[0], a[1], a[2], a[3], y0, y1)

    if unit <= 32:
        return UnitProducts(1, quants16, dots16) if unit == 16 else UnitProducts(2, quants32, dots32)

    @device
    def further(a, x, i, there, before):
        y0, y1 = u32(0), u32(0)
        if there:
            y0, y1 = load(x, i)
        return mma32_onto(a[0], a[1], a[2], a[3], y0, y1, before[0], before[1], before[2], before[3])

    @device
    def quants64(words, j):
        return block(words, 0), block(words, 1)

    @device
    def dots64(a, x, i, there):
        return further(a[1], x, i + apart, there, dots32(a[0], x, i, there))

    if unit == 64:
        return UnitProducts(2, quants64, dots64)
    assert unit == 128

    @device
    def quants128(words, j):
        return block(words, 0), block(words, 1), block(words, 2), block(words, 3)

    @device
    def dots128(a, x, i, there):
        before = further(a[2], x, i + 2 * apart, there, dots64(a, x, i, there))
        return further(a[3], x, i + 3 * apart, there, before)

    return UnitProducts(2, quants128, dots128)


def _make_small(type_: T, most: int, gathered: bool) -> DeviceFunction:
    entry = FORMATS[type_]
    tiles, columns, unit, parts = -(-most // 8), min(most, 2), entry.unit, entry.parts
    fmt = unpack(type_)
    load, add, mins, n_words = fmt.make_load(), _make_add(fmt.mins), fmt.mins, fmt.words
    products = make_products(unit, fmt.block, load1 if unit == 16 else load2, 64)
    quants, dots_of, lane_words = products.quants, products.dots, products.words
    factors = make_factors(fmt, parts)
    size, unit_words = 4 * entry.block_bytes, 2 * unit
    group = min(GROUP_BYTES // (4 * size), GROUP_WORDS // n_words)
    n_group = group * n_words
    where = _make_where(unit, most, gathered)
    own_lane, pair_of, has_tile, inside = where.own, where.pair, where.tile, where.inside
    x_at, scale_at = where.x, where.scale

    @device
    def step(words, j, lane, i, x, xs, xd, units, rows, acc):
        """Unit j of a record, the i-th after those of x, xs and xd."""
        a = quants(words, j)
        f = factors(words, j)
        for n in range(tiles):
            if has_tile(rows, n):
                dots = dots_of(a, x, i * unit_words + x_at(rows, units, n), inside(rows, lane >> 2, n))
                for c in range(columns):
                    at = i * 8 + scale_at(rows, units, n, c)
                    minimum = I(0)
                    if mins:
                        minimum = I(xs[at])
                    add(acc, 4 * n + c, xd[at], f, dots[c], dots[2 + c], minimum, minimum)

    @device
    def chain(p, first, last, units, rows, q, d, s, acc):
        lane = I(cuda.threadIdx.x & 31)
        pair = pair_of(lane)
        words = cuda.local.array(n_group, np.uint32)
        for i in range(group):
            if first + i < last:
                load(advance(p, i * size), lane, words[i * n_words : (i + 1) * n_words])
        wait_for_inputs()
        x = advance(q, I(first * unit_words + own_lane(lane) * lane_words))
        xs = advance(s, I(first * 8 + pair))
        xd = advance(d, I(first * 8 + pair))
        for start in range(first, last, group):
            p = advance(p, group * size)
            for i in range(group):
                if start + i < last:
                    own = words[i * n_words : (i + 1) * n_words]
                    step(own, 0, lane, i, x, xs, xd, units, rows, acc)
                    if start + group + i < last:
                        load(advance(p, i * size), lane, own)
            x, xs, xd = advance(x, group * unit_words), advance(xs, group * 8), advance(xd, group * 8)

    if parts == 1:
        return chain
    assert parts == group == 4

    @device
    def record(words, i, p, start, first, last, lane, x, xd, units, rows, acc):
        """The i-th record of a group, whose first unit is ``start``; then load the one that follows it in the next group."""
        u = I(start + 4 * i)
        if u < last:
            if u >= first:
                step(words, 0, lane, 4 * i, x, xd, xd, units, rows, acc)
            if u + 1 >= first and u + 1 < last:
                step(words, 1, lane, 4 * i + 1, x, xd, xd, units, rows, acc)
            if u + 2 >= first and u + 2 < last:
                step(words, 2, lane, 4 * i + 2, x, xd, xd, units, rows, acc)
            if u + 3 >= first and u + 3 < last:
                step(words, 3, lane, 4 * i + 3, x, xd, xd, units, rows, acc)
            if u + 16 < last:
                load(advance(p, i * size), lane, words)

    @device
    def chain_of_parts(p, first, last, units, rows, q, d, s, acc):
        """A record has four units; the first and the last record may also have units of the chains beside this one."""
        lane = I(cuda.threadIdx.x & 31)
        pair = pair_of(lane)
        words = cuda.local.array(n_group, np.uint32)
        before = I(first & 3)
        p, begin = advance(p, I(before * -(size // 4))), I(first - before)
        for i in range(4):
            if begin + 4 * i < last:
                load(advance(p, i * size), lane, words[i * n_words : (i + 1) * n_words])
        wait_for_inputs()
        x = advance(q, I(begin * unit_words + own_lane(lane) * lane_words))
        xd = advance(d, I(begin * 8 + pair))
        for start in range(begin, last, 16):
            p = advance(p, 4 * size)
            record(words[:n_words], 0, p, start, first, last, lane, x, xd, units, rows, acc)
            record(words[n_words : 2 * n_words], 1, p, start, first, last, lane, x, xd, units, rows, acc)
            record(words[2 * n_words : 3 * n_words], 2, p, start, first, last, lane, x, xd, units, rows, acc)
            record(words[3 * n_words :], 3, p, start, first, last, lane, x, xd, units, rows, acc)
            x, xd = advance(x, 16 * unit_words), advance(xd, 128)

    return chain_of_parts


def make_factors(fmt: Unpack, parts: int) -> DeviceFunction:
    """The device function factors(words, j): ``Unpack.factors`` of unit j of a record."""
    own = fmt.factors
    if parts > 1:
        return own

    @device
    def factors(words, j):
        return own(words)

    return factors
