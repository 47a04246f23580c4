"""Pages and snapshots as values: runs of bytes that do not depend on the device, or on where pages are in memory.

A page has entries in the arrays of all layers of its kind.  Its value is these entries, one after another: layer by layer as
in the model, and within a layer as in its memory.  All backends have the same memory layout within a page, so a value that
was copied from one can be copied to another.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol

import numpy as np

from engine.cache.kv import KVCache
from engine.cache.pages import Paged, Paging
from engine.cache.recurrent import Snapshot
from engine.cache.shared import SharedLayer

MOST_LINE = 1 << 20
"""Bytes of the line of a snapshot."""


class EntryOperations(Protocol):
    """What copies pages to and from the memory of a layer (``engine/ops/memory.py``)."""

    def read_entries(self, source: Any, axis: int, first: int, end: int) -> np.ndarray:
        """Entries [first, end) of an axis of an array as a NumPy array of their own."""

    def write_entries(self, target: Any, axis: int, first: int, values: np.ndarray) -> None:
        """Replace the entries of an axis from ``first`` on."""


@dataclass(frozen=True)
class _PagedArray:
    """An array of a layer that is divided into pages.  entry: the shape of the part of a page; n_bytes: its size."""

    ops: EntryOperations
    array: Any
    axis: int
    dtype: np.dtype[Any]
    entry: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.entry) * self.dtype.itemsize


class PageValues:
    """The values of the pages of a cache."""

    def __init__(self, cache: KVCache, owners: Iterable[EntryOperations]) -> None:
        """owners: what copies the memory of each layer of the cache."""
        memories = {id(each): each for each in (cache, *cache.memories.values())}
        paged = {id(each.array): each for memory in memories.values() for each in memory.paged}
        kinds = {id(pool): paging for paging, pool in cache.pools.items()}
        self._parts: dict[Paging, list[_PagedArray]] = {paging: [] for paging in cache.pools}
        layers = (pair for ops, layer in zip(owners, cache.layers, strict=True) for pair in _shares(ops, layer))
        for ops, layer in layers:
            for each in _paged_arrays(layer, paged):
                shape, dtype = tuple(each.array.shape), np.dtype(each.array.dtype)
                entry = (*shape[: each.axis], *shape[each.axis + 1 :])
                self._parts[kinds[id(each.pool)]].append(_PagedArray(ops, each.array, each.axis, dtype, entry))
        #: The kinds of pages, in an order that is the same on every device.
        self.kinds = sorted(self._parts, key=kind_of)
        #: Bytes of the value of a page of each kind.
        self.n_bytes: Mapping[Paging, int] = {
            paging: sum(part.n_bytes for part in parts) for paging, parts in self._parts.items()
        }

    @property
    def layout(self) -> str:
        """A hash of what a value consists of, as hexadecimal digits: caches with the same layout can exchange values."""
        described = [
            [*kind_of(paging), [[part.dtype.str, part.axis, *part.entry] for part in self._parts[paging]]]
            for paging in self.kinds
        ]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    def read(self, paging: Paging, pages: Sequence[int]) -> np.ndarray:
        """The values of pages of a kind, uint8 [pages, n_bytes].  Those that are adjacent in memory are copied together."""
        found = np.empty((len(pages), self.n_bytes[paging]), np.uint8)
        for places, first, end in _runs(pages):
            at = 0
            for part in self._parts[paging]:
                rows = np.moveaxis(part.ops.read_entries(part.array, part.axis, first, end), part.axis, 0)
                values = np.ascontiguousarray(rows).reshape(end - first, -1).view(np.uint8)
                found[places, at : at + part.n_bytes] = values
                at += part.n_bytes
        return found

    def write(self, paging: Paging, pages: Sequence[int], values: Sequence[np.ndarray]) -> None:
        """Copy values, uint8 [n_bytes] each, to pages of a kind.  Those that are adjacent in memory are copied together."""
        for places, first, _ in _runs(pages):
            at = 0
            for part in self._parts[paging]:
                entries = np.empty((*part.entry[: part.axis], len(places), *part.entry[part.axis :]), part.dtype)
                by_page = np.moveaxis(entries, part.axis, 0)
                for i, place in enumerate(places):
                    by_page[i] = values[place][at : at + part.n_bytes].view(part.dtype).reshape(part.entry)
                part.ops.write_entries(part.array, part.axis, first, entries)
                at += part.n_bytes


def _runs(pages: Sequence[int]) -> Iterator[tuple[np.ndarray, int, int]]:
    """Pages, in any order, as runs [first, end) of adjacent ones, each with the places of its pages among all."""
    given = np.array(pages, np.int64)
    order = np.argsort(given)
    for places in np.split(order, np.flatnonzero(np.diff(given[order]) != 1) + 1):
        yield places, int(given[places[0]]), int(given[places[-1]]) + 1


def _shares(ops: Any, layer: Any) -> Iterator[tuple[EntryOperations, Any]]:
    """The cache of a layer with its backend, or its parts with those of the devices that share it."""
    if isinstance(layer, SharedLayer):
        yield from zip(ops.owners, layer.parts, strict=True)
    else:
        yield ops, layer


def kind_of(paging: Paging) -> tuple[int, int]:
    """What distinguishes a kind of pages from the others of a model, on every device: its span and its window."""
    return paging.span, paging.window


def _paged_arrays(memory: Any, paged: Mapping[int, Paged]) -> Iterator[Paged]:
    """The arrays that are divided into pages in a dataclass, and in the dataclasses that are part of it."""
    for field in fields(memory):
        value = getattr(memory, field.name)
        if id(value) in paged:
            yield paged[id(value)]
        elif is_dataclass(value):
            yield from _paged_arrays(value, paged)


def packed(snapshot: Snapshot) -> np.ndarray:
    """A snapshot as a value, uint8 [n]: its length and the dtypes and shapes of its arrays as a line of JSON, and then the
    arrays."""
    line = np.frombuffer(_line(snapshot), np.uint8)
    return np.concatenate([line, *(np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in snapshot.arrays)])


def packed_bytes(snapshot: Snapshot) -> int:
    """The bytes of a snapshot as a value."""
    return len(_line(snapshot)) + snapshot.n_bytes


def _line(snapshot: Snapshot) -> bytes:
    shapes = [[array.dtype.str, *array.shape] for array in snapshot.arrays]
    return json.dumps([snapshot.length, shapes]).encode() + b"\n"


def unpacked(value: np.ndarray) -> Snapshot:
    """The snapshot of a value.  Raises ValueError if there is none."""
    end = value[:MOST_LINE].tobytes().find(b"\n")
    try:
        length, shapes = json.loads(value[:end].tobytes())
        arrays, at = [], end + 1
        for name, *shape in shapes:
            dtype = np.dtype(name)
            n_bytes = math.prod(shape) * dtype.itemsize
            # A copy of its own has its elements at multiples of their size.
            arrays.append(value[at : at + n_bytes].copy().view(dtype).reshape(shape))
            at += n_bytes
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if at != value.size or not isinstance(length, int):
        raise ValueError("other bytes follow the arrays")
    return Snapshot(length, arrays)
