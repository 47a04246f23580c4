"""Products with experts that few rows each have chosen: steps of many answers, on compute capability 9.0.

Formula: ``engine/cpu/products/experts.py``; the products are those of ``engine/cuda/products/matmul.py``.
Shapes: pairs, items and the list of pairs as in ``engine/cuda/products/wide_experts.py``, the items without gaps: [i, 3] is
    the number of items.  Activations are int8 in the layout of ``engine/cuda/products/quantize.py`` for the rows of the pass,
    one row per row or, for down, per pair; out float32 [pairs, R].
Who owns what: a *tile* is an item and 16 weight rows of its expert.  Tiles are ordered by item and then by rows, and a block
    owns a run of them, one block for each multiprocessor; a warp owns every ``WARPS``-th tile that the block has of an item.
    Lane 4 g + t sums rows g and g + 8 for columns 2 t and 2 t + 1 of each 8.
Reduction order: that of ``engine/cuda/products/matmul.py``.  The order in which pairs are listed does not matter: each is a
    column of its own.
Bytes moved: the records of an expert once per item; the activations of an item once per block that has tiles of it, from the
    L2 cache.

    a block:
        find its run of tiles; each warp: start copying the first records of its first tile
        for each item in the run:
            copy the activations of all its pairs to shared memory
            each warp, for each of its tiles, for each stage of 256 positions:
                start copying the records of a later stage, maybe of a later tile or item
                wait for those of this stage, and multiply 8, 16 or 32 columns, as many as there are pairs
            write the results of the pairs

A warp computes as in ``engine/cuda/products/wide_chain.py``.  With few columns this takes less time than the copy of the
records, so the memory limits the speed.  Copies of records depend only on the list of items, and begin before the activations
of their item are there.
"""

from functools import cache

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import (
    advance,
    bits_float,
    copies_commit,
    copies_wait,
    keep4,
    let_next_begin,
    pointer,
    vector4,
    wait_for_inputs,
)
from engine.cuda.products import wide_experts
from engine.cuda.products.experts import NOTHING, Finish, make_finish
from engine.cuda.products.stream_stages import PLACES, SHARED, THREADS, TILES, WARPS, Room, make_gather
from engine.cuda.products.unpack import device
from engine.cuda.products.wide_chain import make_wide
from engine.cuda.products.wide_experts import find
from engine.cuda.runtime.compiler import F32P, I32P, U32P, Specialization, i32, kernel
from engine.cuda.runtime.kinds import KernelCode
from engine.cuda.warpgroups import barrier_expect, barrier_init, barrier_wait, barriers_ready, bulk_copy
from engine.gguf.quants import CHAINS

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

TARGET = (9, 0)
"""The compute capability that has these products."""

LEAST_PAIRS, MOST_PAIRS = 0.5, 16
"""Pairs per expert, on average, from and up to which these products are used.  They were faster than those of ``experts.py``
for 0.5 pairs and more, but not for 0.25, and than those of ``warpgroup_experts.py`` for 2 to 16; more were not measured."""


@cache
def tiles_for(format: str, units: int) -> int:
    """The most tiles of 8 columns that items may have for rows of ``units`` units; 0 if there is no room for any."""
    return next((tiles for tiles in TILES if Room(format, tiles, units).places >= PLACES), 0)


def serves(compute_capability: tuple[int, int], shared_memory: int, pairs: int, n_expert: int) -> bool:
    """Whether a device whose blocks may have ``shared_memory`` bytes has these products, and they are used for so many
    pairs."""
    return (
        compute_capability == TARGET
        and shared_memory >= SHARED
        and LEAST_PAIRS * n_expert <= pairs <= MOST_PAIRS * n_expert
        and n_expert <= wide_experts.MOST_EXPERTS
    )


def geometry(
    format: str,
    share: int,
    tiles: int,
    units: int,
    narrow: bool,
    multiprocessors: int,
    finish: Finish = NOTHING,
) -> tuple[Specialization, int, int]:
    """(kernel, blocks, threads per block)."""
    further = (finish,) if finish != NOTHING else ()
    return matmul_experts_streamed(format, share, tiles, units, narrow, *further), multiprocessors, THREADS


def shared_bytes(
    format: str, share: int, tiles: int, units: int, narrow: bool = False, finish: Finish = NOTHING
) -> int:
    """Shared memory of a block."""
    return Room(format, tiles, units).bytes


