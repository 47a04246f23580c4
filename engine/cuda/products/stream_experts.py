"""Products with experts that few rows each have chosen: steps of many answers, on compute capability 9.0.

Formula: ``engine/cpu/products/experts.py``; the products are those of ``engine/cuda/products/matmul.py``.
Shapes: pairs as in ``engine/cuda/products/experts.py``, items and the list of pairs as in
    ``engine/cuda/products/stream_pairs.py``.  Activations are int8 in the layout of ``engine/cuda/products/quantize.py`` for
    the rows of the pass, one row per row or, for down, per pair; out float32 [pairs, R].
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

A warp computes as in ``engine/cuda/products/wide_chain.py``.  It needs less time for a record than its copy, as long as
there are few columns.  Copies of records do not wait for anything but their places, so that the memory is never idle.
"""

from dataclasses import dataclass
from functools import cache, cached_property

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
    float_to_half,
    keep4,
    let_next_begin,
    load4,
    pointer,
    vector4,
    wait_for_inputs,
)
from engine.cuda.products import stream_pairs
from engine.cuda.products.experts import NOTHING, Finish, make_finish
from engine.cuda.products.unpack import device
from engine.cuda.products.wide_chain import PipelineStage, make_wide, stage_of
from engine.cuda.products.wide_experts import find
from engine.cuda.runtime.compiler import F32P, I32P, U32P, Specialization, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.cuda.warpgroups import barrier_expect, barrier_init, barrier_wait, barriers_ready, bulk_copy
from engine.gguf.quants import CHAINS

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

TARGET = (9, 0)
"""The compute capability that has these products."""

SHARED = 227 << 10
"""Bytes of shared memory that a block may have there."""

WARPS = 16
THREADS = 32 * WARPS

TILES = (4, 2, 1)
"""Tiles of 8 columns that an item may have."""

PLACES = 3
"""Records of 256 positions that a warp should have room for, at least: one in use, the others in flight."""
MOST_PLACES = 8

LEAST_PAIRS, MOST_PAIRS = 0.5, 16
"""Pairs per expert, on average, from and up to which these products are faster than those of ``experts.py``, and of
``warpgroup_experts.py`` and ``wide_experts.py``."""


