"""Matrix products of many activation rows by warpgroups, on compute capability 9.0: prompts, and steps of many sequences.

Formula: out[t, r] = sum_k weight[r, k] * x[t, k] (+ residual[t, r]).
Shapes: weights as records (``engine/cuda/products/repack.py``), activations in the blocks of
    ``engine/cuda/products/quantize.py``; out float32 [rows, R].  Up to three matrices with the same activations are
    multiplied in one launch, of which the last may have another format.
Who owns what: a block owns the activation rows of a block of activations, 32, 64, 96 or 128, and 64 weight rows for each of
    its warpgroups, a warp 16 of them; lane 4 g + t rows g and g + 8 for columns 2 t and 2 t + 1 of each 8.  Where there were
    fewer blocks than multiprocessors, several blocks share the eight chains of the same rows; ``matmul_chains``, or the
    kernel that needs the results (``Recorder.take_chains``), adds these.
Reduction order: that of ``engine/cuda/products/matmul.py``: chain = fma(da_u, value_u, chain) for the units of a chain in
    rising order, result = ((0 + chain_0) + chain_1) + ... .  The sums inside a unit are of integers, exact in any order.
Bytes moved: the records once per block of activations; the activations once per block's weight rows, and shared chains once
    to memory and back, mostly in the L2 cache.

A block computes as in ``engine/cuda/products/warpgroup_chain.py``.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import (
    advance,
    bits_float,
    lane_from,
    let_next_begin,
    load4,
    pointer,
    wait_for_inputs,
)
from engine.cuda.products.quantize import block_layouts, block_parts
from engine.cuda.products.unpack import device
from engine.cuda.products.warpgroup_chain import START, TARGET, Areas, TileShape, make_multiply, make_pipeline
from engine.cuda.runtime.compiler import F32P, U32P, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.gguf.quants import CHAINS

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

MOST_GROUPS = {4: 4, 8: 3, 12: 2, 16: 2}
"""The most warpgroups of a block, by the tiles of 8 columns, which the registers of a thread allow."""

UNIT_TIMES = {4: (0.24, 0.35), 8: (0.38, 0.48), 12: (0.0, 0.84), 16: (0.0, 1.01)}
"""Microseconds that a block needs for a unit, and more for each of its warpgroups, by the tiles of 8 columns."""
BLOCK_TIMES, SPLIT_TIME = {4: 1.7, 8: 3.5, 12: 4.3, 16: 5.0}, 1.8
"""Microseconds to begin and to write results, and the same of blocks that share chains."""
JOIN_TIME, JOIN_RATE = 1.5, 4.3e6
"""Microseconds for a launch of ``matmul_chains``, and bytes that it and the stores before it move in one."""
FURTHER_TIME = 1.0
"""Microseconds for a second launch.

