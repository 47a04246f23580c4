"""The cache of a layer with two mixers: the caches of both."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.arrays import A
from engine.cache.pages import PagedMemory, Paging
from engine.cache.spec import CacheSpec, Download, HeldPages, LayerMemory, Ring, StoredRows
from engine.cache.types import Types


@dataclass
class PairCache(LayerMemory[A]):
    """The caches of two mixers of one layer, in their order."""

    first: LayerMemory[A]
    second: LayerMemory[A]

    @property
    def types(self) -> Types | None:
        """The element types of the cache that has some; None if the user cannot choose them."""
        return self.first.types or self.second.types

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """The mean number of bytes that a token reads and writes in both.

        visible: int64 [tokens], the number of positions that each token sees, its own included.
        """
        return self.first.bytes_per_token(visible) + self.second.bytes_per_token(visible)

    def needed(self, slot: int, position: int, pages: HeldPages) -> list[StoredRows[A]]:
        """The entries of both that a pass of the sequence in ``slot`` reads if it begins at ``position``."""
        return [*self.first.needed(slot, position, pages), *self.second.needed(slot, position, pages)]

    def contents(self, length: int, download: Download) -> Iterator[tuple[str, np.ndarray]]:
        """The names and arrays of what the next pass of the sequence in slot 0 sees in both after ``length`` tokens."""
        yield from self.first.contents(length, download)
        yield from self.second.contents(length, download)


@dataclass(frozen=True)
class PairCacheSpec(CacheSpec):
    """The specification of the cache of a layer with two mixers: those of both."""

    first: CacheSpec
    second: CacheSpec

    @property
    def _both(self) -> tuple[CacheSpec, CacheSpec]:
        return self.first, self.second

    def allocate(self, memory: PagedMemory, types: Types) -> PairCache[Any]:
        """Allocate both caches."""
        return PairCache(self.first.allocate(memory, types), self.second.allocate(memory, types))

    def page_bytes(self, types: Types) -> dict[Paging, int]:
        """The size in bytes of a page of both, for each kind of page that they have."""
        found: dict[Paging, int] = {}
        for spec in self._both:
            for paging, size in spec.page_bytes(types).items():
                found[paging] = found.get(paging, 0) + size
        return found

    def ring_bytes(self, max_rows: int) -> int:
        """The size in bytes of the rings of one sequence."""
        return sum(spec.ring_bytes(max_rows) for spec in self._both)

    def rings(self, max_rows: int) -> list[Ring]:
        """The rings of one sequence."""
        return [ring for spec in self._both for ring in spec.rings(max_rows)]

    @property
    def can_be_thinned(self) -> bool:
        """Whether both can be thinned."""
        return all(spec.can_be_thinned for spec in self._both)

    @property
    def segments(self) -> int:
        """The number of states that are stored so that tokens can be rolled back."""
        return max(spec.segments for spec in self._both)

    @property
    def snapshot_bytes(self) -> int:
        """The size in bytes of the part of both in a snapshot."""
        return sum(spec.snapshot_bytes for spec in self._both)

    @property
    def restorable(self) -> bool:
        """Whether a snapshot and pages without a window are all that a sequence needs to continue."""
        return all(spec.restorable for spec in self._both)

    def refusal(self, types: Types, architecture: str) -> str:
        """Why one of the caches cannot have these element types; "" if both can."""
        return self.first.refusal(types, architecture) or self.second.refusal(types, architecture)
