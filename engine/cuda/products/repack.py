"""How weights are laid out in device memory: records of 16 rows, in the order in which tensor cores read them.

The tensor-core product of ``intrinsics.mma32`` expects in lane 4 g + t of a warp the weights at positions 4 t .. 4 t + 3
and 16 + 4 t .. of rows g and g + 8.  So 16 rows of one block form a *record* of 16 * block_bytes bytes: the same bytes as
in the file, in another order, chosen so that each lane reads what it needs as aligned vectors, and a warp reads a record
from end to end.  Record (tile, u), of rows 16 tile .. 16 tile + 15 and block u of each, begins at byte
(tile * blocks + u) * 16 * block_bytes.  Rows past the last are zeros.

A record is a sequence of *planes*, each a few words (4 bytes) per lane or per row:

* a *lane plane* of n words holds, for lanes 0 .. 31, the words a0, a1, (a2, a3) of ``mma32``: rows g and g + 8 alternate;
  where a weight has less than a byte, a lane may need less than a word of a row, and two lanes may need the same;
* a *row plane* of n bytes holds n bytes for each of the rows 0, 8, 1, 9, ..., so that the pair (g, g + 8) is adjacent, or
  (``paired`` False) for each of the rows 0 .. 15 in order.

Weights of the float formats (F32, F16, BF16) stay as they are in the file.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import let_next_begin, wait_for_inputs
from engine.cuda.runtime.compiler import I32P, U8P, U32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode
from engine.gguf.quants import FORMATS, Format

TILE = 16
"""Rows of a record."""

_PAIRED = [row for g in range(8) for row in (g, g + 8)]
_Plane = list[tuple[int, int]]


def _lane_plane(*starts: int, size: int = 4, shares: int = 4) -> _Plane:
    """(row, byte) of a lane plane: for each byte offset in ``starts`` the ``size`` bytes at offset + size * k, of rows g and
    g + 8, for each of the ``shares`` k of a row."""
    return [
        (row, s + size * k + byte)
        for g in range(8)
        for k in range(shares)
        for s in starts
        for row in (g, g + 8)
        for byte in range(size)
    ]


def _row_plane(start: int, n: int, paired: bool = True) -> _Plane:
    """(row, byte) of a row plane: n bytes from ``start`` of every row."""
    return [(row, start + k) for row in (_PAIRED if paired else range(TILE)) for k in range(n)]


def _join(*planes: _Plane) -> _Plane:
    return [place for plane in planes for place in plane]


@dataclass(frozen=True)
class _Block:
    """Where the fields of a block begin, in bytes."""

    factors: int = -1
    scales: int = -1
    quants: int = -1
    high: int = -1
    signs: int = -1


# engine/cpu/products/unpack.py says what the fields mean.
_RECORDS: dict[str, Callable[[_Block], _Plane]] = {
    # Low nibbles are positions 0 .. 15, high ones 16 .. 31, so one word serves a0 and a2.
    "Q4_0": lambda b: _join(_lane_plane(b.quants), _row_plane(b.factors, 2)),
    "IQ4_NL": lambda b: _join(_lane_plane(b.quants), _row_plane(b.factors, 2)),
    "Q4_1": lambda b: _join(_lane_plane(b.quants), _row_plane(b.factors, 4)),
    "MXFP4": lambda b: _join(_lane_plane(b.quants), _row_plane(b.factors, 1)),
    "Q5_0": lambda b: _join(_lane_plane(b.quants), _row_plane(b.high, 4), _row_plane(b.factors, 2)),
    "Q5_1": lambda b: _join(_lane_plane(b.quants), _row_plane(b.high, 4), _row_plane(b.factors, 4)),
    "Q8_0": lambda b: _join(_lane_plane(b.quants, b.quants + 16), _row_plane(b.factors, 2)),
    "Q2_K": lambda b: _join(*_vectors(b.quants, 2), _row_plane(b.scales, 16, False), _row_plane(b.factors, 4)),
    "Q3_K": lambda b: _join(
        *(*_vectors(b.high, 1), *_vectors(b.quants, 2)),
        *(_row_plane(b.scales + 4 * k, 4) for k in range(3)),
        _row_plane(b.factors, 2),
    ),
    # d, dmin, scales[12] together, then qs[128]
    "Q4_K": lambda b: _join(*_vectors(b.quants, 4), _row_plane(b.factors, 16, False)),
    # d, dmin, scales[12] together, qh[32], qs[128]
    "Q5_K": lambda b: _join(*_vectors(b.quants, 4), *_vectors(b.high, 1), _row_plane(b.factors, 16, False)),
    "Q6_K": lambda b: _join(
        *(*_vectors(b.quants, 4), *_vectors(b.high, 2)), _row_plane(b.scales, 16, False), _row_plane(b.factors, 2)
    ),
    # Blocks of 16 bytes, low nibbles first; factors and scales are together.
    "IQ4_XS": lambda b: _join(*_vectors(b.quants, 4), _row_plane(b.factors, 8)),
    # Eight times (four grid indices, a word of signs and scale): every lane of a row needs all of it.
    "IQ2_XXS": lambda b: _join(*(_row_plane(b.quants + 16 * k, 16, False) for k in range(4)), _row_plane(b.factors, 2)),
    # For each block the groups 0 and 2 for one half of a row's lanes, 1 and 3 for the other.
    "IQ2_XS": lambda b: _join(
        *(_lane_plane(*(b.quants + 16 * v + 4 * k for k in range(4)), size=2, shares=2) for v in range(4)),
        *(_row_plane(b.scales, 8), _row_plane(b.factors, 2)),
    ),
    "IQ2_S": lambda b: _join(
        *(
            _lane_plane(
                *(
                    start + 4 * k
                    for k in (2 * v, 2 * v + 1)
                    for field in (b.quants, b.signs)
                    for start in (field, field + 2)
                ),
                size=1,
                shares=2,
            )
            for v in range(4)
        ),
        *(_row_plane(b.high, 16, False), _row_plane(b.factors, 2)),
    ),
    # For each block the byte of a lane's four positions of the first 16, and of the other 16.
    "IQ3_XXS": lambda b: _join(
        *(_lane_plane(*(b.quants + 32 * v + 4 * k for k in range(8)), size=1) for v in range(2)),
        *(_row_plane(b.signs + 16 * k, 16, False) for k in range(2)),
        _row_plane(b.factors, 2),
    ),
    "IQ3_S": lambda b: _join(
        *(_lane_plane(*(b.quants + 32 * v + 4 * k for k in range(8)), size=1) for v in range(2)),
        *_groups(b.signs),
        *(_row_plane(b.high, 8), _row_plane(b.scales, 4), _row_plane(b.factors, 2)),
    ),
    "IQ1_S": lambda b: _join(*_groups(b.quants), _row_plane(b.high, 16, False), _row_plane(b.factors, 2)),
    "IQ1_M": lambda b: _join(*_groups(b.quants), _row_plane(b.high, 16, False), _row_plane(b.scales, 8)),
    "TQ2_0": lambda b: _join(*_vectors(b.quants, 2), _row_plane(b.factors, 2)),
    "TQ1_0": lambda b: _join(
        *(*_vectors(b.quants, 1), _lane_plane(b.quants + 32)), _row_plane(b.high, 4), _row_plane(b.factors, 2)
    ),
    "Q1_0": lambda b: _join(_row_plane(b.quants, 16, False), _row_plane(b.factors, 2)),
    "Q2_0": lambda b: _join(_lane_plane(*(b.quants + 4 * k for k in range(4)), size=1), _row_plane(b.factors, 2)),
    # Two units at a time: a byte has two positions, which belong to lanes t and t + 2.
    "NVFP4": lambda b: _join(
        *(_lane_plane(b.quants + 16 * v, b.quants + 16 * v + 8, shares=2) for v in range(2)),
        _row_plane(b.factors, 4),
    ),
}


def _vectors(start: int, n: int) -> list[_Plane]:
    """Lane planes of n runs of 32 bytes, a vector of four words for each lane."""
    return [_lane_plane(start + 32 * v, start + 32 * v + 16) for v in range(n)]


def _groups(start: int) -> list[_Plane]:
    """Lane planes of 32 bytes, one for each group of 8: for each block the groups 0 and 2 for one half of a row's lanes, 1
    and 3 for the other."""
    return [_lane_plane(*(start + 16 * v + 2 * k for k in range(8)), size=1, shares=2) for v in range(2)]


@cache
def record(type_: T) -> np.ndarray:
    """The source of each byte of a record: row * block_bytes + byte, int32 [16 * block_bytes]."""
    entry = FORMATS[type_]
    places = _RECORDS[entry.name](_Block(**{field.name: field.start for field in entry.fields}))
    block_bytes = entry.block_bytes
    return np.array([row * block_bytes + byte for row, byte in places], np.int32)


def repack_rows(entry: Format, data: np.ndarray) -> np.ndarray:
    """Packed rows uint8 [rows, row bytes] to records uint8 [tiles, blocks, 16 * block_bytes]: the law of the kernel."""
    rows, row_bytes = data.shape
    tiles = -(-rows // TILE)
    padded = np.zeros((tiles * TILE, row_bytes), np.uint8)
    padded[:rows] = data
    blocks = padded.reshape(tiles, TILE, row_bytes // entry.block_bytes, entry.block_bytes).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(blocks.reshape(tiles, -1, TILE * entry.block_bytes)[:, :, record(entry.type)])


def repacked_bytes(entry: Format, rows: int, columns: int) -> int:
    """Device memory of a repacked matrix, in bytes."""
    return -(-rows // TILE) * TILE * entry.row_bytes(columns)


@kernel(U8P, I32P, U32P, i32, i32, i32, threads=256)
def repack(unit_bytes: int, per_tile: int = TILE, turned: bool = False) -> KernelCode:
    """Packed rows to records, or smaller records to records.

    Formula: record[tile, u][b] = unit[per_tile * tile + place[b] / unit_bytes, u][place[b] % unit_bytes], and 0 for a unit
        that does not exist.  A unit is a block of a row, or a record of the CPU (``regroup.py``).  With ``turned``, place[b]
        = -1 - (4 w + n) stands for byte n of the word at place w, whose bit 4 q + c is bit q of byte c there.
    Shapes: units uint8 [n_units, blocks, unit_bytes]; place int32 [per_tile * unit_bytes]; records, in words of four bytes,
        [tiles, blocks, per_tile * unit_bytes / 4].
    Who owns what: block (u, tile - first) of 256 threads, each thread one word at a time; the grid covers tiles first ..
    Reduction order: none.
    Bytes moved: each byte is read once (eight times in turned words) and written once.
    """
    words = per_tile * unit_bytes // 4

    @cuda.jit
    def repack(units, place, records, n_units, blocks, first):
        let_next_begin()
        wait_for_inputs()
        u = i32(cuda.blockIdx.x)
        tile = i32(cuda.blockIdx.y)
        for w in range(cuda.threadIdx.x, words, 256):
            word = np.uint32(0)
            for k in range(4):
                source = place[4 * w + k]
                part = i32(-1)
                if turned and source < 0:
                    part = i32((-1 - source) % 4)
                    source = i32((-1 - source) // 4)
                unit = i32(tile * per_tile + source // unit_bytes)
                if unit < n_units:
                    at = np.int64(unit) * np.int64(blocks * unit_bytes) + np.int64(u * unit_bytes + source % unit_bytes)
                    byte = np.uint32(0)
                    if turned and part >= 0:
                        for j in range(8):
                            stored = np.uint32(units[at + np.int64(j % 4)])
                            byte |= ((stored >> np.uint32(2 * part + j // 4)) & np.uint32(1)) << np.uint32(j)
                    else:
                        byte = np.uint32(units[at])
                    word = np.uint32(word | (byte << np.uint32(8 * k)))
            records[(np.int64(first + tile) * blocks + u) * words + w] = word

    return repack