All these follow from products of Q4_K on an H200 (docs/notebook.md, "Products of 17 to 128 rows"), but for those of 12 tiles,
which lie between the others."""


@lru_cache(4096)
def shape_of(rows: int, tiles: int, units: int, multiprocessors: int, columns: int) -> TileShape:
    """The shape of the blocks for ``rows`` activation rows, ``columns`` tiles of 8 of them in a block, and ``tiles`` tiles of
    16 weight rows of ``units`` units: the one that should take the least time, one block on a multiprocessor at a time."""
    shapes = (
        TileShape(columns, groups, split) for split in (1, 2, 4, 8) for groups in range(MOST_GROUPS[columns], 1, -1)
    )
    return min(shapes, key=lambda shape: _time(shape, rows, tiles, units, multiprocessors))


def _time(shape: TileShape, rows: int, tiles: int, units: int, multiprocessors: int) -> float:
    """Microseconds of a launch with blocks of a shape."""
    unit, further = UNIT_TIMES[shape.tiles]
    x, y, z = shape.grid(rows, tiles)
    own = min(units, CHAINS // shape.split * -(-units // CHAINS))
    block = own * (unit + further * shape.groups) + (BLOCK_TIMES[shape.tiles] if z == 1 else SPLIT_TIME)
    moved = 2 * 4 * chain_floats(shape, rows, tiles)
    return -(-x * y * z // multiprocessors) * block + (JOIN_TIME + moved / JOIN_RATE if z > 1 else 0)


class ProductSize(NamedTuple):
    """The size of a product: the number of tiles of 16 weight rows, and whether each matrix has whole ones."""

    tiles: int
    whole: bool


Launches: TypeAlias = tuple[tuple[int, TileShape], ...]
"""Of each launch the number of tiles, and the shape of its blocks."""


@lru_cache(4096)
def launches_of(rows: int, tiles: int, units: int, multiprocessors: int, columns: int) -> Launches:
    """The launches of a product as in ``shape_of``, one or two.  Where a few tiles would be left for a last block of some
    multiprocessors, the first launch has as many blocks for each multiprocessor, and smaller blocks share what is left."""
    shape = shape_of(rows, tiles, units, multiprocessors, columns)
    one: Launches = ((tiles, shape),)
    if rows > 8 * shape.tiles:
        return one
    found = [(_time(shape, rows, tiles, units, multiprocessors), one)]
    for groups in range(MOST_GROUPS[shape.tiles], 1, -1):
        whole = TileShape(shape.tiles, groups)
        count = tiles // whole.warps // multiprocessors * multiprocessors * whole.warps
        if 0 < count < tiles:
            rest = shape_of(rows, tiles - count, units, multiprocessors, columns)
            time = _time(whole, rows, count, units, multiprocessors) + FURTHER_TIME
            time += _time(rest, rows, tiles - count, units, multiprocessors)
            found.append((time, ((count, whole), (tiles - count, rest))))
    return min(found, key=lambda each: each[0])[1]


def launches_of_all(
    rows: int, sizes: Sequence[ProductSize], units: int, multiprocessors: int, any_layout: bool
) -> list[Launches]:
    """The launches of products with the same activations, whose blocks have the same number of columns: all of the rows, or
    fewer, if that should take less time, because more blocks fill all multiprocessors evenly.

    any_layout: whether the activations can be in any of ``block_layouts``, or only in the first one.
    """

    def of(columns: int) -> list[Launches]:
        given = units, multiprocessors, columns
        return [
            launches_of(rows, size.tiles, *given) if size.whole else ((size.tiles, shape_of(rows, size.tiles, *given)),)
            for size in sizes
        ]

    def time(found: list[Launches]) -> float:
        further = FURTHER_TIME * sum(len(launches) - 1 for launches in found)
        return further + sum(
            _time(shape, rows, tiles, units, multiprocessors) for launches in found for tiles, shape in launches
        )

    layouts = block_layouts(rows)
    return min(map(of, layouts if any_layout else layouts[:1]), key=time)


def _areas(format: str, tiles: int, groups: int, split: bool, last: str = "") -> Areas:
    return Areas(format, TileShape(tiles, groups, CHAINS if split else 1), other=last)


def threads(format: str, tiles: int, groups: int, split: bool, last: str = "") -> int:
    """Threads of a block."""
    return 128 * groups


def shared_bytes(format: str, tiles: int, groups: int, split: bool, last: str = "") -> int:
    """Shared memory of a block."""
    return _areas(format, tiles, groups, split, last).bytes


# --- the results -------------------------------------------------------------------------------------------------


def make_write(tiles: int) -> DeviceFunction:
    """The device function write(values, column, row, there, rows, n_rows, residual, add, out): write a lane's results,
    float32 [4 tiles], of tiles of 8 columns from ``column`` on, the lane's first one; there: whether they exist."""

    @device
    def write(values, column, row, there, rows, n_rows, residual, add, out):
        low, high = there and row < n_rows, there and I(row + 8) < n_rows
        first = np.int64(column) * n_rows + row
        if add != 0:
            # All loads before the first store.
            c, at = column, first
            for n in range(tiles):
                for e in range(4):
                    if I(c + (e & 1)) < rows and (high if e > 1 else low):
                        values[4 * n + e] = values[4 * n + e] + residual[at + ((e & 1) * n_rows + 8 * (e >> 1))]
                c, at = I(c + 8), at + np.int64(8 * n_rows)
        c, at = column, first
        for n in range(tiles):
            for e in range(4):
                if I(c + (e & 1)) < rows and (high if e > 1 else low):
                    out[at + ((e & 1) * n_rows + 8 * (e >> 1))] = values[4 * n + e]
            c, at = I(c + 8), at + np.int64(8 * n_rows)

    return write


