"""The cache of a layer that several devices share: each has that of its own heads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import Batch
from engine.cache.pages import PagedMemory
from engine.cache.spec import CacheSpec, Download, HeldPages, LayerMemory, StoredRows
from engine.cache.types import Types


@dataclass(frozen=True)
class OwnedArray:
    """An array in the memory of one of several owners.

    owner: the index of the owner; array: what its backend uses.
    """

    owner: int
    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        shape: tuple[int, ...] = self.array.shape
        return shape

    @property
    def dtype(self) -> DTypeLike:
        """The element type of the array."""
        return cast(DTypeLike, self.array.dtype)

    @property
    def size(self) -> int:
        """The number of elements of the array."""
        return int(self.array.size)

    def reshape(self, *shape: int) -> "OwnedArray":
        """The array in this shape, without a copy."""
        return OwnedArray(self.owner, self.array.reshape(*shape))

    def __getitem__(self, rows: slice) -> "OwnedArray":
        return OwnedArray(self.owner, self.array[rows])


@dataclass
class SharedLayer(LayerMemory[Any]):
    """The caches of one layer, one for each owner.

    parts: that of each owner, of its own heads.
    """

    parts: list[LayerMemory[Any]]

    @property
    def types(self) -> Types | None:
        """The element types of the cache, which are those of all parts."""
        return self.parts[0].types

    @property
    def window(self) -> int:
        """Which positions a row of attention reads, which are the same for all owners (``engine/cache/window.py``)."""
        window: int = cast(Any, self.parts[0]).window
        return window

    def places(self, batch: Batch[Any]) -> Any:
        """Where the pages hold the rows of a pass, int32 [rows]: at their positions, since its sequences are not thinned."""
        assert batch.thinned is None
        return batch.positions

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """The mean number of bytes that a token reads and writes at all owners.

        visible: int64 [tokens], the number of positions that each token sees, its own included.
        """
        return sum(part.bytes_per_token(visible) for part in self.parts)

    def needed(self, slot: int, position: int, pages: HeldPages) -> list[StoredRows[Any]]:
        """The entries that a snapshot must contain, first all of owner 0, then those of owner 1 and so on."""
        return [
            replace(rows, name=f"{rows.name} of owner {owner}", ring=OwnedArray(owner, rows.ring))
            for owner, part in enumerate(self.parts)
            for rows in part.needed(slot, position, pages)
        ]

    def contents(self, length: int, download: Download) -> Iterator[tuple[str, np.ndarray]]:
        """The contents of the part of each owner (:meth:`LayerMemory.contents`)."""
        for owner, part in enumerate(self.parts):

            def of_owner(array: Any, owner: int = owner) -> np.ndarray:
                return download(OwnedArray(owner, array))

            for name, array in part.contents(length, of_owner):
                yield f"{name} of owner {owner}", array


def allocated(spec: CacheSpec, memories: Sequence[PagedMemory], types: Types) -> LayerMemory[Any]:
    """The cache of a layer in the memory of its device, or of each of the devices that share it."""
    if len(memories) == 1:
        return spec.allocate(memories[0], types)
    n = len(memories)
    return SharedLayer([spec.part(owner, n).allocate(memory, types) for owner, memory in enumerate(memories)])
