"""From the records of eight rows that the CPU reads (``engine/cpu/products/repack.py``) to records of 16 rows
(``engine/cuda/products/repack.py``): for weights that stay in host memory and are copied to the device when a pass needs
them."""

from functools import cache

import numpy as np
from gguf import GGMLQuantizationType as T

from engine.cpu.products.repack import ROWS, fields_of
from engine.cuda.products.repack import TILE, record, repack
from engine.cuda.runtime.compiler import Specialization
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


def kernel_of(entry: Format) -> Specialization:
    """The kernel that writes records of a format from the records of the CPU."""
    turned = any(field.bits for field in entry.fields)
    return repack(ROWS * entry.block_bytes, GROUPS, turned)
