"""Activations to int8, in the layout that tensor cores read.

Formula: per unit d = amax / 127, q = round(x * (127 / amax)), ties to even; a unit with amax < 2**-100 counts as zero
    (``engine/cpu/products/quantize.py``).  The kernels differ in the source of x: memory, or an activation;
    ``engine/cuda/rms_norm.py`` has one that normalizes first.
Shapes: x float32 [rows, K]; rows come in groups of 8, the columns of a tensor-core tile.  Row t is column c = t % 8 of
    tile n = t // 8.
    unit 256: q words [tiles, K / 256, 4, 32, 4], d float32 [tiles, K / 256, 8], sums words [tiles, K / 256, 8, 12]:
        word (v, 4 c + i, 2 h + k) of a unit holds positions 64 v + 32 h + 16 k + 4 i .. + 3 of column c;
        sums: 16 int16 sums of 16 positions each, then 8 of 32; in the layout ``WIDE`` the 16 are float16, which holds them
        exactly, and the 8 are absent.
        In a layout of ``BLOCKS``, of blocks of T tiles, everything is in q, words [ceil(tiles / T), K / 256, words of a
        block]: of T tiles q [T, 16, 8, 4], word (n, j, c, i) with positions 16 j + 4 i .. + 3 of column c of tile n; d [T,
        8]; and sums, float16 [T, 2, 8, 8], element (n, h, c, e) the sum of positions 16 (8 h + e) .. + 15.  Tiles past the
        last row are not written, or as zeros by kernels that exchange them.
    unit 32: q words [tiles, K / 32, 32, 2], d float32 [tiles, K / 32, 8], sums int32 [tiles, K / 32, 8].
    unit 64 or 128: q as for 32, d float32 [tiles, K / unit, 8], no sums.
    unit 16: q words [tiles, K / 16, 32], word 4 c + i with positions 4 i .. + 3 of column c; d float32 [tiles, K / 16, 8], no
        sums.
Who owns what: a block of 256 threads owns a run of 256 positions of a row, one per thread, or several runs in sequence: while
    a matrix product before it fills the GPU, only few blocks fit.
Reduction order: none; maxima and integer sums are exact in any order.
Bytes moved: 4 K in (8 K for a gate), about 1.2 K out per row.
"""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import (
    ACTIVATIONS,
    advance,
    bits_float,
    float_bits,
    float_to_half,
    lane_xor_int,
    lanes_max,
    let_next_begin,
    load1,
    pointer,
    round_product,
    wait_for_inputs,
)
from engine.cuda.products.unpack import device
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.compiler import F32P, U16P, U32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.gguf.quants import TINY
from engine.ops.activation import KINDS

RUN = 256
"""Positions of a row that a block quantizes, one per thread."""

WARPS = RUN // 32
"""Warps of a block, each a block of 32 positions."""

ALIGNED = 16
"""Bytes that shared arrays are aligned to, for vector loads."""

NARROW, WIDE = 0, 1
"""Layouts of units of 256: for passes of few rows, and for the tensor-core products of a warp."""

BLOCKS = (4, 8, 12, 16)
"""Layouts of units of 256 for the products of warpgroups: the number of tiles of 8 rows in a block."""

f32 = np.float32
u16 = np.uint16
u32 = np.uint32
I = np.int32  # noqa: E741


def layout_of(unit: int, rows: int) -> int:
    """The layout of activations of ``rows`` rows that no kernel for warpgroups uses."""
    return WIDE if unit == RUN and rows > NARROW_ROWS else NARROW


