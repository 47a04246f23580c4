"""Memory for the intermediate results of recorded passes.

The operations of a pass run in the order in which they were recorded.  When the last reference to an array disappears while
a pass is being recorded, its memory can therefore be used for the results of operations that are recorded later.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from engine.cpu import mapping

ALIGNMENT = 64
"""The alignment of arrays in bytes, a cache line."""

SLAB = 32 << 20
"""Bytes of a slab: small matrices share one."""

LARGE = 1 << 20
"""The size in bytes from which memory is reused for arrays of other sizes, and from which unused memory can be returned to
the system."""


def aligned(n_bytes: int, zeroed: bool = False) -> np.ndarray:
    """Memory aligned to a cache line, uint8 [n_bytes]; zeroed: whether it is zeroed or uninitialized."""
    if n_bytes >= LARGE:
        return mapping.mapped(n_bytes)
    raw = (np.zeros if zeroed else np.empty)(n_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + n_bytes]


class Slabs:
    """Memory for arrays that live as long as a model, in slabs of huge pages: a pass reads all weights, so it needs few
    entries of the address translation cache."""

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)

    def take(self, n_bytes: int) -> np.ndarray:
        """Zeroed memory aligned to a cache line, uint8 [n_bytes].  A slab is freed when no array is left in it."""
        size = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        if size > SLAB // 4:
            return mapping.mapped(n_bytes)
        if size > self._left.size:
            self._left = mapping.mapped(SLAB)
        array, self._left = self._left[:n_bytes], self._left[size:]
        return array


class Allocation:
    """The memory of one array, which is returned to its pool when neither the array nor a view of it exists."""

    def __init__(self, pool: "Pool", slab: np.ndarray) -> None:
        self._pool = pool
        self._slab = slab
        self.__array_interface__: dict[str, Any] = slab.__array_interface__

    def __del__(self) -> None:
        self._pool.give_back(self._slab)


class Pool:
    """A pool of memory.  ``n_bytes``: its size in bytes, including the memory in use.

    Memory that is returned within a stage is not reused before the next stage.  An operation of the stage may still read it
    while another operation of the same stage, recorded later, writes its result.
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        self._unused: dict[int, list[np.ndarray]] = {}
        self._read: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """An uninitialized array.  The memory of a large array may have up to eight times its size, so that passes of fewer
        rows use the memory of the largest pass."""
        count = math.prod(shape)
        wanted = count * np.dtype(dtype).itemsize
        # Round to a few sizes, so that arrays of similar sizes can use the same memory.
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
        return np.asarray(Allocation(self, slab))[:wanted].view(dtype).reshape(shape)

    def give_back(self, slab: np.ndarray) -> None:
        """Return memory to the pool, for arrays of later stages."""
        self._read.append(slab)

    def begin_stage(self) -> None:
        """Make the returned memory available.  To be called when the operation that is being recorded begins a stage."""
        for slab in self._read:
            self._unused.setdefault(slab.size, []).append(slab)
        self._read.clear()

    def rest(self) -> None:
        """Return the unused memory of large arrays to the system.  It becomes zeroed memory when passes use it again, which
        is safe because a pass writes intermediate results before it reads them."""
        for slabs in (self._read, *self._unused.values()):
            for slab in slabs:
                mapping.give_back(slab, [(0, slab.size)])

    def resume(self) -> None:
        """Allow huge pages for large arrays again."""
        for slabs in (self._read, *self._unused.values()):
            for slab in slabs:
                mapping.resume(slab)


def owner(array: np.ndarray) -> object:
    """The object that owns the memory of an array."""
    held: object = array
    while isinstance(held, np.ndarray):
        if held.base is None:
            return held
        held = held.base
    return held
