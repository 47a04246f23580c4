"""Large arrays in host memory whose pages can go back to the system while nothing is in them.

The system gives an array physical memory when it is first written, in huge pages where it can: reading keys and values that
are spread over many small pages is 5 to 10 % slower.  But a huge page is as large as the keys of one head in 8192 positions
of a model with 128 elements per head in float16, so a short text can take up many times its size.  That memory is given back
when a model has nothing to do (:func:`give_back`), and until it goes on (:func:`resume`) the system must not join small pages
again.
"""

import mmap
import sys
from collections.abc import Iterable, Sequence

import numpy as np

HUGE = 2 << 20
"""Bytes of a huge page."""

LEAST_RANGE = 64 << 10
"""Bytes of a range that is worth a call of the system."""

ADVISED = 4 << 20
"""Bytes from which the system is asked for huge pages, as NumPy does for its arrays."""

LINUX = sys.platform == "linux"


def mapped(n_bytes: int) -> np.ndarray:
    """Zeroed memory that begins at a page and goes back to the system with the last view of it: uint8 [n_bytes], at least
    one.  Raises MemoryError."""
    if not LINUX:
        return np.zeros(n_bytes, np.uint8)
    try:
        memory = mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{n_bytes} bytes cannot be allocated") from error
    array = np.frombuffer(memory, np.uint8)
    resume(array)
    return array


def give_back(array: np.ndarray, ranges: Sequence[tuple[int, int]]) -> None:
    """Give the memory of ranges of bytes [first, end), in rising order, back to the system if the array is part of one of
    :func:`mapped`: of huge pages of which at least half is in none of the ranges, nothing, and else all ranges of at least
    ``LEAST_RANGE`` bytes.  What was in them is lost: they are zero when they are read again."""
    memory, start = _mapping(array)
    if memory is None or not ranges:
        return
    # A huge page begins at a multiple of its size in the address space, not in the mapping.
    base = _address(memory)
    limit = base + len(memory)
    found = np.array(ranges, np.int64) + base + start
    blocks = np.arange(base // HUGE, -(-limit // HUGE) + 1) * HUGE
    # The bytes of ranges below an address are a line that rises within ranges.
    edges = found.reshape(-1)
    below = np.cumsum(np.diff(edges, prepend=edges[0]) * (np.arange(edges.size) % 2))
    unused = np.diff(np.interp(blocks, edges, below))
    whole = np.diff(blocks.clip(base, limit)) - unused > HUGE // 2
    for first, end in found.tolist():
        low, high = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if low < high and whole[low // HUGE - base // HUGE]:
            low = (low // HUGE + 1) * HUGE
        if low < high and whole[(high - 1) // HUGE - base // HUGE]:
            high = (high - 1) // HUGE * HUGE
        if high - low < LEAST_RANGE:
            continue
        # The huge pages at both ends, of which parts are in use.
        outer, beyond = max(low // HUGE * HUGE, base), min(-(-high // HUGE) * HUGE, limit)
        _advise(memory, mmap.MADV_NOHUGEPAGE, outer - base, beyond - outer)
        _advise(memory, mmap.MADV_DONTNEED, low - base, high - low)


def resume(array: np.ndarray) -> None:
    """Let the system use huge pages for an array of :func:`mapped` again."""
    memory, _ = _mapping(array)
    if memory is not None and len(memory) >= ADVISED:
        _advise(memory, mmap.MADV_HUGEPAGE, 0, len(memory))


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in rising order, with those joined of which one begins where the other ends."""
    found: list[tuple[int, int]] = []
    for first, end in ranges:
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, end))
    return found


def whole_mapping(array: np.ndarray) -> np.ndarray | None:
    """All bytes of the mapping that an array is a view of, uint8 [n]; None for other arrays."""
    memory, _ = _mapping(array)
    return None if memory is None else np.frombuffer(memory, np.uint8)


def _mapping(array: np.ndarray) -> tuple[mmap.mmap | None, int]:
    """The mapping that an array is a view of, and the offset of the array in it."""
    owner: object = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if not LINUX or not isinstance(owner, mmap.mmap):
        return None, 0
    return owner, array.ctypes.data - _address(owner)


def _address(memory: mmap.mmap) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def _advise(memory: mmap.mmap, advice: int, start: int, length: int) -> None:
    try:
        memory.madvise(advice, start, length)
    except OSError:
        pass  # a system without huge pages, or memory that is locked
