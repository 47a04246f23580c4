"""The work of a warp on one stage of a wide product: 16 weight rows times up to 128 activation rows, 256 positions at a time.

A stage is in shared memory: the activations of all columns of the block, and a run of records for each warp.  The lane's
weights are unpacked once and stay in registers for all columns, eight per tensor-core product.  In a unit of 256
the integer sums of each sub-block are multiplied by its scale and added up as integers, as in
``engine/cuda/products/chain.py``; the minimums take one more product, of float16: they are at most 63 and the sums of
16 activations at most 2032, so all factors are exact, and so are the sums in float32, which stay below 2**24.

The sums and their order are those of ``engine/cuda/products/matmul.py``.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import (
    advance,
    bits_float,
    float_to_half,
    fma,
    keep4,
    mma_half,
    vector2,
    vector4,
)
from engine.cuda.products.chain import Parts, make_factors, make_parts, make_products
from engine.cuda.products.unpack import Unpack, device, minus, unpack, unsigned_byte
from engine.cuda.runtime.kinds import DeviceFunction
from engine.gguf.quants import FORMATS

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

POSITIONS = 256
"""Positions of a stage: one unit of 256, or several smaller ones."""


@device
def _one(p, i):
    return p[i]


SHARED_LOADS = {1: _one, 2: vector2, 4: vector4}


@dataclass(frozen=True)
class PipelineStage:
    """A stage in words of shared memory, for ``tiles`` tiles of 8 columns: x, then sums (where the format has minimums), then
    scales of all columns, then the records of each warp.

    units: of a stage; sums: words of the sums of a unit for 8 columns; record: words of a record for each of its units.
    """

    tiles: int
    units: int
    sums: int
    record: int

    @property
    def sums_at(self) -> int:
        """The offset of the sums."""
        return 512 * self.tiles

    @property
    def scales_at(self) -> int:
        """The offset of the scales."""
        return self.sums_at + self.sums * self.units * self.tiles

    @property
    def records_at(self) -> int:
        """The offset of the records."""
        return self.scales_at + 8 * self.units * self.tiles

    def words(self, warps: int) -> int:
        """The size of the whole stage."""
        return self.records_at + warps * self.units * self.record


@cache
def stage_of(type_: T, tiles: int) -> PipelineStage:
    """The stage of a format."""
    entry, mins = FORMATS[type_], unpack(type_).mins
    units = POSITIONS // entry.unit
    sums = (64 if units == 1 else 8) if mins else 0
    return PipelineStage(tiles, units, sums, 4 * entry.unit_bytes)


def make_wide(type_: T, stage: PipelineStage, tiles: int, apart: int) -> DeviceFunction:
    """The device function ``wide(stage, records, lane, u, units, length, acc, total)``: process the units of a stage from u,
    up to ``units``, for ``tiles`` tiles of columns.

    acc float32 [4 tiles]: the current chain; total, shared memory: the sums of the chains that have ended, of ``length``
    units each, ``apart`` words from one tile to the next.

    Lane 4 g + t sums rows g and g + 8 for columns 2 t and 2 t + 1 of each tile n: [4 n] .. [4 n + 3] are (g, 2 t), (g, 2 t +
    1), (g + 8, 2 t), (g + 8, 2 t + 1).
    """
    return (_make_256 if FORMATS[type_].unit == POSITIONS else _make_small)(type_, stage, tiles, apart)


def make_end(tiles: int, apart: int) -> DeviceFunction:
    """The device function ``end(acc, total)``: end a chain; total: the thread's sums, ``apart`` words from one tile to the
    next."""

    @device
    def end(acc, total):
        for n in range(tiles):
            t = vector4(total, n * apart)
            sums = cuda.local.array(4, np.float32)
            for k in range(4):
                sums[k] = bits_float(I(t[k])) + acc[4 * n + k]
                acc[4 * n + k] = f32(0.0)
            keep4(total, n * apart, sums[0], sums[1], sums[2], sums[3])

    return end


# --- units of 256 ----------------------------------------------------------------------------------------------


def make_minimums(fmt: Unpack) -> DeviceFunction:
    """The device function ``minimums(h, lane)``: the lane's part of a record's minimums in the layout of ``mma_half``, one
    for each 16 positions."""
    sums, sixteen = fmt.sums, fmt.group == 16

    @device
    def half(word, k):
        return u32(float_to_half(f32(unsigned_byte(word, k))))

    @device
    def pair(word, t):
        if sixteen:
            word = u32(word >> u32(I(16) * (t & I(1))))
            return u32(half(word, 0) | u32(half(word, 1) << u32(16)))
        both = half(u32(word >> u32(I(8) * t)), 0)
        return u32(both | u32(both << u32(16)))

    @device
    def minimums(h, lane):
        t = I(lane & 3)
        low, high = sums(h, 0), sums(h, 1)
        if sixteen:
            first = (low[0], high[0]) if t < 2 else (low[1], high[1])
            second = (low[2], high[2]) if t < 2 else (low[3], high[3])
        else:
            first, second = (low[0], high[0]), (low[1], high[1])
        return pair(first[0], t), pair(first[1], t), pair(second[0], t), pair(second[1], t)

    return minimums


def _make_quarter(parts: Parts, n: int) -> DeviceFunction:
    """The device function ``run(v, x, low, high, h, dots)``: positions 64 v .. 64 v + 63 of a unit, weights ``low`` and
    ``high``, for n tiles, without a loop; x is the lane's, of the first tile; dots int32 [4 n].

    The weights stay in registers for all columns, so that products do not depend on each other.
    """
    if n > 1:
        part, further = _make_quarter(parts, n // 2), n // 2
        middle, end = 4 * further, 4 * n

        @device
        def run(v, x, low, high, h, dots):
            part(v, x, low, high, h, dots[:middle])
            part(v, advance(x, 512 * further), low, high, h, dots[middle:end])

        return run

    multiply = parts.multiply

    @device
    def run_one(v, x, low, high, h, dots):
        multiply(low, high, vector4(x, 128 * v), v, h, 0, dots)

    return run_one


def _make_close(mins: bool, apart: int, n: int) -> DeviceFunction:
    """The device function ``close(sums, scales, m, f, dots, acc)``: the float part of a unit, for n tiles, without a loop;
    sums (in two planes, ``apart``) and scales are the lane's, of the first tile."""
    if n > 1:
        part, further = _make_close(mins, apart, n // 2), n // 2
        middle, end = 4 * further, 4 * n

        @device
        def close(sums, scales, m, f, dots, acc):
            part(sums, scales, m, f, dots[:middle], acc[:middle])
            sums, scales = advance(sums, 32 * further), advance(scales, 8 * further)
            part(sums, scales, m, f, dots[middle:end], acc[middle:end])

        return close

    @device
    def close_one(sums, scales, m, f, dots, acc):
        da = vector2(scales, 0)
        if mins:
            least = mma_half(m[0], m[1], m[2], m[3], sums[0], sums[apart])
        for k in range(4):
            value = f[k // 2] * f32(dots[k])
            if mins:
                value = fma(f[2 + k // 2], least[k], value)
            acc[k] = fma(bits_float(I(da[k % 2])), value, acc[k])

    return close_one


def _make_256(type_: T, stage: PipelineStage, tiles: int, apart: int) -> DeviceFunction:
    parts = make_parts(type_, 8, False, near=False)
    fmt = parts.fmt
    load, header, block, factors = fmt.make_load(SHARED_LOADS), fmt.header, fmt.block, fmt.factors
    n_words, n_dots, mins, offset = fmt.words, 4 * tiles, fmt.mins, fmt.offset * 0x01010101
    minimums, end = make_minimums(fmt), make_end(tiles, apart)
    run = _make_quarter(parts, tiles)
    close = _make_close(mins, 32 * stage.tiles, tiles)
    sums_at, scales_at = stage.sums_at, stage.scales_at

    @device
    def weights(words, j):
        q = block(words, j)
        if offset:
            return minus(q[0], offset), minus(q[1], offset), minus(q[2], offset), minus(q[3], offset)
        return q

    @device
    def wide(stage, records, lane, u, units, length, acc, total):
        words = cuda.local.array(n_words, np.uint32)
        dots = cuda.local.array(n_dots, np.int32)
        load(records, lane, words)
        h = header(words)
        for k in range(n_dots):
            dots[k] = I(0)
        x = advance(stage, I(4 * lane))
        run(0, x, weights(words, 0), weights(words, 1), h, dots)
        run(1, x, weights(words, 2), weights(words, 3), h, dots)
        run(2, x, weights(words, 4), weights(words, 5), h, dots)
        run(3, x, weights(words, 6), weights(words, 7), h, dots)
        m = (u32(0), u32(0), u32(0), u32(0))
        if mins:
            m = minimums(h, lane)
        sums, scales = (
            advance(stage, I(sums_at + lane)),
            advance(stage, I(scales_at + 2 * (lane & 3))),
        )
        close(sums, scales, m, factors(words), dots, acc)
        if (u + 1) % length == 0 or u + 1 == units:
            end(acc, total)

    return wide


# --- smaller units ---------------------------------------------------------------------------------------------


def _make_tiles(dots_of: DeviceFunction, mins: bool, apart: int, n: int) -> DeviceFunction:
    """The device function ``run(x, sums, scales, a, f, acc)``: process n tiles, without a loop; x, sums and scales are the
    lane's, of the first tile; dots_of: ``UnitProducts.dots``; apart: words from the scales of a tile to those of the next."""
    if n > 1:
        half, further = _make_tiles(dots_of, mins, apart, n // 2), n // 2
        middle, end = 4 * further, 4 * n

        @device
        def run(x, sums, scales, a, f, acc):
            half(x, sums, scales, a, f, acc[:middle])
            x, sums, scales = (
                advance(x, 512 * further),
                advance(sums, apart * further),
                advance(scales, apart * further),
            )
            half(x, sums, scales, a, f, acc[middle:end])

        return run

    @device
    def run_one(x, sums, scales, a, f, acc):
        dots = dots_of(a, x, 0, True)
        da = vector2(scales, 0)
        least = (u32(0), u32(0))
        if mins:
            least = vector2(sums, 0)
        for k in range(4):
            value = f[k // 2] * f32(dots[k])
            if mins:
                value = fma(f[2 + k // 2], f32(I(least[k % 2])), value)
            acc[k] = fma(bits_float(I(da[k % 2])), value, acc[k])

    return run_one


def _make_small(type_: T, stage: PipelineStage, tiles: int, apart: int) -> DeviceFunction:
    fmt, entry = unpack(type_), FORMATS[type_]
    load, n_words, unit, parts, per_stage = (
        fmt.make_load(SHARED_LOADS),
        fmt.words,
        entry.unit,
        entry.parts,
        stage.units,
    )
    products, factors = make_products(unit, fmt.block, _one if unit == 16 else vector2, 64), make_factors(fmt, parts)
    quants, lane_words, unit_words = products.quants, products.words, 2 * unit
    run, end = _make_tiles(products.dots, fmt.mins, 8 * per_stage, tiles), make_end(tiles, apart)
    sums_at, scales_at, record = stage.sums_at, stage.scales_at, parts * stage.record

    @device
    def wide(stage, records, lane, u, units, length, acc, total):
        words = cuda.local.array(n_words, np.uint32)
        pair = I(2 * (lane & 3))
        x, sums = advance(stage, I(lane_words * lane)), advance(stage, I(sums_at + pair))
        scales = advance(stage, I(scales_at + pair))
        after = min(I(u + per_stage), units)
        while u < after:
            load(records, lane, words)
            run(x, sums, scales, quants(words, 0), factors(words, 0), acc)
            u = I(u + 1)
            if u % length == 0 or u == units:
                end(acc, total)
            records, x = advance(records, record), advance(x, unit_words)
            sums, scales = advance(sums, 8), advance(scales, 8)

    if parts == 1:
        return wide
    assert parts == 4

    @device
    def one(words, j, x, scales, u, units, length, acc, total):
        """Unit j of a record, the row's unit before u."""
        x, scales = advance(x, j * unit_words), advance(scales, 8 * j)
        run(x, scales, scales, quants(words, j), factors(words, j), acc)
        if u % length == 0 or u == units:
            end(acc, total)

    @device
    def wide_of_parts(stage, records, lane, u, units, length, acc, total):
        """A record has four units, and a row has whole records."""
        words = cuda.local.array(n_words, np.uint32)
        x, scales = advance(stage, I(lane_words * lane)), advance(stage, I(scales_at + 2 * (lane & 3)))
        after = min(I(u + per_stage), units)
        while u < after:
            load(records, lane, words)
            one(words, 0, x, scales, I(u + 1), units, length, acc, total)
            one(words, 1, x, scales, I(u + 2), units, length, acc, total)
            one(words, 2, x, scales, I(u + 3), units, length, acc, total)
            one(words, 3, x, scales, I(u + 4), units, length, acc, total)
            u = I(u + 4)
            records, x, scales = advance(records, record), advance(x, 4 * unit_words), advance(scales, 32)

    return wide_of_parts
