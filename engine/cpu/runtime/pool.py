"""Memory for the intermediate results of recorded passes.

The operations of a pass run in the order in which they were recorded.  So when the last reference to an array disappears
while a pass is being recorded, its memory can hold the results of operations that are recorded later.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from engine.cpu import mapping

ALIGNMENT = 64
"""Arrays begin at cache lines."""

LARGE = 1 << 20
"""Size in bytes from which results share memory regardless of their exact sizes, and from which memory can go back to the
system while it is not used."""


def aligned(n_bytes: int, zeroed: bool = False) -> np.ndarray:
    """Memory that begins at a cache line, uninitialized or ``zeroed``: uint8 [n_bytes]."""
    if n_bytes >= LARGE:
        return mapping.mapped(n_bytes)
    raw = (np.zeros if zeroed else np.empty)(n_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + n_bytes]


class Block:
    """Memory of one array, which returns to its pool when neither the array nor a view of it exists."""

    def __init__(self, pool: "Pool", slab: np.ndarray) -> None:
        self._pool = pool
        self._slab = slab
        self.__array_interface__: dict[str, Any] = slab.__array_interface__

    def __del__(self) -> None:
        self._pool.give_back(self._slab)


class Pool:
    """Unused memory, by its size in bytes.  ``n_bytes``: its size, with that of the memory in use.

    What becomes unused within a stage is not used again before the next one: an operation of the stage may still read it
    while others, which are recorded later, write their results.
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        self._unused: dict[int, list[np.ndarray]] = {}
        self._read: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """An uninitialized array.  The memory of a large one may be up to eight times as large, so that passes of fewer rows
        use the memory of the largest pass."""
        count = math.prod(shape)
        wanted = count * np.dtype(dtype).itemsize
        # Few sizes, so that arrays of similar sizes share memory.
        size = max(ALIGNMENT, 1 << (wanted - 1).bit_length()) if wanted else ALIGNMENT
        if size > 1 << 16:
            step = size >> 3
            size = -(-wanted // step) * step
        if size >= LARGE:
            size = min((s for s, slabs in self._unused.items() if slabs and size <= s <= 8 * size), default=size)
        slabs = self._unused.get(size)
        if slabs:
            slab = slabs.pop()
        else:
            slab = aligned(size)
            self.n_bytes += size
        return np.asarray(Block(self, slab))[:wanted].view(dtype).reshape(shape)

    def give_back(self, slab: np.ndarray) -> None:
        """Let arrays of later stages use this memory."""
        self._read.append(slab)

    def begin_stage(self) -> None:
        """Let arrays from now on use the memory that was given back before the operation that is being recorded, which begins
        a stage."""
        for slab in self._read:
            self._unused.setdefault(slab.size, []).append(slab)
        self._read.clear()

    def rest(self) -> None:
        """Give the memory of large arrays back to the system until passes use it again: what they read of it, they have
        written before."""
        for slabs in (self._read, *self._unused.values()):
            for slab in slabs:
                mapping.give_back(slab, [(0, slab.size)])

    def resume(self) -> None:
        """Let large arrays have huge pages again."""
        for slabs in (self._read, *self._unused.values()):
            for slab in slabs:
                mapping.resume(slab)


def owner(array: np.ndarray) -> object:
    """The object whose memory an array is a view of."""
    held: object = array
    while isinstance(held, np.ndarray):
        if held.base is None:
            return held
        held = held.base
    return held
