"""Products with the experts that the many rows of a prompt have chosen, by warpgroups: on compute capability 9.0.

Formula: ``engine/cpu/products/experts.py``; the products are those of ``engine/cuda/products/matmul.py``.
Shapes: pairs, items and the list of pairs as in ``engine/cuda/products/wide_experts.py``, with up to ``COLUMNS`` pairs in an
    item.  Activations in the layout ``BLOCKS`` of ``engine/cuda/products/quantize.py``, with a block of columns for each
    item, those of its pairs; out float32 [pairs, R].
Who owns what: ``quantize_pairs``: a block owns a unit of an item.  ``matmul_experts_warpgroups``: a *tile* is an item and 128
    weight rows of its expert, which a block multiplies as in ``engine/cuda/products/warpgroup_chain.py``.  Tiles are ordered
    by item and then by rows, first those with more than half of the columns, so that all blocks have about the same work; a
    block owns every n-th of n blocks, one for each multiprocessor.
Reduction order: that of ``engine/cuda/products/matmul.py``.  The order in which pairs are listed does not matter: each
    is a column of its own.
Bytes moved: 4 K in (8 K for a gate) and about 1.2 K out per pair; then the records of an expert once per item and the
    activations of an item once per 128 weight rows, mostly from the L2 cache, because tiles that are multiplied at the same
    time share them.

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

from engine.cuda.intrinsics import (
    ACTIVATIONS,
    advance,
    bits_float,
    float_bits,
    float_to_half,
    lane_xor_int,
    lanes_max,
    lanes_sum,
    let_next_begin,
    load4,
    pointer,
    round_product,
    wait_for_inputs,
)
from engine.cuda.products.experts import NOTHING, Finish, make_finish
from engine.cuda.products.quantize import BLOCK_SCALES_AT, BLOCK_SUMS_AT, BLOCK_TILES, BLOCK_WORDS, unit_scale
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
from engine.cuda.runtime.compiler import F32P, I32P, U16P, U32P, Specialization, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.gguf.quants import CHAINS
from engine.ops.activation import KINDS

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

THREADS, WARPS, COLUMNS = LARGE.threads, LARGE.warps, 8 * LARGE.tiles

HALF = BLOCK_TILES // 2
"""Tiles of 8 columns that are multiplied if an item has no pairs in the others."""

QUANTIZERS = 256
"""Threads of a block of ``quantize_pairs``."""


def geometry(
    format: str, units: int, items: int, tiles: int, multiprocessors: int, finish: Finish = NOTHING
) -> tuple[Specialization, int, int]:
    """(kernel, blocks, threads per block) for ``items`` items and ``tiles`` tiles of 16 weight rows of an expert, of
    ``units`` units."""
    further = (finish,) if finish != NOTHING else ()
    kernel = matmul_experts_warpgroups(format, units <= CHAINS, *further)
    return kernel, min(multiprocessors, items * -(-tiles // WARPS)), THREADS


def activation_words(items: int, units: int) -> int:
    """Words of the activations of all items."""
    return items * units * BLOCK_WORDS


# --- activations of pairs ----------------------------------------------------------------------------------------


@kernel(F32P, F32P, i32, f32_t, f32_t, f32_t, f32_t, I32P, I32P, U32P, U16P, threads=QUANTIZERS, target=TARGET)
def quantize_pairs(source: str, share: int) -> KernelCode:
    """The activations of the pairs of each item to int8, in a block of their own: x = ``source``(gate, up) [rows, K], as in
    ``engine/cuda/products/quantize.py``.

    share: the number of pairs that have a row of x in common: n_used, for down 1; out and sums: the same memory.
    A warp quantizes a column, lane t positions 4 t .. 4 t + 3 of both halves.  Grid: (items, units).

    The fourth word of item i becomes the number of the item of rank i: those with more than half of the columns come first,
    empty ones have no rank.
    """
    plain, gated = source == "plain", source != "plain" and KINDS[source][0]
    of, warps, n_parts = ACTIVATIONS.get(source), QUANTIZERS // 32, QUANTIZERS // 16

    @device
    def pack(x, first, inverse):
        """Four integers as a word, and the sum of those of four lanes."""
        word, total = I(0), I(0)
        for k in range(4):
            value = round_product(x[first + k], inverse)
            word, total = I(word | I(I(value & I(255)) << I(8 * k))), I(total + value)
        total = I(total + lane_xor_int(total, I(1)))
        return word, I(total + lane_xor_int(total, I(2)))

    @device
    def order(items, n_items, item, own, parts, thread):
        """Write the number of an item of ``own`` pairs to the fourth word of the item of its rank."""
        before, full, j = I(0), I(0), thread
        while j < n_items:
            count = items[4 * j + 2]
            if count > 8 * HALF:
                full = I(full + 1)
            if j < item and count > 0 and (count > 8 * HALF) == (own > 8 * HALF):
                before = I(before + 1)
            j = I(j + QUANTIZERS)
        before, full = lanes_sum(before), lanes_sum(full)
        if thread & 31 == 0:
            parts[thread >> 5], parts[warps + (thread >> 5)] = before, full
        cuda.syncthreads()
        if thread == 0:
            rank = I(0)
            for k in range(warps if own > 8 * HALF else 2 * warps):
                rank = I(rank + parts[k])
            items[4 * rank + 3] = item

    @cuda.jit
    def quantize_pairs(gate, up, columns, p0, p1, p2, p3, items, listed, out, sums):
        let_next_begin()
        parts = pointer(cuda.shared.array(n_parts, np.int32))
        x = cuda.local.array(8, np.float32)
        warp, lane = I(cuda.threadIdx.x >> 5), I(cuda.threadIdx.x & 31)
        wait_for_inputs()
        item = advance(items, I(4 * cuda.blockIdx.x))
        pairs, count = advance(listed, item[1]), item[2]
        if count == 0:
            return
        if cuda.blockIdx.y == 0:
            order(items, I(cuda.gridDim.x), I(cuda.blockIdx.x), count, parts, I(cuda.threadIdx.x))
        block = np.int64(I(cuda.blockIdx.x * cuda.gridDim.y + cuda.blockIdx.y)) * BLOCK_WORDS
        out, sums = advance(out, block), advance(sums, 2 * block)
        inside = I(256 * cuda.blockIdx.y + 4 * lane)
        c = warp
        while c < count:
            i = np.int64(I(u32(pairs[c]) // u32(share))) * columns + inside
            words = load4(up, i), load4(up, i + 128)
            others = (load4(gate, i), load4(gate, i + 128)) if gated else words
            bits = I(0)
            for k in range(8):
                x[k] = bits_float(I(words[k // 4][k % 4]))
                if not plain:
                    x[k] = of(bits_float(I(others[k // 4][k % 4])), x[k], p0, p1, p2, p3)
                bits = max(bits, I(float_bits(x[k]) & I(0x7FFFFFFF)))
            amax, inverse = unit_scale(lanes_max(bits))
            tile, column = I(c >> 3), I(4 * (c & 7))
            at = I(I(512 * tile + 32 * (lane >> 2)) + I(column + (lane & 3)))
            sums_at = I(I(2 * (BLOCK_SUMS_AT + 64 * tile + column)) + (lane >> 2))
            for half in range(2):
                word, total = pack(x, 4 * half, inverse)
                out[at + 256 * half] = u32(word)
                if lane & 3 == 0:
                    sums[sums_at + 64 * half] = float_to_half(f32(total))
            if lane == 0:
                out[I(BLOCK_SCALES_AT + c)] = u32(float_bits(amax / f32(127.0)))
            c = I(c + warps)

    return quantize_pairs


# --- products ----------------------------------------------------------------------------------------------------


@device
def settle(items, n_items, n_blocks, rank, block):
    """The tile that comes ``block`` tiles after the first one of the item of a rank: the rank of its item, the item, -1 if
    there is none, and its block of weight rows, of ``n_blocks``."""
    while block >= n_blocks:
        rank, block = I(rank + 1), I(block - n_blocks)
    item = I(-1)
    if rank < n_items:
        item = items[4 * rank + 3]
    return rank, item, block


def _make_write(tiles: int, finish: Finish) -> DeviceFunction:
    """The device function write(acc, out, pairs, count, low, high, n_rows, ends, lane): write the results of a lane, of
    ``tiles`` tiles of columns, to the rows of ``count`` pairs; out: the results of row g; low, high: whether rows g and g + 8
    exist."""
    finishes, apply_finish, n_own = finish != NOTHING, make_finish(finish)[1], 2 * tiles

    @device
    def write(acc, out, pairs, count, low, high, n_rows, ends, lane):
        own = cuda.local.array(n_own, np.int32)
        column = I(2 * (lane & 3))
        # All at once, so that only one of these loads is waited for.
        for t in range(tiles):
            for e in range(2):
                own[2 * t + e] = pairs[min(I(column + (8 * t + e)), I(count - 1))]
        for t in range(tiles):
            for e in range(2):
                # 32 bits are enough for the product, and take fewer instructions than 64.
                to = np.int64(u32(u32(own[2 * t + e]) * u32(n_rows)))
                there = I(column + (8 * t + e)) < count
                for r in range(2):
                    y = acc[4 * t + 2 * r + e]
                    if finishes:
                        factor, bias = ends[r]
                        y = apply_finish(y, factor, bias)
                    if there and (high if r > 0 else low):
                        out[to + 8 * r] = y

    return write


def _areas(format: str) -> Areas:
    """The shared memory of a block: the next tile has started one record of each warp."""
    return Areas(format, LARGE, 2)


def shared_bytes(format: str, single: bool, finish: Finish = NOTHING) -> int:
    """Shared memory of a block."""
    return _areas(format).bytes


@kernel(
    *(U32P, U32P, F32P, F32P, I32P, I32P, F32P, F32P, F32P, F32P, i32, i32, i32, i32, i32, U32P),
    threads=THREADS,
    blocks=1,
    shared=shared_bytes,
    target=TARGET,
)
def matmul_experts_warpgroups(format: str, single: bool, finish: Finish = NOTHING) -> KernelCode:
    """One or two matrices of every expert, w0 and w1 of one format, times the activations x of all items.

    single: whether there are at most ``CHAINS`` units; n_tiles: records of 16 rows that one matrix of an expert touches
    (``experts.tiles``); end: of one matrix, or of both.
    finish: what is done with the products: factors f0 and f1 [n_expert], biases b0 and b1 [n_expert, R].
    Grid and threads: ``geometry``, for ``end``.
    """
    areas = _areas(format)
    record, pipeline, n_sums = areas.record, make_pipeline(areas), 4 * BLOCK_TILES
    begin, begin_records, begin_stages = pipeline.begin, pipeline.begin_records, pipeline.begin_stages
    multiply, write = make_multiply(areas, BLOCK_TILES, True, single), _make_write(BLOCK_TILES, finish)
    multiply_half, write_half = make_multiply(areas, HALF, True, single), _make_write(HALF, finish)
    finishes, load_finish = finish != NOTHING, make_finish(finish)[0]

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
        acc = cuda.local.array(n_sums, np.float32)
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        warp, lane = I(thread >> 5), I(thread & 31)
        begin(shared, thread)
        n_blocks = I((end + WARPS - 1) // WARPS)
        wait_for_inputs()
        rank, item, block = settle(items, n_items, n_blocks, I(0), I(cuda.blockIdx.x))
        at, length, total = START, I((units + CHAINS - 1) // CHAINS), advance(shared, I(4 * thread))
        if item < 0:
            return
        records = records_of(w0, w1, items, n_tiles, end, n_rows, units, item, block, warp)
        own = advance(x, np.int64(I(item * units)) * BLOCK_WORDS)
        begin_records(shared, thread, records, units)
        begin_stages(shared, thread, own, units)
        while item >= 0:
            rank, next_item, next_block = settle(items, n_items, n_blocks, rank, I(block + cuda.gridDim.x))
            more, known = next_item >= 0, max(next_item, I(0))
            next_records = records_of(w0, w1, items, n_tiles, end, n_rows, units, known, next_block, warp)
            next_own = advance(x, np.int64(I(known * units)) * BLOCK_WORDS)
            tile, second = place(items, n_tiles, end, n_rows, item, block, warp)
            out, expert, count = out1 if second else out0, items[4 * item], items[4 * item + 2]
            pairs = advance(listed, items[4 * item + 1])
            # Negative if the expert begins inside a record, whose other rows belong to another expert.
            row = I(16 * tile - (I(expert * n_rows) & 15) + (lane >> 2))
            there = I(block * WARPS + warp) < end
            out = advance(out, row)
            low, high = there and row >= 0 and row < n_rows, there and row >= -8 and I(row + 8) < n_rows
            ends = (f32(1.0), f32(0.0)), (f32(1.0), f32(0.0))
            if finishes:
                factors, biases = f1 if second else f0, b1 if second else b0
                ends = (
                    load_finish(factors, biases, expert, row, n_rows),
                    load_finish(factors, biases, expert, I(row + 8), n_rows),
                )
            if count > 8 * HALF:
                at = multiply(shared, thread, at, own, records, units, length, total, more, next_own, next_records, acc)
                write(acc, out, pairs, count, low, high, n_rows, ends, lane)
            else:
                at = multiply_half(
                    shared, thread, at, own, records, units, length, total, more, next_own, next_records, acc
                )
                write_half(acc, out, pairs, count, low, high, n_rows, ends, lane)
            item, block, records, own = next_item, next_block, next_records, next_own

    return matmul_experts_warpgroups
