"""Products with the experts that the many rows of a prompt have chosen, by warpgroups: on compute capability 9.0.

Formula: ``engine/cpu/products/experts.py``; the products are those of ``engine/cuda/products/matmul.py``.
Shapes: pairs, items and the list of pairs as in ``engine/cuda/products/wide_experts.py``, with up to ``COLUMNS`` pairs in an
    item.  Activations in the layout ``BLOCKS`` of ``engine/cuda/products/quantize.py``, one row per row or, for down, per
    pair; gathered: the same with a block for each item, of the activations of its pairs; out float32 [pairs, R].
Who owns what: ``gather_pairs``: a block owns a unit of an item.  ``matmul_experts_warpgroups``: a *tile* is an item and 128
    weight rows of its expert, which a block multiplies as in ``engine/cuda/products/warpgroup_chain.py``.  Tiles are ordered
    by item and then by rows, without those of empty items; a block owns every n-th of n blocks, one for each multiprocessor.
Reduction order: that of ``engine/cuda/products/matmul.py``.  The order in which pairs are listed does not matter: each
    is a column of its own.
Bytes moved: gathering, about 2.4 K per pair; then the records of an expert once per item and the activations of an item once
    per 128 weight rows, both mostly from the L2 cache, because tiles that are multiplied at the same time share them.

    a block:
        find its first tile, start copying its first stage and records
        for each of its tiles:
            find the next tile
            multiply all columns, or the first half if there are no more pairs; copies of the next tile begin meanwhile
            write the results of the pairs

Rows of an expert are few units long, so a block that began anew for each tile would wait for its first copies as long as it
computes.
"""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import advance, bits_float, let_next_begin, load4, pointer, vector4, wait_for_inputs
from engine.cuda.products.experts import NOTHING, Finish, make_finish
from engine.cuda.products.quantize import BLOCK_SCALES_AT, BLOCK_SUMS_AT, BLOCK_TILES, BLOCK_WORDS, block_parts
from engine.cuda.products.unpack import device
from engine.cuda.products.warpgroup_chain import (
    LARGE,
    START,
    TARGET,
    Areas,
    make_multiply,
    make_pipeline,
)
from engine.cuda.products.wide_experts import find
from engine.cuda.runtime.compiler import F32P, I32P, U32P, Specialization, i32, kernel
from engine.cuda.runtime.kinds import KernelCode
from engine.gguf.quants import CHAINS

u32 = np.uint32
I = np.int32  # noqa: E741

THREADS, WARPS, COLUMNS = LARGE.threads, LARGE.warps, 8 * LARGE.tiles

HALF = BLOCK_TILES // 2
"""Tiles of 8 columns that are multiplied if an item has no pairs in the others."""

COPIERS = 256
"""Threads of a block of ``gather_pairs``."""