@kernel(
    *(U32P, U32P, F32P, F32P, I32P, I32P, F32P, F32P, F32P, F32P, i32, i32, i32, U32P, F32P, U32P),
    threads=THREADS,
    blocks=1,
    shared=shared_bytes,
    target=TARGET,
)
def matmul_experts_streamed(
    format: str, share: int, tiles: int, units: int, narrow: bool = False, finish: Finish = NOTHING
) -> KernelCode:
    """One or two matrices of every expert, w0 and w1 of one format, times the activations of all pairs.

    share: the number of pairs that have an activation row in common: n_used, for down 1; tiles: of 8 pairs, the most of an
    item; units: of a row; narrow: whether activations have the layout ``NARROW``; n_tiles: records of 16 rows that one matrix
    of an expert touches (``experts.tiles``); end: of one matrix, or of both.
    finish: what is done with the products: factors f0 and f1 [n_expert], biases b0 and b1 [n_expert, R].
    Grid and threads: ``geometry``.
    """
    room = Room(format, tiles, units)
    shape, stage, own_words, places = room.shape, room.stage, room.own, room.places
    per_stage, record, apart, columns = shape.units, shape.record, 4 * THREADS, 8 * tiles
    totals_at, pairs_at, inputs_at, records_at = room.totals_at, room.pairs_at, room.inputs_at, room.records_at
    loaded, n_acc, length = room.loaded, 4 * tiles, -(-units // CHAINS)
    two, four = tiles > 1, tiles > 2
    wide1, wide2, wide4 = (make_wide(T[format], shape, min(n, tiles), apart) for n in (1, 2, 4))
    middle = min(8, n_acc)
    gather = make_gather(room, narrow)
    finishes, (load_finish, apply_finish) = finish != NOTHING, make_finish(finish)

    @device
    def place_of(expert, tile, n_tiles, end, n_rows):
        """The tile of 16 rows within the matrix of an expert, and whether this is the second matrix."""
        tile, second = find(n_tiles, end, tile)
        # The expert may have one record less than there may be.
        return min(tile, I(I(I(I(expert * n_rows) & 15) + n_rows - 1) >> 4)), second

    @device
    def records_of(w0, w1, expert, tile, n_tiles, end, n_rows):
        tile, second = place_of(expert, tile, n_tiles, end, n_rows)
        w = w1 if second else w0
        return advance(w, np.int64(I(I(I(expert * n_rows) >> 4) + tile)) * (units * record))

    @cuda.jit
    def matmul_experts_streamed(w0, w1, out0, out1, items, listed, f0, f1, b0, b1, n_tiles, end, n_rows, q, d, s):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.uint32, 128))
        acc = cuda.local.array(n_acc, np.float32)
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        warp, lane = I(thread >> 5), I(thread & 31)
        if lane == 0:
            for k in range(places):
                barrier_init(shared, I(loaded + 2 * I(places * warp + k)), I(1))
            barriers_ready()
        cuda.syncwarp()
        wait_for_inputs()
        all_tiles, block, n_blocks = u32(items[3] * end), u32(cuda.blockIdx.x), u32(cuda.gridDim.x)
        first, last = I(u32(all_tiles * block) // n_blocks), I(u32(all_tiles * u32(block + u32(1))) // n_blocks)
        if first == last:
            return
        rank = I(u32(first) // u32(end))
        origin = I(rank * end)
        stop = min(last, I(origin + end))
        # What is copied next: a stage of a tile of an item.
        own_first = I(places * warp)
        next_rank, next_origin, next_stop, next_tile, next_unit = rank, origin, stop, I(first + warp), I(0)
        while next_tile >= next_stop and next_stop < last:
            next_rank, next_origin, next_tile = I(next_rank + 1), I(next_origin + end), I(next_stop + warp)
            next_stop = min(last, I(next_origin + end))
        next_records = records_of(
            w0, w1, items[4 * next_rank], min(I(next_tile - next_origin), I(end - 1)), n_tiles, end, n_rows
        )
        place, turn, ahead = I(0), I(0), I(0)
        while rank >= 0:
            expert, start, count = items[4 * rank], items[4 * rank + 1], items[4 * rank + 2]
            log = I(0)
            if two and count > 8:
                log = I(2) if four and count > 16 else I(1)
            pairs, inputs = advance(shared, I(pairs_at)), advance(shared, I(inputs_at))
            if thread < columns:
                # Columns that do not exist repeat the last one, and their results are not used.
                pair = listed[start + min(thread, I(count - 1))]
                pairs[thread] = u32(pair)
                inputs[thread] = u32(pair) // u32(share)
            cuda.syncthreads()
            gather(shared, inputs, q, d, s, log, thread)
            copies_commit()
            tile = I(first + warp)
            waiting = True
            while tile < stop or waiting:
                there = tile < stop
                for n in range(tiles):
                    keep4(shared, I(totals_at + 4 * thread + n * apart), f32(0.0), f32(0.0), f32(0.0), f32(0.0))
                for k in range(n_acc):
                    acc[k] = f32(0.0)
                total = advance(shared, I(totals_at + 4 * thread))
                u, x = I(0), shared
                while u < units:
                    # Fill the places that are free, all of them at first.
                    while ahead < places - 1 and next_tile < next_stop:
                        if lane == 0:
                            to = I(place + ahead)
                            to = I(own_first + (I(to - places) if to >= places else to))
                            n_words = I(min(I(per_stage), I(units - next_unit)) * record)
                            barrier_expect(shared, I(loaded + 2 * to), I(4 * n_words))
                            bulk_copy(
                                *(shared, I(records_at + to * own_words), next_records, I(4 * n_words)),
                                *(shared, I(loaded + 2 * to)),
                            )
                        ahead = I(ahead + 1)
                        next_unit, next_records = I(next_unit + per_stage), advance(next_records, own_words)
                        if next_unit >= units:
                            next_unit, next_tile = I(0), I(next_tile + WARPS)
                            while next_tile >= next_stop and next_stop < last:
                                next_rank, next_origin = I(next_rank + 1), I(next_origin + end)
                                next_tile, next_stop = I(next_stop + warp), min(last, I(next_origin + end))
                            if next_tile < next_stop:
                                next_records = records_of(
                                    *(w0, w1, items[4 * next_rank], I(next_tile - next_origin)),
                                    *(n_tiles, end, n_rows),
                                )
                    if waiting:
                        copies_wait()
                        cuda.syncthreads()
                        waiting = False
                    if not there:
                        break
                    own = I(own_first + place)
                    barrier_wait(shared, I(loaded + 2 * own), turn)
                    cuda.syncwarp()
                    mine = advance(shared, I(records_at + own * own_words))
                    if not two or log == 0:
                        wide1(x, mine, lane, u, I(units), I(length), acc[:4], total)
                    elif not four or log == 1:
                        wide2(x, mine, lane, u, I(units), I(length), acc[:middle], total)
                    else:
                        wide4(x, mine, lane, u, I(units), I(length), acc, total)
                    cuda.syncwarp()
                    u, x, place, ahead = I(u + per_stage), advance(x, stage), I(place + 1), I(ahead - 1)
                    if place == places:
                        place, turn = I(0), I(turn ^ 1)
                if there:
                    own_tile, second = place_of(expert, I(tile - origin), n_tiles, end, n_rows)
                    out = out1 if second else out0
                    # Negative if the expert begins inside a record, whose other rows belong to another expert.
                    row = I(16 * own_tile - (I(expert * n_rows) & 15) + (lane >> 2))
                    ends = (f32(1.0), f32(0.0)), (f32(1.0), f32(0.0))
                    if finishes:
                        factors, biases = f1 if second else f0, b1 if second else b0
                        ends = (
                            load_finish(factors, biases, expert, row, n_rows),
                            load_finish(factors, biases, expert, I(row + 8), n_rows),
                        )
                    column = I(2 * (lane & 3))
                    for n in range(tiles):
                        if 8 * n < count:
                            sums = vector4(total, n * apart)
                            for k in range(4):
                                c, r = I(column + 8 * n + (k & 1)), I(row + 8 * (k >> 1))
                                if c < count and r >= 0 and r < n_rows:
                                    y = bits_float(I(sums[k]))
                                    if finishes:
                                        factor, bias = ends[k >> 1]
                                        y = apply_finish(y, factor, bias)
                                    out[np.int64(I(pairs[c])) * n_rows + r] = y
                tile = I(tile + WARPS)
            if stop == last:
                return
            first, rank, origin = stop, I(rank + 1), I(origin + end)
            stop = min(last, I(origin + end))
            # All warps have used the activations of the item.
            cuda.syncthreads()

    return matmul_experts_streamed
