"""The contents of pages by position, read from NumPy arrays in the memory layout of the caches."""

import math
from typing import Any

import numpy as np

from engine.cache.types import CHUNK, CacheType

Paged = tuple[Any, Any]
"""Pages [pages, 64, d], and the page table int32 [sequences, chunks].  Functions read the sequence in slot 0."""


def rows_at(paged: Paged, positions: np.ndarray) -> np.ndarray:
    """The rows at the given positions, int64 [n], of the sequence in slot 0: [n, d]."""
    pages, table = paged
    found: np.ndarray = pages[table[0, positions // CHUNK], positions % CHUNK]
    return found


def by_lane(memory: np.ndarray, kind: CacheType, by_position: bool) -> list[np.ndarray]:
    """Views [n_head_kv, pages, 64, ...] of pages of keys, or of values if ``by_position``: of the elements, or, for
    quantized types, of the words and of the scales."""
    if not kind.quantized:
        return [memory if by_position else memory.swapaxes(2, 3)]
    (heads, pages, words), bits = memory.shape, kind.bits
    n = words * 2 * bits // (2 * bits + 1)
    integers, scales = memory[..., :n], memory[..., n:].view(np.uint16)
    if by_position:
        return [part.reshape(heads, pages, CHUNK, -1) for part in (integers, scales)]
    return [
        integers.reshape(heads, pages, -1, CHUNK, 4).swapaxes(2, 3),
        scales.reshape(heads, pages, -1, CHUNK).swapaxes(2, 3),
    ]


def integer_rows(pages: np.ndarray, kind: CacheType, d: int, by_position: bool) -> np.ndarray:
    """The contents by position of pages, uint32 words [n, words], of integer keys, or of integer values if ``by_position``:
    uint32 [n, 64, columns], first the bytes, then the scales."""
    n, data = len(pages), pages.view(np.uint8)
    # Runs of bytes: (first, columns).  A byte holds the low bits of two elements of i12.
    runs = [(0, d)] + ([(CHUNK * d, d // 2)] if kind.bits == 12 else [])
    parts: list[np.ndarray] = []
    for first, columns in runs:
        run = data[:, first : first + CHUNK * columns]
        if by_position:
            parts.append(run.reshape(n, CHUNK // 4, columns, 4).swapaxes(2, 3).reshape(n, CHUNK, columns))
        else:
            parts.append(run.reshape(n, columns // 4, CHUNK, 4).swapaxes(1, 2).reshape(n, CHUNK, columns))
    scales = np.ascontiguousarray(pages[:, kind.integer_words(d) :]).view(np.uint16)
    parts.append(scales.reshape(n, -1, CHUNK).swapaxes(1, 2))
    return np.concatenate([part.astype(np.uint32) for part in parts], 2)


def stored(
    memory: np.ndarray, kind: CacheType, d: int, by_position: bool, pages: np.ndarray, lanes: np.ndarray
) -> np.ndarray:
    """The contents of the places ``lanes`` of ``pages``, both [places], with heads of d elements: [places, n_head_kv, d], or,
    for quantized types, uint32 [places, n_head_kv, ...] with words and then scales.  memory: the pages of keys, or of values
    if ``by_position``."""
    if kind.whole:
        picked = np.ascontiguousarray(memory[:, pages].reshape(-1, memory.shape[2]))
        rows = integer_rows(picked, kind, d, by_position).reshape(len(memory), len(pages), CHUNK, -1)
        return np.ascontiguousarray(rows[:, np.arange(len(pages)), lanes].swapaxes(0, 1))
    parts = [part[:, pages, lanes].swapaxes(0, 1) for part in by_lane(memory, kind, by_position)]
    flat = [part.reshape(*part.shape[:2], math.prod(part.shape[2:])) for part in parts]
    return np.concatenate([part.astype(np.uint32) for part in flat], 2) if kind.quantized else flat[0]
