"""How weights are laid out in device memory: records of 16 rows, in the order in which tensor cores read them.

The tensor-core product of ``intrinsics.mma32`` expects in lane 4 g + t of a warp the weights at positions 4 t .. 4 t + 3
and 16 + 4 t .. of rows g and g + 8.  So 16 rows of one block form a *record* of 16 * block_bytes bytes: the same bytes as
in the file, in another order, chosen so that each lane reads what it needs as aligned vectors, and a warp reads a record
from end to end.  Record (tile, u), of rows 16 tile .. 16 tile + 15 and block u of each, begins at byte
(tile * blocks + u) * 16 * block_bytes.  Rows past the last are zeros.

A record is a sequence of *planes*, each a few words (4 bytes) per lane or per row:

* a *lane plane* of n words holds, for lanes 0 .. 31, the words a0, a1, (a2, a3) of ``mma32``: rows g and g + 8 alternate;
* a *row plane* of n bytes holds n bytes for each of the rows 0, 8, 1, 9, ..., so that the pair (g, g + 8) is adjacent, or
  (``paired`` False) for each of the rows 0 .. 15 in order.

Weights of the float formats (F32, F16, BF16) stay as they are in the file.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import let_next_begin, wait_for_inputs
from engine.cuda.runtime.compiler import I32P, U8P, U32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode
from engine.gguf.quants import Format

TILE = 16
"""Rows of a record."""

_LANES = [(lane // 4, lane % 4) for lane in range(32)]
_PAIRED = [row for g in range(8) for row in (g, g + 8)]


def _lane_plane(*starts: int) -> list[tuple[int, int]]:
    """(row, byte) of a lane plane: for each byte offset in ``starts`` the word at offset + 4 t, of rows g and g + 8."""
    return [(row, s + 4 * t + k) for g, t in _LANES for s in starts for row in (g, g + 8) for k in range(4)]


def _row_plane(start: int, n: int, paired: bool = True) -> list[tuple[int, int]]:
    """(row, byte) of a row plane: n bytes from ``start`` of every row."""
    return [(row, start + k) for row in (_PAIRED if paired else range(TILE)) for k in range(n)]


def _join(*planes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [place for plane in planes for place in plane]


# Byte offsets are those of the block's fields (ggml-common.h); see engine/cpu/products/unpack.py for what they mean.
_RECORDS: dict[T, Callable[[], list[tuple[int, int]]]] = {
    # d, qs[16]: low nibbles are positions 0 .. 15, high ones 16 .. 31, so one word serves a0 and a2.
    T.Q4_0: lambda: _join(_lane_plane(2), _row_plane(0, 2)),
    T.IQ4_NL: lambda: _join(_lane_plane(2), _row_plane(0, 2)),
    T.Q4_1: lambda: _join(_lane_plane(4), _row_plane(0, 4)),
    T.MXFP4: lambda: _join(_lane_plane(1), _row_plane(0, 1)),
    T.Q5_0: lambda: _join(_lane_plane(6), _row_plane(2, 4), _row_plane(0, 2)),
    T.Q5_1: lambda: _join(_lane_plane(8), _row_plane(4, 4), _row_plane(0, 4)),
    T.Q8_0: lambda: _join(_lane_plane(2, 18), _row_plane(0, 2)),
    # scales[16], qs[64], d, dmin
    T.Q2_K: lambda: _join(
        *(_lane_plane(16 + 32 * h, 32 + 32 * h) for h in range(2)), _row_plane(0, 16, False), _row_plane(80, 4)
    ),
    # hmask[32], qs[64], scales[12], d
    T.Q3_K: lambda: _join(
        _lane_plane(0, 16),
        *(_lane_plane(32 + 32 * h, 48 + 32 * h) for h in range(2)),
        *(_row_plane(96 + 4 * k, 4) for k in range(3)),
        _row_plane(108, 2),
    ),
    # d, dmin, scales[12] together, then qs[128]
    T.Q4_K: lambda: _join(*(_lane_plane(16 + 32 * v, 32 + 32 * v) for v in range(4)), _row_plane(0, 16, False)),
    # d, dmin, scales[12] together, qh[32], qs[128]
    T.Q5_K: lambda: _join(
        *(_lane_plane(48 + 32 * v, 64 + 32 * v) for v in range(4)), _lane_plane(16, 32), _row_plane(0, 16, False)
    ),
    # ql[128], qh[64], scales[16], d
    T.Q6_K: lambda: _join(
        *(_lane_plane(32 * v, 16 + 32 * v) for v in range(4)),
        *(_lane_plane(128 + 32 * h, 144 + 32 * h) for h in range(2)),
        _row_plane(192, 16, False),
        _row_plane(208, 2),
    ),
    # d, eight times (four grid indices, a word of signs and scale): every lane of a row needs all of it
    T.IQ2_XXS: lambda: _join(*(_row_plane(2 + 16 * p, 16, False) for p in range(4)), _row_plane(0, 2)),
    # d, scales_h, scales_l[4], qs[128]: blocks of 16 bytes, low nibbles first
    T.IQ4_XS: lambda: _join(*(_lane_plane(8 + 32 * v, 24 + 32 * v) for v in range(4)), _row_plane(0, 8)),
}


@cache
def record(type_: T) -> np.ndarray:
    """The source of each byte of a record: row * block_bytes + byte, int32 [16 * block_bytes]."""
    places = _RECORDS[type_]()
    block_bytes = max(byte for _, byte in places) + 1
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
def repack(block_bytes: int) -> KernelCode:
    """Packed rows to records.

    Formula: record[tile, u][b] = row[16 tile + place[b] / block_bytes][u * block_bytes + place[b] % block_bytes].
    Shapes: rows uint8 [rows, blocks * block_bytes]; place int32 [16 * block_bytes]; records, in words of four bytes,
        [tiles, blocks, 4 * block_bytes].
    Who owns what: block (u, tile - first) of 256 threads, each thread one word at a time; the grid covers tiles first ..
    Reduction order: none.
    Bytes moved: each byte is read once and written once.
    """
    words = 4 * block_bytes

    @cuda.jit
    def repack(rows, place, records, n_rows, blocks, first):  # type: ignore[no-untyped-def]
        let_next_begin()
        wait_for_inputs()
        u = i32(cuda.blockIdx.x)
        tile = i32(cuda.blockIdx.y)
        for w in range(cuda.threadIdx.x, words, 256):
            word = np.uint32(0)
            for k in range(4):
                source = place[4 * w + k]
                row = i32(tile * TILE + source // block_bytes)
                if row < n_rows:
                    at = np.int64(row) * np.int64(blocks * block_bytes) + np.int64(
                        u * block_bytes + source % block_bytes
                    )
                    word = np.uint32(word | (np.uint32(rows[at]) << np.uint32(8 * k)))
            records[(np.int64(first + tile) * blocks + u) * words + w] = word

    return repack