@dataclass(frozen=True)
class Room:
    """Shared memory of a block in words: stages of activations, for all positions; the sums of chains that have ended; pairs
    and activation rows of columns; barriers; records, ``places`` for each warp."""

    format: str
    tiles: int
    units: int

    @property
    def shape(self) -> PipelineStage:
        """A stage of activations."""
        return stage_of(T[self.format], self.tiles)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return -(-self.units // self.shape.units)

    @property
    def stage(self) -> int:
        """Words of a stage of activations."""
        return self.shape.records_at

    @property
    def own(self) -> int:
        """Words of the records of a stage, of 16 rows."""
        return self.shape.units * self.shape.record

    @property
    def totals_at(self) -> int:
        """The offset of the sums."""
        return self.stages * self.stage

    @property
    def pairs_at(self) -> int:
        """The offset of the pairs."""
        return self.totals_at + 4 * self.tiles * THREADS

    @property
    def inputs_at(self) -> int:
        """The offset of the activation rows."""
        return self.pairs_at + 8 * self.tiles

    @property
    def records_at(self) -> int:
        """The offset of the records."""
        return self.inputs_at + 8 * self.tiles

    @cached_property
    def places(self) -> int:
        """Records of a warp."""
        return min(MOST_PLACES, (SHARED // 4 - self.records_at) // (WARPS * (self.own + 2)))

    @property
    def loaded(self) -> int:
        """The offset of the barriers of records."""
        return self.records_at + self.places * WARPS * self.own

    @property
    def bytes(self) -> int:
        """The size of everything."""
        return 4 * (self.loaded + 2 * self.places * WARPS)


@cache
def tiles_for(format: str, units: int) -> int:
    """The most tiles of 8 columns that items may have for rows of ``units`` units; 0 if there is no room for any."""
    return next((tiles for tiles in TILES if Room(format, tiles, units).places >= PLACES), 0)


def serves(compute_capability: tuple[int, int], shared_memory: int, pairs: int, n_expert: int) -> bool:
    """Whether a device whose blocks may have ``shared_memory`` bytes has these products, and they are the fastest ones for so
    many pairs."""
    return (
        compute_capability == TARGET
        and shared_memory >= SHARED
        and LEAST_PAIRS * n_expert <= pairs <= MOST_PAIRS * n_expert
        and n_expert <= stream_pairs.MOST_EXPERTS
    )


def geometry(
    format: str,
    share: int,
    tiles: int,
    units: int,
    narrow: bool,
    early: bool,
    multiprocessors: int,
    finish: Finish = NOTHING,
) -> tuple[Specialization, int, int]:
    """(kernel, blocks, threads per block)."""
    further = (finish,) if finish != NOTHING else ()
    return matmul_experts_streamed(format, share, tiles, units, narrow, early, *further), multiprocessors, THREADS


def shared_bytes(
    format: str, share: int, tiles: int, units: int, narrow: bool = False, early: bool = False, finish: Finish = NOTHING
) -> int:
    """Shared memory of a block."""
    return Room(format, tiles, units).bytes


def _make_gather(room: Room, narrow: bool) -> DeviceFunction:
    """The device function ``gather(shared, inputs, q, d, s, log, thread)``: start copying the activation rows ``inputs``,
    shared memory, one for each of 8 << log columns, to the stages."""
    shape, units, stages, stage = room.shape, room.units, room.stages, room.stage
    groups, has_sums, plane = THREADS // 128, shape.sums > 0, 32 * room.tiles
    sums_at, scales_at = shape.sums_at, shape.scales_at
    # Units of 16 have a vector of a column each, others two for each 32 positions.
    sixteen, per_stage, per_32 = shape.units == 16, shape.units, max(1, 8 // shape.units)
    piece, pair = (3, 0) if sixteen else (4, 1)
    piece_words, column_words = (32, 4) if sixteen else (64, 8)
    tile_scales, unit_words = 8 * shape.units, 512 // shape.units

    @device
    def both_halves(word):
        """Two int16 as float16."""
        low, high = f32(I(I(word << u32(16)) >> I(16))), f32(I(I(word) >> I(16)))
        return u32(u32(float_to_half(low)) | u32(u32(float_to_half(high)) << u32(16)))

    @device
    def gather_large(shared, inputs, q, d, s, log, thread):
        part = I(thread & 127)
        column, from_part = I((part >> 2) & 7), I(I(part >> 5) * 128 + I(part & 3) * 4)
        j = I(thread >> 7)
        while j < I(I(stages) << log):
            u, n = I(j >> log), I(j & I(I(I(1) << log) - 1))
            to = advance(shared, I(u * stage))
            t = I(inputs[8 * n + column])
            at = np.int64(I(I(I(t >> 3) * units + u) * 512 + I(t & 7) * 16 + from_part))
            copy4(to, I(512 * n + 4 * part), q, at, I(1))
            if part < 24:
                t = I(inputs[8 * n + (part & 7)])
                at = np.int64(I(I(I(t >> 3) * units + u) * 8 + (t & 7)))
                if part >= 16:
                    copy1(to, I(scales_at + 8 * n + (part & 7)), d, at, I(1))
                elif has_sums:
                    half = I(part >> 3)
                    place, at = I(I(sums_at + half * plane) + I(32 * n + 4 * (part & 7))), at * 12 + 4 * half
                    if narrow:
                        words = load4(s, at)
                        a, b = both_halves(words[0]), both_halves(words[1])
                        keep4(to, place, a, b, both_halves(words[2]), both_halves(words[3]))
                    else:
                        copy4(to, place, s, at, I(1))
            j = I(j + groups)

    @device
    def gather_small(shared, inputs, q, d, s, log, thread):
        part = I(thread & 127)
        column = I((part >> pair) & 7)
        j = I(thread >> 7)
        while j < I(I(stages) << log):
            stage_, n = I(j >> log), I(j & I(I(I(1) << log) - 1))
            to = advance(shared, I(stage_ * stage))
            first = I(stage_ * per_stage)
            # There may be fewer units than a stage has.
            own = I(first * per_32 + (part >> piece))
            t = I(inputs[8 * n + column])
            at = np.int64(I(I(I(t >> 3) * units) * unit_words + I(t & 7) * column_words))
            at += np.int64(I(own * piece_words + I(part & pair) * 4))
            copy4(to, I(512 * n + 4 * part), q, at, I(1) if own < units * per_32 else I(0))
            if part < tile_scales:
                own = I(first + (part >> 3))
                t = I(inputs[8 * n + (part & 7)])
                at, here = np.int64(I(I(I(t >> 3) * units + own) * 8 + (t & 7))), I(1) if own < units else I(0)
                if has_sums:
                    copy1(to, I(sums_at + tile_scales * n + part), s, at, here)
                copy1(to, I(scales_at + tile_scales * n + part), d, at, here)
            j = I(j + groups)

    return gather_large if per_stage == 1 else gather_small


@kernel(
    *(U32P, U32P, F32P, F32P, I32P, I32P, F32P, F32P, F32P, F32P, i32, i32, i32, U32P, F32P, U32P),
    threads=THREADS,
    blocks=1,
    shared=shared_bytes,
    target=TARGET,
)
def matmul_experts_streamed(
    format: str, share: int, tiles: int, units: int, narrow: bool = False, early: bool = False, finish: Finish = NOTHING
) -> KernelCode:
    """One or two matrices of every expert, w0 and w1 of one format, times the activations of all pairs.

    share: the number of pairs that have an activation row in common: n_used, for down 1; tiles: of 8 pairs, the most of an
    item; units: of a row; narrow: whether activations have the layout ``NARROW``; early: whether a launch of
    this kernel has come between the sorting of pairs and this one; n_tiles: records of 16 rows that one matrix
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
    gather = _make_gather(room, narrow)
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

    @device
    def settle(at, last, end, warp):
        """The first tile of the warp from ``at`` on, a rank, the first tile of the item of this rank, and a tile of it: the
        same of that tile, and where the block's tiles of its item end, which is not after the tile if there is no more."""
        rank, origin, tile = at
        stop = min(last, I(origin + end))
        while tile >= stop and stop < last:
            rank, origin, tile = I(rank + 1), I(origin + end), I(stop + warp)
            stop = min(last, I(origin + end))
        return (rank, origin, tile), stop

    @device
    def fill(shared, thread, w0, w1, items, last, n_tiles, end, n_rows, place, ahead, following):
        """Start copying to all places of the warp that are free, ``ahead`` of them from ``place`` on not being so; following:
        the next tile (``settle``), its next unit and its next records.  Returns ``ahead`` and ``following``."""
        warp = I(thread >> 5)
        own_first = I(places * warp)
        at, stop, unit, records = following
        while ahead < places - 1 and at[2] < stop:
            if thread & 31 == 0:
                to = I(place + ahead)
                to = I(own_first + (I(to - places) if to >= places else to))
                n_bytes, barrier = I(min(I(per_stage), I(units - unit)) * (4 * record)), I(loaded + 2 * to)
                barrier_expect(shared, barrier, n_bytes)
                bulk_copy(shared, I(records_at + to * own_words), records, n_bytes, shared, barrier)
            ahead, unit, records = I(ahead + 1), I(unit + per_stage), advance(records, own_words)
            if unit >= units:
                unit = I(0)
                at, stop = settle((at[0], at[1], I(at[2] + WARPS)), last, end, warp)
                if at[2] < stop:
                    records = records_of(w0, w1, items[4 * at[0]], I(at[2] - at[1]), n_tiles, end, n_rows)
        return ahead, (at, stop, unit, records)

    @cuda.jit
    def matmul_experts_streamed(w0, w1, out0, out1, items, listed, f0, f1, b0, b1, n_tiles, end, n_rows, q, d, s):
        shared = pointer(cuda.shared.array(0, np.uint32, 128))
        acc = cuda.local.array(n_acc, np.float32)
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        warp, lane = I(thread >> 5), I(thread & 31)
        own_first = I(places * warp)
        if lane == 0:
            for k in range(places):
                barrier_init(shared, I(loaded + 2 * I(own_first + k)), I(1))
            barriers_ready()
        cuda.syncwarp()
        if not early:
            wait_for_inputs()
        # Only now, so that a later kernel may read the items before its own inputs are ready.
        let_next_begin()
        all_tiles, block, n_blocks = u32(items[3] * end), u32(cuda.blockIdx.x), u32(cuda.gridDim.x)
        first, last = I(u32(all_tiles * block) // n_blocks), I(u32(all_tiles * u32(block + u32(1))) // n_blocks)
        if first == last:
            if early:
                wait_for_inputs()
            return
        rank = I(u32(first) // u32(end))
        origin = I(rank * end)
        stop = min(last, I(origin + end))
        at, next_stop = settle((rank, origin, I(first + warp)), last, end, warp)
        # The warp may have no tile at all.
        tile = min(I(at[2] - at[1]), I(end - 1))
        following = at, next_stop, I(0), records_of(w0, w1, items[4 * at[0]], tile, n_tiles, end, n_rows)
        place, turn, ahead = I(0), I(0), I(0)
        ahead, following = fill(shared, thread, w0, w1, items, last, n_tiles, end, n_rows, place, ahead, following)
        if early:
            wait_for_inputs()
        pairs, inputs = advance(shared, I(pairs_at)), advance(shared, I(inputs_at))
        total = advance(shared, I(totals_at + 4 * thread))
        while rank >= 0:
            expert, start, count = items[4 * rank], items[4 * rank + 1], items[4 * rank + 2]
            log = I(0)
            if two and count > 8:
                log = I(2) if four and count > 16 else I(1)
            if thread < columns:
                # Columns that do not exist repeat the last one, and their results are not used.
                pair = listed[start + min(thread, I(count - 1))]
                pairs[thread] = u32(pair)
                inputs[thread] = u32(pair) // u32(share)
            cuda.syncthreads()
            gather(shared, inputs, q, d, s, log, thread)
            copies_commit()
            copies_wait()
            cuda.syncthreads()
            tile = I(first + warp)
            while tile < stop:
                for n in range(tiles):
                    keep4(total, n * apart, f32(0.0), f32(0.0), f32(0.0), f32(0.0))
                for k in range(n_acc):
                    acc[k] = f32(0.0)
                u, x = I(0), shared
                while u < units:
                    ahead, following = fill(
                        shared, thread, w0, w1, items, last, n_tiles, end, n_rows, place, ahead, following
                    )
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