def chain_floats(shape: TileShape, rows: int, tiles: int) -> int:
    """The size of the chains that blocks share: [blocks of activations, tiles of 16 weight rows, 8 chains, tiles of 8
    columns, 32 lanes, 4]."""
    return shape.grid(rows, tiles)[0] * tiles * CHAINS * shape.tiles * 128


def most_chain_bytes(rows: int, columns: int, multiprocessors: int) -> int:
    """An estimate of the most bytes of the chains that blocks share in a product of ``rows`` activation rows with ``columns``
    weight rows: those of a matrix with a block of two warpgroups for each multiprocessor."""
    most = min(-(-columns // 16) * 16, 128 * multiprocessors)
    return 4 * CHAINS * -(-rows // 32) * 32 * most


def chains_grid(shape: TileShape, rows: int, tiles: int) -> tuple[int, int]:
    """The grid of ``matmul_chains``, of blocks of 256 threads."""
    return shape.grid(rows, tiles)[0], -(-tiles * shape.tiles // 8)


def make_add_chains(tiles: int) -> DeviceFunction:
    """The device function add_chains(own, n_chains, values): values [4] = the sums of the first ``n_chains`` chains that
    blocks have shared, of which the lane's first one is at own."""

    @device
    def add_chains(own, n_chains, values):
        given = cuda.local.array((CHAINS, 4), np.uint32)
        # All loads are in flight at once, none under a condition: the last chain takes the place of those without units.
        for c in range(CHAINS):
            at = I(128 * tiles * min(I(c), I(n_chains - 1)))
            given[c, 0], given[c, 1], given[c, 2], given[c, 3] = load4(own, at)
        for k in range(4):
            total = f32(0.0)
            for c in range(CHAINS):
                if c < n_chains:
                    total = total + bits_float(I(given[c, k]))
            values[k] = total

    return add_chains


@kernel(
    *(F32P, F32P, F32P, F32P, F32P, i32, i32, i32, i32, i32, i32, i32),
    *(i32, i32),
    threads=256,
    target=TARGET,
)
def matmul_chains(tiles: int) -> KernelCode:
    """The results of ``matmul_warpgroups`` from chains that blocks have shared, with the same outputs, ends and rows;
    n_chains: the number of chains that have units.

    Who owns what: a thread owns the results of a lane for a tile of 8 columns.
    Grid: ``chains_grid``.
    """
    write, add_chains = make_write(1), make_add_chains(tiles)

    @cuda.jit
    def matmul_chains(chains, out0, out1, out2, residual, add, end0, end1, end2, rows0, rows1, rows2, n_chains, rows):
        let_next_begin()
        i = I(I(cuda.blockIdx.y * 8) + (cuda.threadIdx.x >> 5))
        lane, tile = I(cuda.threadIdx.x & 31), I(u32(i) // u32(tiles))
        n = I(i - tile * tiles)
        wait_for_inputs()
        if tile < end2:
            first = I(cuda.blockIdx.x * end2 + tile)
            values = cuda.local.array(4, np.float32)
            own = np.int64(first) * (CHAINS * tiles * 128) + I(128 * n + 4 * lane)
            add_chains(advance(chains, own), n_chains, values)
            out, n_rows = out0, rows0
            if tile >= end1:
                out, n_rows, tile = out2, rows2, I(tile - end1)
            elif tile >= end0:
                out, n_rows, tile = out1, rows1, I(tile - end0)
            column, row = I(I(cuda.blockIdx.x * tiles + n) * 8 + 2 * (lane & 3)), I(16 * tile + (lane >> 2))
            write(values, column, row, True, rows, n_rows, residual, add, out)

    return matmul_chains


# --- the kernel --------------------------------------------------------------------------------------------------


def _make_own(areas: Areas) -> tuple[DeviceFunction, DeviceFunction]:
    """The device functions of the warpgroups of the format of these areas.

    begin(shared, thread, w, first, units): start copying records from the first on; returns their address.
    multiply(shared, thread, x, records, units, length, to, acc): as in ``make_multiply``, with to for chains in memory.
    """
    record, split = areas.record, areas.shape.split > 1
    begin_records, multiply_tile = make_pipeline(areas).begin_records, make_multiply(areas, areas.shape.tiles)

    @device
    def begin(shared, thread, w, first, units):
        records = advance(w, np.int64(first) * record)
        begin_records(shared, thread, records, units)
        return records

    @device
    def multiply(shared, thread, x, records, units, length, to, acc):
        if split:
            multiply_tile(shared, thread, START, x, records, units, length, to, False, x, records, acc)
        else:
            total = advance(shared, I(4 * thread))
            multiply_tile(shared, thread, START, x, records, units, length, total, False, x, records, acc)

    return begin, multiply


@kernel(
    *(U32P, U32P, U32P, F32P, F32P, F32P, F32P, i32, i32, i32, i32, i32, i32, i32),
    *(i32, U32P, i32, i32, F32P),
    threads=threads,
    blocks=1,
    shared=shared_bytes,
    target=TARGET,
)
def matmul_warpgroups(format: str, tiles: int, groups: int, split: bool, last: str = "") -> KernelCode:
    """Up to three matrices times the same activations: matrix m has tiles of 16 rows up to ends[m] (running over all three),
    rows[m] rows, and its own output; ``add``: whether the residual is added.

    last: the format of the third matrix, unless all have the same.  It begins with a warpgroup: ends[1] is a multiple of 4.
    split: whether blocks share chains, ``n_chains`` for each, which they write to ``chains`` (``chain_floats``); otherwise
    n_chains is 8.
    Grid: ``TileShape.grid`` of TileShape(tiles, groups, 8 / n_chains), for ends[last] tiles; 128 * groups threads.
    """
    areas, two = _areas(format, tiles, groups, split, last), last != ""
    warps, columns, n_sums = areas.shape.warps, 8 * tiles, 4 * tiles
    block_words = block_parts(tiles)[2]
    pipeline, write = make_pipeline(areas), make_write(tiles)
    begin, begin_stages = pipeline.begin, pipeline.begin_stages
    begin_own, multiply_own = _make_own(areas)
    begin_last, multiply_last = _make_own(areas.of_other) if two else (begin_own, multiply_own)

    @cuda.jit
    def matmul_warpgroups(
        w0,
        w1,
        w2,
        out0,
        out1,
        out2,
        residual,
        add,
        end0,
        end1,
        end2,
        rows0,
        rows1,
        rows2,
        units,
        x,
        rows,
        n_chains,
        chains,
    ):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.uint32, 128))
        thread = I(cuda.threadIdx.x)
        lane = I(thread & 31)
        begin(shared, thread)
        tile = I(cuda.blockIdx.y * warps + (thread >> 5))
        there = tile < end2
        # Past the last tile it is the last again.
        tile = min(tile, I(end2 - 1))
        length = I((units + CHAINS - 1) // CHAINS)
        chain = I(cuda.blockIdx.z * n_chains)
        first = I(chain * length)
        own = min(I(n_chains * length), I(units - first))
        at = np.int64(I(I(cuda.blockIdx.x * end2 + tile) * CHAINS + chain)) * (128 * tiles) + 4 * lane
        is_last = tile >= end1
        if two:
            # All lanes have the same, but the assembler only knows it of what comes from one lane.  Otherwise it takes more
            # instructions for products, whose operands must be uniform.
            is_last = lane_from(f32(1.0) if is_last else f32(0.0), I(0)) > f32(0.0)
        w, out, n_rows = w0, out0, rows0
        if is_last:
            w, out, n_rows, tile = w2, out2, rows2, I(tile - end1)
        elif tile >= end0:
            w, out, n_rows, tile = w1, out1, rows1, I(tile - end0)
        at_first = I(tile * units + first)
        if two and is_last:
            records = begin_last(shared, thread, w, at_first, own)
        else:
            records = begin_own(shared, thread, w, at_first, own)
        x = advance(x, np.int64(I(cuda.blockIdx.x * units + first)) * block_words)
        wait_for_inputs()
        begin_stages(shared, thread, x, own)
        acc = cuda.local.array(n_sums, np.float32)
        to = advance(chains, at)
        if two and is_last:
            multiply_last(shared, thread, x, records, own, length, to, acc)
        else:
            multiply_own(shared, thread, x, records, own, length, to, acc)
        if not split:
            column, row = I(cuda.blockIdx.x * columns + 2 * (lane & 3)), I(16 * tile + (lane >> 2))
            write(acc, column, row, there, rows, n_rows, residual, add, out)

    return matmul_warpgroups
