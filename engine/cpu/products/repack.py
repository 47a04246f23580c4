"""From the rows of a file to records of eight rows: the same bytes, arranged so that eight rows are eight lanes.

Formula: a record holds one unit of each of eight consecutive rows.  A field of the unit (``engine/gguf/quants.py``), in
    pieces of ``size`` bytes, becomes [piece][row][size]: factors are pieces of two bytes, scales pieces of one byte (a
    *plane*), and all others pieces of four bytes, so that a vector of 32 bytes holds four consecutive bytes of each of eight
    rows.
Shapes: source uint8 [rows, row bytes]; records uint8 [count, groups, units * 8 * unit bytes], groups = ceil(rows / 8); the
    missing rows of a last group are zeros.
Who owns what: an item is a group of eight rows.
Bytes moved: each row once in, once out.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.cpu.runtime.entry import entry_of
from engine.cpu.simd import I8, I16, I32, Code, Vec, data_of
from engine.gguf.quants import Format
from engine.gguf.reader import PIECE, FilePiece, HostBuffer
from engine.ops.weight import Weight

ROWS = 8
"""Rows of a record."""


SIZES = {"factors": 2, "scales": 1}
"""Bytes of a piece of a field, by its name, if not four."""


@dataclass(frozen=True)
class Records:
    """A quantized matrix, or ``count`` stacked ones, in records of eight rows.

    ``rows``: of each matrix; ``data``: uint8 [count, ceil(rows / 8), units * 8 * unit bytes].
    """

    name: str
    format: Format
    rows: int
    columns: int
    count: int
    data: np.ndarray


Matrix = Records | Weight
"""Quantized matrices are records of eight rows; those of float formats, and tables of which a pass reads only a few rows, are
the mapped rows of the file."""


def fields_of(entry: Format) -> np.ndarray:
    """The fields of a block for :func:`repack`, in the order of its record: int64 [n, 4], each (source, pieces, size of a
    piece, turned).

    ``turned``: pieces are words of 32 bits, one for each weight; bit 4 q + c becomes bit q of byte c, so that a shift by q
    and a mask give the bits of four consecutive weights.
    """
    assert sum(field.length for field in entry.fields) == entry.block_bytes
    rows = []
    for part in range(entry.parts):
        for field in entry.fields:
            length = field.length // entry.parts
            size = min(SIZES.get(field.name, 4), length)
            rows.append((field.start + part * length, length // size, size, field.bits))
    return np.array(rows, np.int64)


def _turned(words: Vec) -> Vec:
    """Words of 32 bits whose bit 4 q + c becomes bit 8 c + q."""
    # Twice the outer unshuffle (even bits to the lower half; Warren, Hacker's Delight, 7-2) turns the bits of an index by 2.
    for _ in range(2):
        for shift, mask in ((1, 0x22222222), (2, 0x0C0C0C0C), (4, 0x00F000F0), (8, 0x0000FF00)):
            swapped = (words ^ words >> shift) & mask
            words = words ^ swapped ^ swapped << shift
    return words


def _make_copy(lane: ir.IntType, turned: bool = False) -> Callable[..., Any]:
    """``copy(target, i, source, j, stride)``: eight pieces, ``stride`` bytes apart, one after another."""

    @intrinsic
    def copy(typingctx, target, i, source, j, stride):
        def codegen(context, builder, sig, args):
            code = Code(builder, "plain")
            to = code.at(data_of(context, builder, sig.args[0], args[0]), args[1])
            place = code.at(data_of(context, builder, sig.args[2], args[2]), args[3])
            for r in range(ROWS):
                code.store(code.load(place, 0, lane, 1), to, r * lane.width // 8)
                place = code.at(place, args[4])
            if turned:
                code.store(_turned(code.load(to, 0, lane, ROWS)), to)
            return context.get_dummy_value()

        return types.void(target, types.int64, source, types.int64, types.int64), codegen

    return copy


_copy1, _copy2, _copy4, _copy_turned = _make_copy(I8), _make_copy(I16), _make_copy(I32), _make_copy(I32, True)


@njit(cache=True)
def repack(source, fields, block_bytes, begin, pitch, rows, data, first, last):
    """Copy groups [first, last) of eight rows into their records.

    Row r of matrix e is row ``e * pitch + begin + r`` of ``source`` uint8 [n, row bytes]; an item e * groups + g is group g
    of matrix e.  ``fields``: :func:`fields_of`; ``data``: as in :class:`Records`.
    """
    groups = data.shape[1]
    stride = source.shape[1]
    block = np.empty((ROWS, block_bytes), np.uint8)
    for item in range(first, last):
        e, g = item // groups, item % groups
        row = e * pitch + begin + ROWS * g
        count = min(ROWS, rows - ROWS * g)
        to = item * data.shape[2]
        for u in range(stride // block_bytes):
            if count == ROWS:
                to = _repack_block(source, row * stride + u * block_bytes, stride, fields, data, to)
            else:
                for r in range(ROWS):
                    for i in range(block_bytes):
                        block[r, i] = source[row + r, u * block_bytes + i] if r < count else 0
                to = _repack_block(block, 0, block_bytes, fields, data, to)


@njit
def _repack_block(source, at, stride, fields, data, to):
    """Write a record at byte ``to`` from eight blocks, the first at byte ``at``, ``stride`` bytes apart; returns its end."""
    for f in range(fields.shape[0]):
        place, pieces, size, turned = at + fields[f, 0], fields[f, 1], fields[f, 2], fields[f, 3]
        if turned:
            for i in range(pieces):
                _copy_turned(data, to + 32 * i, source, place + 4 * i, stride)
        elif size == 4:
            for i in range(pieces):
                _copy4(data, to + 32 * i, source, place + 4 * i, stride)
        elif size == 2:
            for i in range(pieces):
                _copy2(data, to + 16 * i, source, place + 2 * i, stride)
        else:
            for i in range(pieces):
                _copy1(data, to + 8 * i, source, place + i, stride)
        to += ROWS * size * pieces
    return to


def _allocate(n_bytes: int) -> np.ndarray:
    return np.empty(n_bytes, np.uint8)


def empty_records(weight: Weight, count: int, allocate: Callable[[int], np.ndarray] = _allocate) -> Records:
    """Memory for the rows of ``weight`` as ``count`` stacked matrices of records.  allocate: returns uint8 [n] for n."""
    rows, entry = weight.rows // count, weight.format
    shape = count, -(-rows // ROWS), ROWS * entry.row_bytes(weight.columns)
    data = allocate(math.prod(shape)).reshape(shape)
    return Records(weight.name, entry, rows, weight.columns, count, data)


def arguments_of(weight: Weight, records: Records) -> tuple[Any, ...]:
    """The arguments of :func:`repack`, without the range, that copy the rows of ``weight`` to ``records``."""
    entry, pitch = weight.format, weight.pitch or records.rows
    return weight.data, fields_of(entry), entry.block_bytes, weight.first, pitch, records.rows, records.data


def pieces_of(weight: Weight, records: Records) -> Iterator[FilePiece[HostBuffer]]:
    """Parts of ``weight``, each of which is copied to its place in ``records`` when it is read.  Compiles :func:`repack` if
    it is not compiled yet."""
    arguments = arguments_of(weight, records)
    run, fields = entry_of(repack, arguments).function(), arguments[1]
    count, groups, _ = records.data.shape
    row_bytes = weight.data.shape[1]
    step = max(1, PIECE // (ROWS * row_bytes))

    def fill(matrix: int, first: int, last: int, buffer: HostBuffer, n_bytes: int) -> None:
        source = buffer.data[:n_bytes].reshape(-1, row_bytes)
        data = records.data[matrix : matrix + 1]
        begin = -ROWS * first  # the buffer begins with this group
        run((source, fields, weight.format.block_bytes, begin, 0, records.rows, data), first, last)

    for matrix in range(count):
        start = matrix * records.rows
        for first in range(0, groups, step):
            last = min(groups, first + step)
            rows = start + ROWS * first, start + min(ROWS * last, records.rows)
            yield FilePiece(weight.stretches(*rows), partial(fill, matrix, first, last))


def make_records(weight: Weight, count: int, run: Callable[..., Any]) -> Records:
    """The rows of ``weight`` as ``count`` stacked matrices of records.  ``run(kernel, *arguments, items=n)`` executes
    ``kernel(*arguments, first, last)`` over the items [0, n)."""
    records = empty_records(weight, count)
    run(repack, *arguments_of(weight, records), items=count * records.data.shape[1])
    return records