def geometry(
    format: str, items: int, tiles: int, multiprocessors: int, finish: Finish = NOTHING
) -> tuple[Specialization, int, int]:
    """(kernel, blocks, threads per block) for ``items`` items and ``tiles`` tiles of 16 weight rows of an expert."""
    further = (finish,) if finish != NOTHING else ()
    return matmul_experts_warpgroups(format, *further), min(multiprocessors, items * -(-tiles // WARPS)), THREADS


def gathered_words(items: int, units: int) -> int:
    """Words of the gathered activations."""
    return items * units * BLOCK_WORDS


# --- activations of pairs ----------------------------------------------------------------------------------------


@kernel(U32P, I32P, I32P, i32, U32P, threads=COPIERS, target=TARGET)
def gather_pairs(share: int, tiles: int = BLOCK_TILES) -> KernelCode:
    """Copy the activations of the pairs of each item to a block of their own.

    share: the number of pairs that have an activation row in common: n_used, for down 1; tiles: the layout of the rows, one
    of ``BLOCKS``.  Grid: (items, units).
    """
    scales_at, sums_at, block_words = block_parts(tiles)
    columns = 8 * tiles
    pieces, sum_pieces = 128 * BLOCK_TILES, 16 * BLOCK_TILES  # of 16 bytes

    @device
    def copy(x, out, t, c, units, from_at, at, row_words, part):
        """Copy a piece: ``part`` of row t, to column c."""
        block, tile = I(u32(t) // u32(columns)), I((t >> 3) & (tiles - 1))
        from_ = advance(x, np.int64(I(block * units)) * block_words)
        words = load4(from_, I(I(from_at + row_words * tile) + I(32 * part + 4 * (t & 7))))
        to = advance(out, I(I(at + row_words * (c >> 3)) + I(32 * part + 4 * (c & 7))))
        for k in range(4):
            to[k] = words[k]

    @cuda.jit
    def gather_pairs(x, items, listed, units, out):
        let_next_begin()
        rows = pointer(cuda.shared.array(COLUMNS, np.int32))
        thread, u = I(cuda.threadIdx.x), I(cuda.blockIdx.y)
        wait_for_inputs()
        item = advance(items, I(4 * cuda.blockIdx.x))
        start, count = item[1], item[2]
        if count == 0:
            return
        if thread < count:
            rows[thread] = I(u32(listed[start + thread]) // u32(share))
        cuda.syncthreads()
        x = advance(x, np.int64(u) * block_words)
        out = advance(out, np.int64(I(cuda.blockIdx.x * units + u)) * BLOCK_WORDS)
        for k in range(pieces // COPIERS):
            # Consecutive threads write consecutive pieces: of eight columns, of each position.
            i = I(thread + k * COPIERS)
            c = I(8 * (i >> 7) + (i & 7))
            if c < count:
                copy(x, out, rows[c], c, units, I(0), I(0), I(512), I((i >> 3) & 15))
        for k in range(sum_pieces // COPIERS):
            i = I(thread + k * COPIERS)
            c = I(8 * (i >> 4) + (i & 7))
            if c < count:
                copy(x, out, rows[c], c, units, I(sums_at), I(BLOCK_SUMS_AT), I(64), I((i >> 3) & 1))
        if thread < count:
            t = rows[thread]
            from_ = advance(x, np.int64(I(I(u32(t) // u32(columns)) * units)) * block_words)
            out[I(BLOCK_SCALES_AT + thread)] = from_[I(scales_at + (t & (columns - 1)))]

    return gather_pairs


# --- products ----------------------------------------------------------------------------------------------------


@device
def settle(items, n_items, n_blocks, item, block):
    """The tile that comes ``block`` tiles after the first one of an item, which may be empty: its item, ``n_items`` if there
    is none, and its block of weight rows, of ``n_blocks``."""
    while item < n_items:
        if items[4 * item + 2] != 0:
            if block < n_blocks:
                return item, block
            block = I(block - n_blocks)
        item = I(item + 1)
    return item, block


def shared_bytes(format: str, finish: Finish = NOTHING) -> int:
    """Shared memory of a block."""
    return Areas(format, LARGE).bytes


@kernel(
    *(U32P, U32P, F32P, F32P, I32P, I32P, F32P, F32P, F32P, F32P, i32, i32, i32, i32, i32, U32P),
    threads=THREADS,
    blocks=1,
    shared=shared_bytes,
    target=TARGET,
)
def matmul_experts_warpgroups(format: str, finish: Finish = NOTHING) -> KernelCode:
    """One or two matrices of every expert, w0 and w1 of one format, times the gathered activations x of all pairs.

    n_tiles: records of 16 rows that one matrix of an expert touches (``experts.tiles``); end: of one matrix, or of both.
    finish: what is done with the products: factors f0 and f1 [n_expert], biases b0 and b1 [n_expert, R].
    Grid and threads: ``geometry``, for ``end``.
    """
    areas = Areas(format, LARGE)
    record, apart, pipeline = areas.record, areas.apart, make_pipeline(areas)
    begin, begin_records, begin_stages = pipeline.begin, pipeline.begin_records, pipeline.begin_stages
    multiply, multiply_half = make_multiply(areas, BLOCK_TILES, True), make_multiply(areas, HALF, True)
    finishes, (load_finish, apply_finish) = finish != NOTHING, make_finish(finish)

    @device
    def place(items, n_tiles, end, n_rows, item, block, warp):
        """The warp's tile of 16 rows within the matrix of an item's expert, and whether this is the second one."""
        tile, second = find(n_tiles, end, I(block * WARPS + warp))
        # The expert may have one record less than there may be.
        return min(tile, I(I(I(I(items[4 * item] * n_rows) & 15) + n_rows - 1) >> 4)), second

    @device
    def records_of(w0, w1, items, n_tiles, end, n_rows, units, item, block, warp):
        tile, second = place(items, n_tiles, end, n_rows, item, block, warp)
        w = w1 if second else w0
        return advance(w, np.int64(I(I(I(I(items[4 * item] * n_rows) >> 4) + tile) * units)) * record)

    @cuda.jit
    def matmul_experts_warpgroups(
        w0, w1, out0, out1, items, listed, f0, f1, b0, b1, n_items, n_tiles, end, n_rows, units, x
    ):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.uint32, 128))
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        warp, lane = I(thread >> 5), I(thread & 31)
        begin(shared, thread)
        n_blocks = I((end + WARPS - 1) // WARPS)
        total = advance(shared, I(4 * thread))
        wait_for_inputs()
        item, block = settle(items, n_items, n_blocks, I(0), I(cuda.blockIdx.x))
        at, length = START, I((units + CHAINS - 1) // CHAINS)
        if item >= n_items:
            return
        records = records_of(w0, w1, items, n_tiles, end, n_rows, units, item, block, warp)
        own = advance(x, np.int64(I(item * units)) * BLOCK_WORDS)
        begin_records(shared, thread, records, units)
        begin_stages(shared, thread, own, units)
        while item < n_items:
            next_item, next_block = settle(items, n_items, n_blocks, item, I(block + cuda.gridDim.x))
            more = next_item < n_items
            known = min(next_item, I(n_items - 1))
            next_records = records_of(w0, w1, items, n_tiles, end, n_rows, units, known, next_block, warp)
            next_own = advance(x, np.int64(I(known * units)) * BLOCK_WORDS)
            count = items[4 * item + 2]
            if count > 8 * HALF:
                at = multiply(shared, thread, at, own, records, units, length, total, more, next_own, next_records)
            else:
                at = multiply_half(shared, thread, at, own, records, units, length, total, more, next_own, next_records)
            tile, second = place(items, n_tiles, end, n_rows, item, block, warp)
            out, expert = out1 if second else out0, items[4 * item]
            # Negative if the expert begins inside a record, whose other rows belong to another expert.
            row = I(16 * tile - (I(expert * n_rows) & 15) + (lane >> 2))
            ends = (np.float32(1.0), np.float32(0.0)), (np.float32(1.0), np.float32(0.0))
            if finishes:
                factors, biases = f1 if second else f0, b1 if second else b0
                ends = (
                    load_finish(factors, biases, expert, row, n_rows),
                    load_finish(factors, biases, expert, I(row + 8), n_rows),
                )
            there = I(block * WARPS + warp) < end
            low, high = there and row >= 0 and row < n_rows, there and row >= -8 and I(row + 8) < n_rows
            pairs, column = advance(listed, items[4 * item + 1]), I(2 * (lane & 3))
            for t in range(BLOCK_TILES):
                if column < count:
                    sums = vector4(total, t * apart)
                    for e in range(2):
                        c = I(column + e)
                        if c < count:
                            to = np.int64(pairs[c]) * n_rows + row
                            for r in range(2):
                                if high if r > 0 else low:
                                    y = bits_float(I(sums[2 * r + e]))
                                    if finishes:
                                        factor, bias = ends[r]
                                        y = apply_finish(y, factor, bias)
                                    out[to + 8 * r] = y
                column = I(column + 8)
            item, block, records, own = next_item, next_block, next_records, next_own

    return matmul_experts_warpgroups
