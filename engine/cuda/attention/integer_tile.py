"""A tile of attention over integer keys and values: the layout of its shared memory, and what its warps do besides chunks.

Formula: the pieces of ``engine/cuda/attention/integer_tiled.py``: copying chunks and queries, joining, the rotation back.
Shapes: a lane's numbers are in registers, [strip, r, e] (``engine/cuda/attention/integer_chunk.py``).
Who owns what: lane 4 g + t owns dimensions 16 strip + 4 t + e of queries g and g + 8.
Reduction order: ``engine/cpu/integer_cache.py`` for the rotation: levels 1 and 2 within a lane, 4 and 8 between four lanes,
    16 and more within a lane.
Bytes moved: those of a chunk to shared memory, once per block.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from engine.cache.types import CHUNK, CacheType
from engine.cuda.attention.integer_chunk import PAIRS
from engine.cuda.attention.tile import make_each
from engine.cuda.intrinsics import advance, copy4, exp, fma, keep4, lane_xor
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import SHARED_OF_DRIVER
from engine.cuda.runtime.kinds import DeviceFunction

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

MOST_PART = 256
"""The most dimensions of values that a block computes."""
FILLED = 3
"""The kernel serves a pass that has at least one block for every so many multiprocessors."""
RESIDENT = 8
"""Warps that a multiprocessor has registers for."""
KEY_PITCH = CHUNK + 4
"""Words from one row of keys to the next in shared memory: a warp that reads two words of every other row uses every bank."""
LOW_PITCH = CHUNK + 8
"""The same for the low bits of i12, of which a warp reads every row."""


@dataclass(frozen=True)
class IntegerTile:
    """The shared memory of a block of ``warps`` warps, in words: two chunks, then queries and their scales, and scores.

    ``shared_by``: warps that share 16 queries: each computes the scores of some positions, and ``part`` dimensions of values.
    """

    of: CacheType
    d_k: int
    d_v: int
    part: int
    warps: int
    shared_by: int = 1

    @property
    def pairs(self) -> int:
        """(row, head) pairs of a block."""
        return PAIRS * self.warps // self.shared_by

    @property
    def width(self) -> int:
        """Dimensions of values that a block computes."""
        return self.part * self.shared_by

    def number(self, pairs: int) -> int:
        """Tiles for so many (row, head) pairs of a KV head."""
        return -(-pairs // self.pairs)

    def fills(self, rows: int, n_head: int, n_head_kv: int, multiprocessors: int) -> bool:
        """Whether ``rows`` rows have enough tiles for a GPU with so many multiprocessors: with fewer, kernels that divide the
        chunks of a tile among blocks are faster at many visible positions."""
        blocks = n_head_kv * self.number(rows * (n_head // n_head_kv)) * (self.d_v // self.width)
        return blocks * FILLED >= multiprocessors

    def blocks(self, shared: int) -> int:
        """Blocks of this kind on a multiprocessor of a GPU whose blocks may have ``shared`` bytes of shared memory."""
        if 4 * self.size > shared:
            return 0
        return min(RESIDENT // self.warps, (shared + SHARED_OF_DRIVER) // (4 * self.size + SHARED_OF_DRIVER))

    @property
    def low_keys(self) -> int:
        return self.d_k // 4 * KEY_PITCH

    @property
    def key_scales(self) -> int:
        return self.low_keys + (self.d_k // 8 * LOW_PITCH if self.of.bits == 12 else 0)

    @property
    def values(self) -> int:
        return self.key_scales + self.d_k // self.of.block(self.d_k) * CHUNK // 2

    @property
    def value_pitch(self) -> int:
        return self.width + 8

    @property
    def low_values(self) -> int:
        return self.values + CHUNK // 4 * self.value_pitch

    @property
    def low_value_pitch(self) -> int:
        return self.width // 2 + 8

    @property
    def value_scales(self) -> int:
        return self.low_values + (CHUNK // 4 * self.low_value_pitch if self.of.bits == 12 else 0)

    @property
    def stage(self) -> int:
        """The size of a chunk."""
        return self.value_scales + self.width // self.of.block(self.d_v) * CHUNK // 2

    @property
    def of_warp(self) -> int:
        """The size of the queries of a warp."""
        return 8 * self.d_k

    @property
    def scales(self) -> int:
        return 2 * self.stage + self.pairs // PAIRS * self.of_warp

    @property
    def scores(self) -> int:
        return self.scales + self.pairs * (self.d_k // self.of.block(self.d_k))

    @property
    def size(self) -> int:
        return self.scores + (self.pairs * CHUNK if self.shared_by > 1 else 0)


def part_of(of: CacheType, d_v: int) -> int:
    """The dimensions of values that a block computes: whole blocks that share a scale, and no more than ``MOST_PART``."""
    block = of.block(d_v)
    return next(n for n in range(min(d_v, MOST_PART), 0, -block) if d_v % n == 0)


@lru_cache
def tile_of(of: CacheType, d_k: int, d_v: int, shared: int) -> IntegerTile | None:
    """The tile for a GPU whose blocks have ``shared`` bytes of shared memory; None if there is none."""
    part = part_of(of, d_v)
    kinds = [(4, 1), (8, 1), (2, 1), (1, 1)]
    if d_v == 2 * part:
        kinds.append((8, 2))
    tiles = [IntegerTile(of, d_k, d_v, part, *kind) for kind in kinds]
    return max(
        (tile for tile in tiles if tile.blocks(shared)), key=lambda tile: tile.warps * tile.blocks(shared), default=None
    )


# --- copies ----------------------------------------------------------------------------------------------------


def _make_fetch(rows: int, width: int, source_pitch: int, pitch: int, at: int, threads: int) -> DeviceFunction:
    """The device function ``fetch(stage, p, thread)``: start copying rows of ``width`` words, ``source_pitch`` apart at p, to
    ``at`` in shared memory, where they are ``pitch`` apart.

    The distances between the words that a thread copies are constants, so that a copy is one instruction."""
    vectors = width // 4
    n = rows * vectors
    rounds, whole = -(-n // threads), n % threads == 0
    # Threads that copy a row together, and rows that all threads copy at once; or copies of a thread from each row.
    across = min(vectors, threads)
    down, along = threads // across, vectors // across
    even = threads % across == 0 and vectors % across == 0 and rows % down == 0

    @device
    def fetch_evenly(stage, p, thread):
        row, column = I(U(thread) // U(across)), I(I(U(thread) % U(across)) * 4)
        to, source = advance(stage, I(I(row * pitch) + column) + I(at)), advance(p, I(I(row * source_pitch) + column))
        for k in range(rounds):
            row, column = I(k // along * down), I(k % along * 4 * across)
            copy4(to, I(row * pitch + column), source, I(row * source_pitch + column), I(1))

    @device
    def fetch(stage, p, thread):
        for k in range(rounds):
            i = I(thread + k * threads)
            if whole or i < n:
                row, column = I(U(i) // U(vectors)), I(I(U(i) % U(vectors)) * 4)
                copy4(stage, I(I(row * pitch) + column) + I(at), p, I(I(row * source_pitch) + column), I(1))

    return fetch_evenly if even else fetch


def make_fetch(tile: IntegerTile, threads: int) -> tuple[DeviceFunction, DeviceFunction]:
    """Two device functions by which so many threads start copying a chunk to shared memory: ``fetch_keys(stage, keys,
    thread)`` and ``fetch_values(stage, values, first, thread)``; ``first``: the first dimension of the values."""
    of, d_k, d_v, part = tile.of, tile.d_k, tile.d_v, tile.width
    block, k_blocks = of.block(d_v), d_k // of.block(d_k)
    n_keys, n_values, low_bits = CHUNK * d_k // 4, CHUNK * d_v // 4, of.bits == 12
    k_scales, v_scales, half = of.integer_words(d_k), of.integer_words(d_v), CHUNK // 2
    keys_of = _make_fetch(d_k // 4, CHUNK, CHUNK, KEY_PITCH, 0, threads)
    low_keys_of = _make_fetch(d_k // 8, CHUNK, CHUNK, LOW_PITCH, tile.low_keys, threads)
    key_scales_of = _make_fetch(k_blocks, half, half, half, tile.key_scales, threads)
    values_of = _make_fetch(CHUNK // 4, part, d_v, tile.value_pitch, tile.values, threads)
    low_values_of = _make_fetch(CHUNK // 4, part // 2, d_v // 2, tile.low_value_pitch, tile.low_values, threads)
    value_scales_of = _make_fetch(part // block, half, half, half, tile.value_scales, threads)

    @device
    def fetch_keys(stage, keys, thread):
        keys_of(stage, keys, thread)
        key_scales_of(stage, advance(keys, k_scales), thread)
        if low_bits:
            low_keys_of(stage, advance(keys, n_keys), thread)

    @device
    def fetch_values(stage, values, first, thread):
        values_of(stage, advance(values, first), thread)
        value_scales_of(stage, advance(values, I(v_scales + I(U(first) // U(block)) * half)), thread)
        if low_bits:
            low_values_of(stage, advance(values, I(n_values + (first >> 1))), thread)

    return fetch_keys, fetch_values


def make_place(of: CacheType, d_k: int, group: int, turns: int) -> DeviceFunction:
    """The device function ``place(q, q_scales, task, last, head0, n_head, lane, turn, query, scales)``: copy the queries of
    16 pairs from number ``task`` on, of 0 .. last, to shared memory, in the layout of a tensor core: lane 4 g + t has words
    2 t and 2 t + 1 of pairs g and g + 8.  ``turns`` warps share the work."""
    blocks, of_limb = d_k // of.block(d_k), d_k // 4
    rounds, n_scales = -(-(d_k // 16) // turns), PAIRS * blocks

    @device
    def head_of(task, head0, n_head):
        row = I(U(task) // U(group))
        return np.int64(I(I(row * n_head) + I(head0 + I(task - row * group))))

    @device
    def place(q, q_scales, task, last, head0, n_head, lane, turn, query, scales):
        one, other = min(last, I(task + (lane >> 2))), min(last, I(task + (lane >> 2) + 8))
        x = advance(q, head_of(one, head0, n_head) * (2 * of_limb) + 2 * (lane & 3))
        y = advance(q, head_of(other, head0, n_head) * (2 * of_limb) + 2 * (lane & 3))
        to = advance(query, 4 * lane)
        for k in range(rounds):
            i = I(turn + k * turns)
            if i < d_k // 16:
                at = I(I((i & 1) * of_limb) + 8 * (i >> 1))
                keep4(to, I(128 * i), x[at], y[at], x[at + 1], y[at + 1])
        i = I(lane + 32 * turn)
        while i < n_scales:
            head = head_of(min(last, I(task + (i & (PAIRS - 1)))), head0, n_head)
            scales[i] = q_scales[head * blocks + (i >> 4)]
            i = I(i + 32 * turns)

    return place


@device
def _rotate_strip(i, x, lane):
    """The levels 1, 2, 4 and 8 of rotation, between elements of a lane and of four lanes."""
    for level in range(2):
        apart = 1 << level
        for k in range(8):
            if k & apart == 0:
                low, high = x[8 * i + k], x[8 * i + k + apart]
                x[8 * i + k] = low + high
                x[8 * i + k + apart] = low - high
    for level in range(2):
        upper = (lane >> level) & 1 != 0
        for k in range(8):
            # (x + y, x - y); the upper lane holds the second result: y, its own element, enters with the other sign.
            own = x[8 * i + k]
            x[8 * i + k] = (-own if upper else own) + lane_xor(own, I(1 << level))


def make_rotate(strips: int, block: int) -> DeviceFunction:
    """The device function ``rotate(x, lane)``: rotate each block of a lane's part of two values back, in place: x [strip, r,
    e], dimension 16 strip + 4 t + e."""
    unit, per = F(1.0 / np.sqrt(block)), block // 16

    def make_level(apart: int) -> DeviceFunction:
        """A level between strips that are ``apart``."""

        @device
        def level(i, x):
            if i & apart == 0:
                for k in range(8):
                    low, high = x[8 * i + k], x[8 * (i + apart) + k]
                    x[8 * i + k] = low + high
                    x[8 * (i + apart) + k] = low - high

        return make_each(strips, level)

    @device
    def scale(i, x):
        for k in range(8):
            x[8 * i + k] = x[8 * i + k] * unit

    within, scales = make_each(strips, _rotate_strip), make_each(strips, scale)
    one, two, four = (make_level(apart) if apart < per else None for apart in (1, 2, 4))

    @device
    def rotate(x, lane):
        within(0, x, lane)
        if per > 1:
            one(0, x)
        if per > 2:
            two(0, x)
        if per > 4:
            four(0, x)
        scales(0, x)

    return rotate


@device
def join_factors(maximum, mass, m, weight, seen):
    """Join a chunk or a group with maximum m and sum ``weight`` to those before it, unless it is hidden: (the factor of those
    before, its own factor, the new maximum, the new sum)."""
    joined = max(maximum, m)
    a, b = exp(maximum - joined), exp(m - joined)
    # What joins something hidden leaves every sum unchanged, even -0.
    a = a if seen else F(1.0)
    b = b if seen else F(-0.0)
    return a, b, (joined if seen else maximum), fma(mass, a, b * weight)
