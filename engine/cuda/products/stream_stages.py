"""Shared memory of the products that stream the weights of experts: stages of activations for all positions, and records.

Shapes: activations as in ``engine/cuda/products/quantize.py``, one row for each column; stages as in
    ``engine/cuda/products/wide_chain.py``.
Who owns what: 128 threads copy 8 columns of a stage.
Reduction order: none.
Bytes moved: about 1.2 K for a column of K positions, from the L2 cache.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from gguf import GGMLQuantizationType as T

from engine.cuda.intrinsics import advance, copy1, copy4, float_to_half, keep4, load4
from engine.cuda.products.unpack import device
from engine.cuda.products.wide_chain import PipelineStage, stage_of
from engine.cuda.runtime.kinds import DeviceFunction

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

SHARED = 227 << 10
"""Bytes of shared memory that a block may have on compute capability 9.0."""

WARPS = 16
THREADS = 32 * WARPS

TILES = (4, 2, 1)
"""Tiles of 8 columns that an item may have."""

PLACES = 3
"""Records of 256 positions that a warp should have room for, at least: one in use, the others in flight."""
MOST_PLACES = 8


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


def make_gather(room: Room, narrow: bool) -> DeviceFunction:
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
