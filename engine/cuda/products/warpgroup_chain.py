"""The work of a block of warpgroups on a tile of a product: 64 weight rows for each warpgroup times up to 128 columns.

The tensor cores multiply weights that already contain the scales of their sub-blocks, q * s.  These usually need more than 8
bits, so they are two planes of bytes, 2**shift * high + low, and no sum has to be multiplied by a scale:

    a block, for each unit u of its rows:
        thread 0: wait until all warps have released the stage of a later unit, start copying the activations of that unit
        each warp: start copying its record of a later unit, wait for that of unit u
        wait for the activations of unit u
        each warp: planes of its 16 rows
        each warpgroup: dots = 2**shift * (high plane * x) + low plane * x; least = minimums * sums of x
        each lane: value = d * dot (+ dm * least), chain = fma(da, value, chain)
        each warp: release the stage
        where a chain ends: total = total + chain, in shared memory, or, if other blocks have other chains of these rows, the
            chain to memory

The warpgroups share the stages of activations and do not wait for each other otherwise.  So one of them unpacks and adds
while the tensor cores work for another.

The columns of a tile are a block of a layout of ``BLOCKS`` (``engine/cuda/products/quantize.py``); lane 4 g + t of a warp has
rows g and g + 8 of its 16 weight rows, and columns 2 t and 2 t + 1 of each 8.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import advance, bits_float, keep4, store4, vector4
from engine.cuda.products.quantize import BLOCKS, block_parts
from engine.cuda.products.unpack import device, unpack
from engine.cuda.products.warpgroup_planes import ONE_PLANE, make_close, make_products
from engine.cuda.products.wide_chain import SHARED_LOADS, make_end, make_minimums
from engine.cuda.runtime.kinds import DeviceFunction
from engine.cuda.warpgroups import (
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_wait,
    barriers_ready,
    bulk_copy,
    make_half_products,
)
from engine.gguf.quants import FORMATS

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

FORMATS_OF_PLANES = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)
"""The formats whose weights times scales are one or two planes of bytes here."""

GROUP_TILES = 4
"""Tiles of 16 weight rows of a warpgroup, one for each warp."""

TARGET = (9, 0)
"""The compute capability that has these products."""

SHARED = 227 << 10
"""Bytes of shared memory that a block may have there."""


@dataclass(frozen=True)
class TileShape:
    """The part of a block: tiles of 8 columns, which are activation rows; warpgroups, each for 64 weight rows; and the number
    of blocks that share the chains of these rows."""

    tiles: int
    groups: int
    split: int = 1

    @property
    def threads(self) -> int:
        return 128 * self.groups

    @property
    def warps(self) -> int:
        """Tiles of 16 weight rows."""
        return GROUP_TILES * self.groups

    def grid(self, rows: int, tiles: int) -> tuple[int, int, int]:
        """The grid for ``rows`` activation rows and ``tiles`` tiles of 16 weight rows."""
        return -(-rows // (8 * self.tiles)), -(-tiles // self.warps), self.split


LARGE = TileShape(BLOCKS[-1], 2)
"""The blocks of passes of many rows."""


@dataclass(frozen=True)
class Areas:
    """Shared memory of a block in words: the sums of chains that have ended, unless other blocks have other chains; stages,
    each with the activations of a unit; records, ``places`` for each warp, at most ``most``; barriers.

    other: the format of other warpgroups of the block, if they have another one, which :func:`can_share` must allow.
    """

    format: str
    shape: TileShape
    most: int = 4
    other: str = ""

    @property
    def of_other(self) -> "Areas":
        """The same areas, as the warpgroups of the other format see them."""
        return replace(self, format=self.other, other=self.format)

    @property
    def formats(self) -> tuple[str, ...]:
        """One or two."""
        return (self.format, self.other) if self.other else (self.format,)

    @property
    def record(self) -> int:
        """Words of the record of 16 rows of a unit."""
        return _record(self.format)

    @property
    def place(self) -> int:
        """Words of the place of a record."""
        return max(map(_record, self.formats))

    @property
    def stage(self) -> int:
        """Words of a stage; the sums of activations are last and only copied if a format has minimums."""
        mins = any(unpack(T[format]).mins for format in self.formats)
        return block_parts(self.shape.tiles)[2 if mins else 1]

    @property
    def table(self) -> str:
        """The format with a table, if there is one."""
        return max(self.formats, key=_table_bytes)

    @property
    def stages(self) -> int:
        """Stages of activations: one in use, one that slower warps use, the others in flight."""
        return 5 if self.shape.tiles <= 8 else 3

    @property
    def ahead(self) -> int:
        """How many units before its use the copy of a stage begins."""
        return self.stages - 2

    @property
    def apart(self) -> int:
        """Words from a thread's sums of a tile of 8 columns to those of the next."""
        return 4 * self.shape.threads

    @property
    def stages_at(self) -> int:
        """The offset of the stages."""
        return self.shape.tiles * self.apart if self.shape.split == 1 else 0

    @property
    def records_at(self) -> int:
        """The offset of the records."""
        return self.stages_at + self.stages * self.stage

    @cached_property
    def places(self) -> int:
        """Records of a warp: one in use, the others in flight."""
        left = (SHARED - _table_bytes(self.table)) // 4 - self.records_at - 4 * self.stages
        return max(2, min(self.most, left // (self.shape.warps * (self.place + 2))))

    @property
    def full(self) -> int:
        """The offset of the barriers of stages that are full."""
        return self.records_at + self.places * self.shape.warps * self.place

    @property
    def empty(self) -> int:
        """The offset of the barriers of stages that all warps have released."""
        return self.full + 2 * self.stages

    @property
    def loaded(self) -> int:
        """The offset of the barriers of records."""
        return self.empty + 2 * self.stages

    @property
    def bytes(self) -> int:
        """The size of everything but tables."""
        return 4 * (self.loaded + 2 * self.places * self.shape.warps)


def _record(format: str) -> int:
    return 4 * FORMATS[T[format]].unit_bytes


@cache
def _table_bytes(format: str) -> int:
    # Cached, because a new ``Unpack`` takes longer than recording a launch.
    return unpack(T[format], unsigned=True).table_bytes


def can_share(first: str, second: str) -> bool:
    """Whether a block can have warpgroups of both formats: there is room for one table."""
    return not (_table_bytes(first) and _table_bytes(second))


def serves(compute_capability: tuple[int, int], shared_memory: int) -> bool:
    """Whether a device whose blocks may have ``shared_memory`` bytes has these products."""
    return compute_capability == TARGET and shared_memory >= SHARED


def takes(format: str, compute_capability: tuple[int, int], shared_memory: int) -> bool:
    """Whether warpgroups multiply a format on a device."""
    return format in FORMATS_OF_PLANES and serves(compute_capability, shared_memory)


# --- the pipeline ------------------------------------------------------------------------------------------------


class Pipeline(NamedTuple):
    """Device functions of the copies of a block.

    begin(shared, thread): make the barriers, and copy the table of a format if there is one; all threads call it.
    fetch(shared, k, x): start copying a block of activations into stage k; thread 0 calls it.
    fetch_record(shared, place, records): start copying a record to a place, those of a warp being consecutive; a lane of it
        calls it.
    begin_records(shared, thread, records, units), begin_stages(shared, thread, x, units): start copying the first records of
        a warp and the first stages of a block, of ``units`` units; all threads call them.
    """

    begin: DeviceFunction
    fetch: DeviceFunction
    fetch_record: DeviceFunction
    begin_records: DeviceFunction
    begin_stages: DeviceFunction


START = (I(0), I(0), I(0), I(0))
"""Where a block is in its pipeline, before its first tile: stage and parity, place and parity."""


def make_pipeline(areas: Areas) -> Pipeline:
    """The device functions of blocks with these areas."""
    record, n_stage, stages, places, ahead = areas.record, areas.stage, areas.stages, areas.places, areas.ahead
    stages_at, records_at, n_place = areas.stages_at, areas.records_at, areas.place
    full, empty, loaded, warps = areas.full, areas.empty, areas.loaded, areas.shape.warps
    block_words, fill = block_parts(areas.shape.tiles)[2], unpack(T[areas.table], unsigned=True).make_fill()

    @device
    def begin(shared, thread):
        if thread == 0:
            for k in range(stages):
                barrier_init(shared, I(full + 2 * k), I(1))
                barrier_init(shared, I(empty + 2 * k), I(warps))
            for k in range(places * warps):
                barrier_init(shared, I(loaded + 2 * k), I(1))
            barriers_ready()
        fill()
        cuda.syncthreads()

    @device
    def fetch(shared, k, x):
        barrier_expect(shared, I(full + 2 * k), I(4 * n_stage))
        bulk_copy(shared, I(stages_at + k * n_stage), x, I(4 * n_stage), shared, I(full + 2 * k))

    @device
    def fetch_record(shared, place, records):
        barrier_expect(shared, I(loaded + 2 * place), I(4 * record))
        bulk_copy(shared, I(records_at + place * n_place), records, I(4 * record), shared, I(loaded + 2 * place))

    @device
    def begin_records(shared, thread, records, units):
        if thread & 31 == 0:
            for k in range(places - 1):
                if k < units:
                    fetch_record(shared, I(places * (thread >> 5) + k), advance(records, k * record))

    @device
    def begin_stages(shared, thread, x, units):
        if thread == 0:
            for k in range(ahead):
                if k < units:
                    fetch(shared, I(k), advance(x, k * block_words))

    return Pipeline(begin, fetch, fetch_record, begin_records, begin_stages)


def _make_keep(tiles: int) -> DeviceFunction:
    """The device function keep(acc, chain): end a chain and write it to memory; chain is the lane's."""

    @device
    def keep(acc, chain):
        for n in range(tiles):
            store4(chain, 128 * n, acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3])
            for k in range(4):
                acc[4 * n + k] = f32(0.0)

    return keep


def make_multiply(areas: Areas, tiles: int, follows: bool = False, single: bool = False) -> DeviceFunction:
    """The device function multiply(shared, thread, at, x, records, units, length, to, more, next_x, next_records, acc): the
    products of a block's tile for the first ``tiles`` tiles of 8 columns, over ``units`` units in chains of ``length``.

    at: ``START``, or what the tile before it has returned; x, records: the activations and the records of the warp, of which
    the first have been started (``Pipeline``).  more: if other tiles may follow (``follows``), whether one does, whose first
    stage and record are ``next_x`` and ``next_records``.
    to: the thread's place for sums of chains, in shared memory: those of tile t of columns at [areas.apart * t], 4 words; if
    blocks share chains, where the lane's sums of the first chain will be, in memory (``warpgroup_matmul.chain_floats``).
    acc float32 [4 tiles]: the results, unless blocks share chains; of tile t of columns [4 t] .. [4 t + 3] are those of the
    lane's (row g, column 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1).
    single: there are at most ``CHAINS`` units, so every chain is one; then no sums of chains are in shared memory.
    """
    pipeline, fmt, split = make_pipeline(areas), unpack(T[areas.format], unsigned=True), areas.shape.split > 1
    record, n_stage, stages, places, ahead = areas.record, areas.stage, areas.stages, areas.places, areas.ahead
    sums_apart = not split and not single
    assert not (split and single)
    assert not follows or (places, ahead) == (2, 1), "the next tile has started one stage and one record"
    stages_at, records_at, n_dots, apart = areas.stages_at, areas.records_at, 4 * tiles, areas.apart
    full, empty, loaded, n_place = areas.full, areas.empty, areas.loaded, areas.place
    scales_at, sums_at, block_words = block_parts(areas.shape.tiles)
    load, header, factors, mins, n_words = fmt.make_load(SHARED_LOADS), fmt.header, fmt.factors, fmt.mins, fmt.words
    products, minimums = make_products(fmt, 8 * tiles, areas.format in ONE_PLANE), make_minimums(fmt)
    close, end, keep = make_close(mins, single, tiles), make_end(tiles, apart), _make_keep(tiles)
    half_products = make_half_products(8 * tiles)
    fetch, fetch_record = pipeline.fetch, pipeline.fetch_record

    @device
    def multiply(shared, thread, at, x, records, units, length, to, more, next_x, next_records, acc):
        dots = cuda.local.array(n_dots, np.int32)
        least = cuda.local.array(n_dots, np.float32)
        words = cuda.local.array(n_words, np.uint32)
        lane, own = I(thread & 31), I(places * (thread >> 5))
        k, parity, place, turn = at
        for j in range(n_dots):
            acc[j], least[j] = f32(0.0), f32(0.0)
        if sums_apart:
            for t in range(tiles):
                keep4(to, t * apart, f32(0.0), f32(0.0), f32(0.0), f32(0.0))
        x, records = advance(x, (ahead - 1) * block_words), advance(records, (places - 2) * record)
        u, left = I(0), length
        while u < units:
            x, records = advance(x, block_words), advance(records, record)
            more_x, more_records = I(u + ahead) < units, I(u + (places - 1)) < units
            if follows and not more_x:
                more_x, more_records = more, more
                x, records = next_x, next_records
            if lane == 0 and more_records:
                # The products of the unit before this one have used what was there.
                fetch_record(shared, I(own + I(place - 1 if place > 0 else places - 1)), records)
            if thread == 0 and more_x:
                after, released = I(k + ahead), I(parity ^ 1)
                if after >= stages:
                    after, released = I(after - stages), parity
                # The phase that ended when the stage was last released; before it has been used, parity 1 has ended.
                barrier_wait(shared, I(empty + 2 * after), released)
                fetch(shared, after, x)
            barrier_wait(shared, I(loaded + 2 * I(own + place)), turn)
            cuda.syncwarp()
            load(advance(shared, I(records_at + I(own + place) * n_place)), lane, words)
            h, f = header(words), factors(words)
            m = (u32(0), u32(0), u32(0), u32(0))
            if mins:
                m = minimums(h, lane)
            stage = I(stages_at + k * n_stage)
            products(words, h, shared, stage, I(full + 2 * k), parity, dots)
            if mins:
                half_products(m, shared, I(stage + sums_at), least)
            close(advance(shared, I(stage + scales_at + 2 * (lane & 3))), f, dots, least, acc)
            cuda.syncwarp()
            if lane == 0:
                barrier_arrive(shared, I(empty + 2 * k))
            u, left, k, place = I(u + 1), I(left - 1), I(k + 1), I(place + 1)
            if not single and (left == 0 or u == units):
                if split:
                    keep(acc, to)
                    to = advance(to, 128 * tiles)
                else:
                    end(acc, to)
                left = length
            if k == stages:
                k, parity = I(0), I(parity ^ 1)
            if place == places:
                place, turn = I(0), I(turn ^ 1)
        if sums_apart:
            for t in range(tiles):
                sums = vector4(to, t * apart)
                for e in range(4):
                    acc[4 * t + e] = bits_float(I(sums[e]))
        return k, parity, place, turn

    return multiply
