"""The cache of a layer of the CPU on a GPU, for the time of a pass that the GPU computes for it.

What a pass of one sequence reads is copied to the GPU before the pass, and what it stores is copied back after it.  Pages
have the same numbers in both memories, and the tables of pages are equal, so all layers with the same specification use the
same memory on the GPU, one after another.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from engine.cache.kv import KVCache
from engine.cache.pages import PagedMemory, PagePool
from engine.cache.spec import CacheSpec, LayerMemory


class MirrorDevice(Protocol):
    """What a mirror uses of the backend of its memory."""

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """A zeroed array."""

    def store(self, target: Any, first: int, rows: np.ndarray) -> None:
        """target[first : first + len(rows)] = rows."""

    def copy_in(self, target: Any, source: np.ndarray, axis: int, first: int, end: int) -> None:
        """Copy entries [first, end) of an axis from an array in host memory to an array of the same shape."""

    def copy_out(self, source: Any, target: np.ndarray, axis: int, first: int, end: int) -> None:
        """Copy entries [first, end) of an axis to an array in host memory of the same shape."""


class Mirrors:
    """Memory on a device for the layers of a cache whose own memory is that of the host, one for each specification."""

    def __init__(self, cache: KVCache, device: MirrorDevice) -> None:
        self._cache = cache
        self._device = device
        sizes = cache.n_sequences, cache.capacity, cache.pools
        self._memory = PagedMemory(cache.n_ctx, cache.max_rows, device.zeros, device.store, *sizes)
        self._layers: dict[CacheSpec, LayerMemory[Any]] = {}

    def layer(self, index: int) -> "LayerMirror":
        """The mirror of a layer of the cache.  Raises DeviceError if memory runs out."""
        spec = self._cache.specs[index]
        if spec not in self._layers:
            self._layers[spec] = spec.allocate(self._memory, self._cache.types)
        return LayerMirror(self._cache, index, self._layers[spec], self._device)


class LayerMirror:
    """The mirror of a layer.  ``memory``: its memory on the device."""

    def __init__(self, cache: KVCache, index: int, memory: LayerMemory[Any], device: MirrorDevice) -> None:
        self.memory = memory
        self._device = device
        own = cache.layers[index]
        paged = {id(each.array): each for place in (cache, *cache.memories.values()) for each in place.paged}
        tables = {id(table) for place in (cache, *cache.memories.values()) for table in place.tables}
        #: (pool, positions of a page, window, axis of pages, array of the host, array of the device)
        self._paged: list[tuple[PagePool, int, int, int, np.ndarray, Any]] = []
        #: The rings of all sequences, (array of the host, array of the device).
        self._rings: list[tuple[np.ndarray, Any]] = []
        spans = {id(pool): paging for paging, pool in cache.pools.items()}
        for host, copy in _arrays(own, memory):
            if id(host) in paged:
                pool, axis = paged[id(host)].pool, paged[id(host)].axis
                paging = spans[id(pool)]
                self._paged.append((pool, paging.span, paging.window, axis, host, copy))
            elif id(host) not in tables:
                self._rings.append((host, copy))

    def copy_in(self, slot: int, first: int, end: int) -> None:
        """Copy what a pass of the sequence in a slot reads that begins at position ``first``.  end: the position after the
        last one that is stored."""
        for pool, span, window, axis, host, copy in self._paged:
            low = max(0, first - window) // span if window else 0
            for run in pool.placed(slot, low, -(-end // span)):
                self._device.copy_in(copy, host, axis, *run)
        if first:
            for host, copy in self._rings:
                self._device.copy_in(copy, host, 0, slot, slot + 1)

    def copy_out(self, slot: int, first: int, end: int) -> None:
        """Copy what a pass of the sequence in a slot over the positions [first, end) has stored."""
        for pool, span, _, axis, host, copy in self._paged:
            for run in pool.placed(slot, first // span, -(-end // span)):
                self._device.copy_out(copy, host, axis, *run)
        for host, copy in self._rings:
            self._device.copy_out(copy, host, 0, slot, slot + 1)


def _arrays(own: Any, other: Any) -> Iterator[tuple[np.ndarray, Any]]:
    """The arrays of the host in a dataclass, and in the dataclasses that are part of it, with those of ``other``."""
    for field in fields(own):
        mine, theirs = getattr(own, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray):
            yield mine, theirs
        elif is_dataclass(mine):
            yield from _arrays(mine, theirs)