def block_layouts(rows: int) -> tuple[int, ...]:
    """The layouts of units of 256 for ``rows`` rows that kernels for warpgroups use, widest first: those of as many rows as
    the largest block has, in one block or in several with no more columns together."""
    most = next((tiles for tiles in BLOCKS if rows <= 8 * tiles), BLOCKS[-1])
    if rows > 8 * most:
        return (most,)
    return tuple(tiles for tiles in reversed(BLOCKS) if tiles * -(-rows // (8 * tiles)) == most)


def block_parts(tiles: int) -> tuple[int, int, int]:
    """The words of a unit of a block of ``tiles`` tiles at which the scales begin, behind the integers, at which the sums
    begin, and at which these end."""
    return 512 * tiles, 520 * tiles, 584 * tiles


TILE_SCALES_AT, TILE_SUMS_AT, TILE_WORDS = block_parts(1)
"""The parts of a single tile."""

BLOCK_TILES = BLOCKS[-1]
BLOCK_SCALES_AT, BLOCK_SUMS_AT, BLOCK_WORDS = block_parts(BLOCK_TILES)
"""The parts of the largest blocks."""


@device
def unit_scale(bits):
    """(amax, 127 / amax) of a unit, with the bits of amax given; zeros if it counts as zero."""
    amax = bits_float(bits)
    inverse = f32(127.0) / amax
    if amax < TINY:
        amax = f32(0.0)
        inverse = f32(0.0)
    return amax, inverse


@device
def pack_four(values, first, inverse):
    """Four neighbouring positions of a lane, values[first] and so on, as int8: their word, the sum of the 16 positions of
    the lanes 4 i to 4 i + 3, and that of the next 16, which counts in every second group of four lanes."""
    word, total = I(0), I(0)
    for e in range(4):
        value = round_product(values[first + e], inverse)
        word = I(word | I(I(value & I(255)) << I(8 * e)))
        total = I(total + value)
    total = I(total + lane_xor_int(total, I(1)))
    total = I(total + lane_xor_int(total, I(2)))
    return word, total, lane_xor_int(total, I(4))


@device
def quantize_row(values, c, words):
    """Quantize a unit of 256 with one warp, as row c of a tile.

    values: float32 [8], element 4 h + e the position 128 h + 4 lane + e; words: of the tile, a block of a single one in the
    layouts of ``BLOCKS``, in shared memory.
    """
    lane, bits = I(cuda.threadIdx.x & 31), I(0)
    for k in range(8):
        bits = max(bits, I(float_bits(values[k]) & I(0x7FFFFFFF)))
    amax, inverse = unit_scale(lanes_max(bits))
    for h in range(2):
        word, total, following = pack_four(values, 4 * h, inverse)
        words[I(256 * h + I(lane >> 2) * 32 + I(4 * c) + I(lane & 3))] = u32(word)
        if lane & 7 == 0:
            words[I(TILE_SUMS_AT + 32 * h + I(4 * c) + I(lane >> 3))] = two_sums(total, following)
    if lane == 0:
        words[I(TILE_SCALES_AT + c)] = u32(float_bits(amax / f32(127.0)))


@device
def two_sums(low, high):
    """Two sums as float16, in one word."""
    return u32(float_to_half(f32(low))) | u32(u32(float_to_half(f32(high))) << u32(16))


@device
def write_word(q, at, word):
    """q[at] = word."""
    q[at] = u32(word)


def make_store(unit: int, layout: int = NARROW) -> DeviceFunction:
    """The device function ``store(x, inside, t, run, columns, tops, q, d, sums)``: quantize the positions from 256 run of row
    t, with x the thread's element; all threads of the block call it.

    inside: whether the position exists, the same for a whole warp; tops: shared memory, int32 [8]; sums: as words of 16
    bits; layout: of units of 256; in a layout of ``BLOCKS``, d and sums are not used.
    """
    together = unit // 32  # warps of a unit
    wide, blocks, tiles = layout == WIDE, layout in BLOCKS, max(layout, 1)
    scales_at, sums_at, block_words = block_parts(tiles)

    @device
    def store(x, inside, t, run, columns, tops, q, d, sums):
        thread = I(cuda.threadIdx.x & (RUN - 1))
        warp, lane = I(thread >> 5), I(thread & 31)
        bits = I(float_bits(x) & I(0x7FFFFFFF))
        if unit == 16:
            for k in range(4):
                bits = max(bits, lane_xor_int(bits, I(1 << k)))
        else:
            bits = lanes_max(bits)
        if together > 1:
            tops[warp] = bits
            cuda.syncthreads()
            for k in range(together):
                bits = max(bits, tops[k if unit == RUN else I(warp & -together) + k])
        amax, inverse = unit_scale(bits)
        value = round_product(x, inverse)
        word = I(I(value & I(255)) << I(8 * (lane & 3)))
        word = I(word | lane_xor_int(word, I(1)))
        word = I(word | lane_xor_int(word, I(2)))
        sum16 = value
        for k in range(4):
            sum16 = I(sum16 + lane_xor_int(sum16, I(1 << k)))
        sum32 = I(sum16 + lane_xor_int(sum16, I(16)))
        units, n, column = I(u32(columns) // u32(unit)), I(t >> 3), I(t & 7)
        half, i = I(lane >> 4), I((lane >> 2) & 3)
        if blocks:
            block = I(u32(n) // u32(tiles))
            own = I(n - block * tiles)
            base = I(I(block * units + run) * block_words)
            if lane & 3 == 0:
                write_word(q, base + I(I(own * 16 + 2 * warp + half) * 32 + column * 4 + i), word)
            if lane == 0:
                at = I(I(base + sums_at) + I(own * 64 + (warp >> 2) * 32 + column * 4 + (warp & 3)))
                write_word(q, at, two_sums(sum16, I(sum32 - sum16)))
            if thread == 0:
                write_word(q, base + I(scales_at + own * 8 + column), float_bits(amax / f32(127.0)))
        elif unit == RUN:
            base = I(n * units + run)
            at = I(I(base * 4 + (warp >> 1)) * 128 + (column * 4 + i) * 4 + (warp & 1) * 2 + half)
            if lane & 3 == 0:
                q[at] = u32(word)
            row = I(I(base * 8 + column) * 24)
            if lane & 15 == 0:
                sums[row + 2 * warp + half] = float_to_half(f32(sum16)) if wide else u16(sum16 & I(0xFFFF))
            if not wide and lane == 0:
                sums[row + 16 + warp] = u16(sum32 & I(0xFFFF))
            if thread == 0:
                d[base * 8 + column] = amax / f32(127.0)
        elif unit == 16:
            if inside:
                base = I(n * units + run * (2 * WARPS) + 2 * warp + half)
                if lane & 3 == 0:
                    q[base * 32 + column * 4 + i] = u32(word)
                if lane & 15 == 0:
                    d[base * 8 + column] = amax / f32(127.0)
        elif unit > 32:
            if inside:
                base = I(I(n * units) * together + run * WARPS + warp)
                if lane & 3 == 0:
                    q[base * 64 + (column * 4 + i) * 2 + half] = u32(word)
                if lane == 0 and warp & (together - 1) == 0:
                    d[base // together * 8 + column] = amax / f32(127.0)
        elif inside:
            base = I(n * units + run * WARPS + warp)
            if lane & 3 == 0:
                q[base * 64 + (column * 4 + i) * 2 + half] = u32(word)
            if lane == 0:
                row = I(I(base * 8 + column) * 2)
                sums[row] = u16(sum32 & I(0xFFFF))
                sums[row + 1] = u16((sum32 >> I(16)) & I(0xFFFF))
                d[base * 8 + column] = amax / f32(127.0)

    return store


@kernel(F32P, F32P, i32, f32_t, f32_t, f32_t, f32_t, U32P, F32P, U16P, threads=RUN)
def quantize(unit: int, source: str, layout: int = NARROW) -> KernelCode:
    """x = ``source``(gate, up) to int8: "plain" takes up alone; any other is an activation (``ACTIVATIONS`` of
    ``engine/numerics.py``), with the parameters p0 to p3.

    layout: ``layout_of`` the pass; in other kernels that quantize their result also one of its ``block_layouts``.
    Grid: (rows, ceil(K / 256)), since there may be very many rows: pairs of rows and experts.
    """
    store = make_store(unit, layout)
    plain, gated = source == "plain", source != "plain" and KINDS[source][0]
    of = ACTIVATIONS.get(source)

    @cuda.jit
    def quantize(gate, up, columns, p0, p1, p2, p3, q, d, sums):
        let_next_begin()
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        t, run = I(cuda.blockIdx.x), I(cuda.blockIdx.y)
        i = I(run * RUN + cuda.threadIdx.x)
        inside = i < columns
        gate, up = advance(gate, t * columns), advance(up, t * columns)
        first, second = u32(0), u32(0)
        wait_for_inputs()
        if inside:
            if gated:
                first = load1(gate, i)
            second = load1(up, i)
        x = bits_float(I(second))
        if not plain:
            x = of(bits_float(I(first)), x, p0, p1, p2, p3)
        store(x, inside, t, run, columns, tops, q, d, sums)

    return quantize


def activation_words(unit: int, rows: int, columns: int, layout: int = NARROW) -> tuple[int, int, int]:
    """The sizes of (q, d, sums) in words, for ``rows`` activation rows of ``columns`` elements."""
    tiles, units = -(-rows // 8), columns // unit
    if layout in BLOCKS:
        return -(-tiles // layout) * units * block_parts(layout)[2], 0, 0
    sums = {256: 96, 32: 8}.get(unit, 0)
    return (tiles * columns * 2, tiles * units * 8, tiles * units * sums)
