"""Products with the experts that the many rows of a prompt have chosen: pairs sorted by expert, one product per expert.

Formula: ``engine/cpu/products/experts.py``; the products are those of ``engine/cuda/products/matmul.py``.
Shapes: pairs, ids and the matrices of all experts as in ``engine/cuda/products/experts.py``; listed int32 [pairs]: the
    pairs of the first expert, those of the second, and so on; items int32 [``n_items``, 4]: expert, where its pairs
    begin in the list, the number of them, at most the columns of a block (0: the item is empty), and -1.
    Activations are int8 in the layout of ``engine/cuda/products/quantize.py`` for a wide pass, one row per row or, for
    down, per pair; out float32 [pairs, R].
Who owns what: ``sort_pairs``: a block owns an expert, and reads the ids of all pairs; a thread lists the pairs that it has
    found, after those of the threads before it.  ``matmul_experts_wide``: a block owns the pairs of an item and 128 weight
    rows of its expert (64 if there is little shared memory), a warp 16 of the rows, as in
    ``engine/cuda/products/wide_matmul.py``; the columns of a stage are gathered.
Reduction order: that of ``engine/cuda/products/matmul.py``.  The order in which pairs are listed does not matter: each
    is a column of its own.
Bytes moved: the ids twice per expert, from the L2 cache; the records of an expert once per item, but neighbouring items read
    the same, so from memory once; the activations of an item once per 128 weight rows, from the L2 cache.

Expert e has its items from place start / columns + e on, start being where its pairs begin.  So it need not know how many
items others have: floor(a) + ceil(b) - 1 is at most floor(a + b), and the next expert's first place is free.
"""

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import (
    advance,
    bits_float,
    copies_commit,
    copies_wait,
    copy1,
    copy4,
    keep4,
    lane_xor_int,
    let_next_begin,
    pointer,
    vector4,
    wait_for_inputs,
)
from engine.cuda.products.experts import NOTHING, Finish, make_finish
from engine.cuda.products.unpack import device
from engine.cuda.products.wide_chain import PipelineStage, make_wide, stage_of
from engine.cuda.products.wide_matmul import SMALL, STAGES, BlockShape, make_fetch_records
from engine.cuda.runtime.compiler import F32P, I32P, U32P, Specialization, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.gguf.quants import CHAINS

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

TILES = SMALL.tiles
"""Tiles of 8 pairs of a block, large or small."""
COLUMNS = 8 * TILES
LARGE = BlockShape(TILES, 8)
GROUP = 4
"""Tiles of pairs that a warp multiplies at a time: the sums of more would not fit if a multiprocessor is to hold two blocks,
and an item of few pairs has fewer groups."""

SHARED = 113 << 10
"""Shared memory per block if a multiprocessor is to hold two (compute capability 9.0)."""

SORTERS = 512
"""Threads of a block of ``sort_pairs``."""
MOST_EXPERTS = 1024
"""Experts of which a dense list of items can be made."""
AT_ONCE = 8
"""Ids that a thread of ``sort_pairs`` has in flight."""


# --- pairs by expert -------------------------------------------------------------------------------------------


def n_items(pairs: int, n_expert: int, columns: int = COLUMNS) -> int:
    """The number of places for items of ``columns`` pairs: each expert has one more than its pairs need, so some stay
    empty."""
    return pairs // columns + n_expert


