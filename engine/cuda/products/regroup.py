"""From the records of eight rows that the CPU reads (``engine/cpu/products/repack.py``) to records of 16 rows
(``engine/cuda/products/repack.py``): for weights that stay in host memory and are copied to the device when a pass needs
them."""

from functools import cache

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cpu.products.repack import ROWS, fields_of
from engine.cuda.intrinsics import let_next_begin, wait_for_inputs
from engine.cuda.products.repack import TILE, record
from engine.cuda.runtime.compiler import I32P, U8P, U32P, i32, kernel
from engine.cuda.runtime.kinds import KernelCode
from engine.gguf.quants import FORMATS, Format

GROUPS = TILE // ROWS
"""Records of the CPU that become one record."""


@cache
def order(type_: T) -> np.ndarray:
    """The source of each byte of a record: its place in the two records of the CPU, one after the other, int32 [16 *
    block_bytes].  A byte of a word whose bits the CPU has turned is -1 - (4 w + b): byte b of the word at place w."""
    entry = FORMATS[type_]
    block_bytes = entry.block_bytes
    places, at = np.zeros((TILE, block_bytes), np.int32), 0
    groups = np.arange(GROUPS)[:, None] * ROWS * block_bytes
    for start, pieces, size, turned in fields_of(entry).tolist():
        for piece in range(pieces):
            for byte in range(size):
                word = groups + at + size * np.arange(ROWS)  # that of each row
                place = -1 - (4 * word + byte) if turned else word + byte
                places[:, start + size * piece + byte] = place.reshape(-1)
            at += ROWS * size
    return np.ascontiguousarray(places.reshape(-1)[record(type_)])


def has_turned_words(entry: Format) -> bool:
    """Whether the CPU turns the bits of words of a format."""
    return any(field.bits for field in entry.fields)


@kernel(U8P, I32P, U32P, i32, i32, i32, threads=256)
def regroup(block_bytes: int, turned: bool) -> KernelCode:
    """Records of eight rows to records of 16.

    Formula: record[tile, u][b] = pair[place[b]], where pair is records 2 tile and 2 tile + 1 of the CPU for block u, one
        after the other, and zeros for a record that does not exist.  With ``turned``, place[b] = -1 - (4 w + n) stands for
        byte n of the word at place w of the pair, whose bit 4 q + c is bit q of byte c there.
    Shapes: records of the CPU uint8 [groups, blocks, 8 * block_bytes]; place int32 [16 * block_bytes]; records, in words of
        four bytes, [tiles, blocks, 4 * block_bytes].
    Who owns what: block (u, tile - first) of 256 threads, each thread one word at a time; the grid covers tiles first ..
    Reduction order: none.
    Bytes moved: each byte is read once (eight times in turned words) and written once.
    """
    words, size = 4 * block_bytes, ROWS * block_bytes

    @cuda.jit
    def regroup(groups, place, records, n_groups, blocks, first):
        let_next_begin()
        wait_for_inputs()
        u = i32(cuda.blockIdx.x)
        tile = i32(cuda.blockIdx.y)
        for w in range(cuda.threadIdx.x, words, 256):
            word = np.uint32(0)
            for k in range(4):
                source = place[4 * w + k]
                part = i32(0)
                if turned:
                    if source < 0:
                        part = i32((-1 - source) % 4)
                        source = i32((-1 - source) // 4)
                    else:
                        part = i32(-1)
                group = i32(GROUPS * tile + source // size)
                if group < n_groups:
                    at = (np.int64(group) * np.int64(blocks) + np.int64(u)) * np.int64(size) + np.int64(source % size)
                    byte = np.uint32(0)
                    if turned and part >= 0:
                        for j in range(8):
                            stored = np.uint32(groups[at + np.int64(j % 4)])
                            byte |= ((stored >> np.uint32(2 * part + j // 4)) & np.uint32(1)) << np.uint32(j)
                    else:
                        byte = np.uint32(groups[at])
                    word = np.uint32(word | (byte << np.uint32(8 * k)))
            records[(np.int64(first + tile) * blocks + u) * words + w] = word

    return regroup