@kernel(I32P, i32, I32P, I32P, threads=SORTERS)
def sort_pairs(columns: int = COLUMNS, dense: bool = False) -> KernelCode:
    """List pairs by expert, and items of up to ``columns`` of them; dense: items have no gaps, and the number of all items
    instead of -1.  Grid: n_expert blocks of ``SORTERS``."""
    warps, round_ = SORTERS // 32, SORTERS * AT_ONCE
    n_all = MOST_EXPERTS if dense else 1

    @cuda.jit
    def sort_pairs(ids, pairs, listed, items):
        let_next_begin()
        befores = pointer(cuda.shared.array(warps, np.int32))
        owns = pointer(cuda.shared.array(warps, np.int32))
        counts = cuda.shared.array(n_all, np.int32)
        numbers = cuda.shared.array(2, np.int32)
        thread, expert, n_expert = I(cuda.threadIdx.x), I(cuda.blockIdx.x), I(cuda.gridDim.x)
        warp, lane = I(thread >> 5), I(thread & 31)
        if dense:
            i = thread
            while i < n_expert:
                counts[i] = I(0)
                i = I(i + SORTERS)
            if thread < 2:
                numbers[thread] = I(0)
            cuda.syncthreads()
        wait_for_inputs()
        before, own = I(0), I(0)
        i = thread
        while i < pairs:
            for k in range(AT_ONCE):
                at = I(i + k * SORTERS)
                other = ids[min(at, I(pairs - 1))]
                if at < pairs:
                    before = I(before + (I(1) if other < expert else I(0)))
                    own = I(own + (I(1) if other == expert else I(0)))
                    if dense:
                        cuda.atomic.add(counts, other, I(1))
            i = I(i + round_)
        # place: where the thread's own pairs go, after those of all threads before it.
        place, total = I(0), own
        for k in range(5):
            others = lane_xor_int(total, I(1 << k))
            if lane & (1 << k):
                place = I(place + others)
            total = I(total + others)
            before = I(before + lane_xor_int(before, I(1 << k)))
        if lane == 0:
            befores[warp] = before
            owns[warp] = total
        cuda.syncthreads()
        start, count = I(0), I(0)
        for k in range(warps):
            start = I(start + befores[k])
            if k < warp:
                place = I(place + owns[k])
            count = I(count + owns[k])
        place = I(place + start)
        i = thread
        while i < pairs:
            for k in range(AT_ONCE):
                at = I(i + k * SORTERS)
                other = ids[min(at, I(pairs - 1))]
                if at < pairs and other == expert:
                    listed[place] = at
                    place = I(place + 1)
            i = I(i + round_)
        first = I(I(u32(start) // u32(columns)) + expert)
        n, number = I(I(I(u32(start + count) // u32(columns)) + expert) - first + 1), I(-1)
        if dense:
            # The syncthreads above comes after all counts.
            i = thread
            while i < n_expert:
                n_own = I(u32(counts[i] + columns - 1) // u32(columns))
                if i < expert:
                    cuda.atomic.add(numbers, 0, n_own)
                cuda.atomic.add(numbers, 1, n_own)
                i = I(i + SORTERS)
            cuda.syncthreads()
            first, number, n = numbers[0], numbers[1], I(u32(count + columns - 1) // u32(columns))
        j = thread
        while j < n:
            item = advance(items, I(4 * I(first + j)))
            item[0] = expert
            item[1] = I(start + j * columns)
            item[2] = max(I(0), min(I(columns), I(count - j * columns)))
            item[3] = number
            j = I(j + SORTERS)

    return sort_pairs


# --- products --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group(PipelineStage):
    """A stage as seen by the tiles from ``first`` on, beginning with their words of x."""

    first: int

    @property
    def sums_at(self) -> int:
        """The offset of the sums of these tiles."""
        return self.stage.sums_at + (-512 + (32 if self.units == 1 else 64)) * self.first

    @property
    def scales_at(self) -> int:
        """The offset of the scales of these tiles."""
        return self.stage.scales_at + (-512 + 8 * self.units) * self.first

    @property
    def stage(self) -> PipelineStage:
        """The whole stage."""
        return PipelineStage(self.tiles, self.units, self.sums, self.record)


def block_of(small: bool) -> BlockShape:
    """The shape of the blocks: ``SMALL`` or not."""
    return SMALL if small else LARGE


def threads(format: str, share: int, small: bool = False, finish: Finish = NOTHING) -> int:
    """Threads of a block."""
    return block_of(small).threads


def shared_bytes(format: str, share: int, small: bool = False, finish: Finish = NOTHING) -> int:
    """Shared memory of a block: stages, the sums of chains that have ended, and the pairs and activation rows of columns."""
    block = block_of(small)
    stages = STAGES * stage_of(T[format], TILES).words(block.row_tiles)
    return 4 * (stages + 4 * TILES * block.threads + 2 * COLUMNS)


def resident(format: str, share: int, small: bool = False, finish: Finish = NOTHING) -> int:
    """Blocks per multiprocessor; IQ4_XS needs more registers than two blocks would leave it."""
    return 2 if shared_bytes(format, share) <= SHARED and format != "IQ4_XS" and not small else 1


def geometry(
    format: str, share: int, items: int, tiles: int, most: int, finish: Finish = NOTHING
) -> tuple[Specialization, tuple[int, int], int]:
    """(kernel, grid, threads per block) for ``items`` items and ``tiles`` tiles of 16 weight rows of an expert, if a block
    may have ``most`` bytes of shared memory."""
    small = shared_bytes(format, share) > most
    block = block_of(small)
    grid = items, -(-tiles // block.row_tiles)
    further = (small, finish) if finish != NOTHING else (True,) if small else ()
    return matmul_experts_wide(format, share, *further), grid, block.threads


def make_gather(shape: PipelineStage, threads: int) -> DeviceFunction:
    """The device function ``gather(stage, inputs, q, d, s, u, units, thread)``: start copying the units from u of the
    activation rows ``inputs``, shared memory, one per column of the stage, into it."""
    large, has_sums = shape.units == 1, shape.sums > 0
    sums_at, scales_at = shape.sums_at, shape.scales_at
    rounds, step, plane = TILES * 128 // threads, threads // 128, 32 * TILES
    sum_rounds, scale_rounds = -(-2 * COLUMNS // threads), -(-COLUMNS // threads)
    # Units of 16 have a vector of a column each, others two for each 32 positions.
    sixteen, per_32 = shape.units == 16, max(1, 8 // shape.units)
    piece, pair = (3, 0) if sixteen else (4, 1)
    piece_words, column_words = (32, 4) if sixteen else (64, 8)
    tile_scales, unit_words = 8 * shape.units, 512 // shape.units
    scale_shift, all_scales = tile_scales.bit_length() - 1, tile_scales * TILES
    small_rounds, small_step, full = -(-all_scales // threads), threads // tile_scales, all_scales % threads == 0

    @device
    def gather_large(stage, inputs, q, d, s, u, units, thread):
        part = I(thread & 127)
        x, to = advance(q, I(I(part >> 5) * 128 + I(part & 3) * 4)), advance(stage, I(4 * thread))
        column = I(I(thread >> 7) * 8 + (I(part >> 2) & I(7)))
        for k in range(rounds):
            t = I(inputs[column + 8 * step * k])
            from_ = I(I(I(t >> 3) * units + u) * 512 + I(t & 7) * 16)
            copy4(to, k * (4 * threads), x, np.int64(from_), I(1))
        if has_sums:
            # Two vectors of each column, in two planes.
            for k in range(sum_rounds):
                i = I(thread + k * threads)
                if i < 2 * COLUMNS:
                    half, column = I(i // COLUMNS), I(i % COLUMNS)
                    t = I(inputs[column])
                    from_ = I(I(I(I(t >> 3) * units + u) * 8 + (t & 7)) * 12 + 4 * half)
                    copy4(stage, I(sums_at + half * plane + 4 * column), s, np.int64(from_), I(1))
        for k in range(scale_rounds):
            column = I(thread + k * threads)
            if column < COLUMNS:
                t = I(inputs[column])
                copy1(stage, I(scales_at + column), d, np.int64(I(I(I(t >> 3) * units + u) * 8 + (t & 7))), I(1))

    @device
    def gather_small(stage, inputs, q, d, s, u, units, thread):
        # There may be fewer units than a stage has.
        part = I(thread & 127)
        own = I(u * per_32 + (part >> piece))
        here = I(1) if own < units * per_32 else I(0)
        x, to = advance(q, I(own * piece_words + I(part & pair) * 4)), advance(stage, I(4 * thread))
        column = I(I(thread >> 7) * 8 + (I(part >> pair) & I(7)))
        for k in range(rounds):
            t = I(inputs[column + 8 * step * k])
            from_ = np.int64(I(I(I(t >> 3) * units) * unit_words + I(t & 7) * column_words))
            copy4(to, k * (4 * threads), x, from_, here)
        part = I(thread & (tile_scales - 1))
        own = I(u + (part >> 3))
        here = I(1) if own < units else I(0)
        column = I(I(thread >> scale_shift) * 8 + (part & 7))
        for k in range(small_rounds):
            if full or thread + k * threads < all_scales:
                t = I(inputs[column + 8 * small_step * k])
                from_ = np.int64(I(I(I(t >> 3) * units + own) * 8 + (t & 7)))
                if has_sums:
                    copy1(stage, I(sums_at + thread + k * threads), s, from_, here)
                copy1(stage, I(scales_at + thread + k * threads), d, from_, here)

    return gather_large if large else gather_small


@device
def find(n_tiles, end, tile):
    """Which tile of rows this is, and whether it belongs to the second matrix; past the last tile it is the last again."""
    tile = min(tile, I(end - 1))
    second = tile >= n_tiles
    return I(tile - n_tiles) if second else tile, second


def _make_groups(format: str, shape: PipelineStage, apart: int, first: int) -> DeviceFunction:
    """The device function ``multiply(stage, records, lane, u, units, length, count, acc, total)``: ``make_wide`` for the
    tiles from ``first`` on that have some of the ``count`` columns, one group at a time."""
    n = min(GROUP, shape.tiles)
    group = Group(shape.tiles, shape.units, shape.sums, shape.record, first)
    wide, after = make_wide(T[format], group, n, apart), first + n
    x, own, own_end = 512 * first, 4 * first, 4 * after
    others = _make_groups(format, shape, apart, after) if after < shape.tiles else None

    @device
    def multiply(stage, records, lane, u, units, length, count, acc, total):
        own_total = advance(total, first * apart)
        wide(advance(stage, x), records, lane, u, units, length, acc[own:own_end], own_total)
        if others is not None and count > 8 * after:
            others(stage, records, lane, u, units, length, count, acc, total)

    return multiply


@kernel(
    *(U32P, U32P, F32P, F32P, I32P, I32P, F32P, F32P, F32P, F32P, i32, i32, i32, i32, U32P, F32P, U32P),
    threads=threads,
    blocks=resident,
    shared=shared_bytes,
)
def matmul_experts_wide(format: str, share: int, small: bool = False, finish: Finish = NOTHING) -> KernelCode:
    """One or two matrices of every expert, w0 and w1 of one format, times the activations of all pairs.

    share: the number of pairs that have an activation row in common: n_used, for down 1; n_tiles: records of 16 rows that one
    matrix of an expert touches (``experts.tiles``); end: of one matrix, or of both.
    ``small``: whether blocks are ``SMALL``.  finish: what is done with the products: factors f0 and f1 [n_expert], biases b0
    and b1 [n_expert, R].  Grid and threads: ``geometry``, for ``n_items`` and ``end``.
    """
    block, shape = block_of(small), stage_of(T[format], TILES)
    row_tiles, threads = block.row_tiles, block.threads
    per_stage, record, records_at = shape.units, shape.record, shape.records_at
    n_stage, own_words, n_acc = shape.words(row_tiles), shape.units * shape.record, 4 * TILES
    apart = 4 * threads
    total_at = STAGES * n_stage
    pairs_at = total_at + n_acc * threads
    inputs_at = pairs_at + COLUMNS
    gather, fetch_records = make_gather(shape, threads), make_fetch_records(shape)
    multiply = _make_groups(format, shape, apart, 0)
    finishes, (load_finish, apply_finish) = finish != NOTHING, make_finish(finish)

    @cuda.jit
    def matmul_experts_wide(w0, w1, out0, out1, items, listed, f0, f1, b0, b1, n_tiles, end, n_rows, units, q, d, s):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.uint32, 16))
        acc = cuda.local.array(n_acc, np.float32)
        thread = I(cuda.threadIdx.x & (threads - 1))
        warp, lane = I(thread >> 5), I(thread & 31)
        wait_for_inputs()
        item = advance(items, I(4 * cuda.blockIdx.x))
        expert, start, count = item[0], item[1], item[2]
        if count == 0:
            return
        pairs, inputs = advance(shared, I(pairs_at)), advance(shared, I(inputs_at))
        if thread < COLUMNS:
            # Columns that do not exist repeat the last one, and their results are not used.
            pair = listed[start + min(thread, I(count - 1))]
            pairs[thread] = u32(pair)
            inputs[thread] = u32(pair) // u32(share)
        tile, second = find(n_tiles, end, I(cuda.blockIdx.y * row_tiles + warp))
        w = w1 if second else w0
        origin = I(expert * n_rows)
        # The expert may have one record less than the grid allows for.
        tile = min(tile, I(I(I(origin & 15) + n_rows - 1) >> 4))
        records = advance(w, np.int64(I(I(I(origin >> 4) + tile) * units)) * record)
        total = advance(shared, I(total_at + 4 * thread))
        for k in range(n_acc):
            acc[k] = f32(0.0)
        for n in range(TILES):
            keep4(total, n * apart, f32(0.0), f32(0.0), f32(0.0), f32(0.0))
        length = I((units + CHAINS - 1) // CHAINS)
        own_at = I(records_at + warp * own_words)
        fetch_records(advance(shared, own_at), records, units, lane)
        cuda.syncthreads()
        gather(shared, inputs, q, d, s, I(0), units, thread)
        copies_commit()
        u, used = I(0), I(0)
        while u < units:
            copies_wait()
            cuda.syncthreads()
            records = advance(records, own_words)
            ahead, free = I(u + per_stage), I(n_stage - used)
            if ahead < units:
                to = advance(shared, free)
                fetch_records(advance(to, own_at), records, I(units - ahead), lane)
                gather(to, inputs, q, d, s, ahead, units, thread)
                copies_commit()
            stage = advance(shared, used)
            mine = advance(stage, own_at)
            if I(cuda.blockIdx.y * row_tiles + warp) < end:
                multiply(stage, mine, lane, u, units, length, count, acc, total)
            u, used = ahead, free
        # Computed again, because there is no room to keep it.
        tile, second = find(n_tiles, end, I(cuda.blockIdx.y * row_tiles + warp))
        out = out1 if second else out0
        # Negative if the expert begins inside a record, whose other rows belong to another expert.
        low = I(16 * tile - (I(item[0] * n_rows) & 15))
        column, row = I(2 * (lane & 3)), I(low + (lane >> 2))
        ends = (f32(1.0), f32(0.0)), (f32(1.0), f32(0.0))
        if finishes:
            factors, biases = f1 if second else f0, b1 if second else b0
            ends = (
                load_finish(factors, biases, item[0], row, n_rows),
                load_finish(factors, biases, item[0], I(row + 8), n_rows),
            )
        if I(cuda.blockIdx.y * row_tiles + warp) < end:
            for n in range(TILES):
                sums = vector4(total, n * apart)
                for k in range(4):
                    c, r = I(column + 8 * n + (k & 1)), I(row + 8 * (k >> 1))
                    if c < count and r >= 0 and r < n_rows:
                        y = bits_float(I(sums[k]))
                        if finishes:
                            factor, bias = ends[k >> 1]
                            y = apply_finish(y, factor, bias)
                        out[np.int64(I(pairs[c])) * n_rows + r] = y

    return matmul_experts_wide
