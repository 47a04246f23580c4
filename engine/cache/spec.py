"""What every kind of cache has: a specification of what one layer stores, and the memory that is allocated for it.

A kind of cache is a subclass of :class:`CacheSpec` and one of :class:`LayerMemory`, in a file of its own.  A mixer names its
specification (``MixerConfig.cache_spec``); nothing else asks which kind a layer has.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, cast

import numpy as np

from engine.arrays import A
from engine.cache.pages import PagedMemory, Paging
from engine.cache.types import CHUNK, Types

HeldPages: TypeAlias = Callable[[Paging], Mapping[int, int]]
"""The pages of one kind that a sequence holds, by chunk (``Sequence.pages``)."""

Download: TypeAlias = Callable[[Any], np.ndarray]
"""Copies an array of a backend to host memory (``Operations.download``)."""


@dataclass(frozen=True)
class Ring:
    """A ring of one sequence: a pass that begins at position p needs what is stored at positions p - ``back`` .. p - 1; the
    ring holds ``capacity`` positions."""

    back: int
    capacity: int


@dataclass
class StoredRows(Generic[A]):
    """Entries ``first`` .. ``end`` - 1 of a ring, whose entry i is in row i % length, or, with ``pages``, of pages of 64
    rows: entry i is in page ``pages[i // 64]``.  name: what they are."""

    name: str
    ring: A
    first: int
    end: int
    pages: Mapping[int, int] | None = None

    def runs(self) -> Iterator[slice]:
        """The rows of the array that hold the entries, as slices without gaps, in the order of the entries."""
        first, length = self.first, int(self.ring.shape[0])
        while first < self.end:
            if self.pages is not None:
                row, left = CHUNK * self.pages[first // CHUNK] + first % CHUNK, CHUNK - first % CHUNK
            else:
                row, left = first % length, length - first % length
            count = min(self.end - first, left)
            yield slice(row, row + count)
            first += count


def of_sequence(array: A, slot: int) -> A:
    """The part of an array [sequences, ...] that belongs to the sequence in ``slot``, without a copy."""
    return cast(A, array[slot : slot + 1].reshape(*array.shape[1:]))


class LayerMemory(ABC, Generic[A]):
    """The memory of one layer for all sequences: a dataclass of arrays ``A`` and numbers."""

    @property
    def types(self) -> Types | None:
        """The element types of what it stores; None if the user does not choose them."""
        return None

    @abstractmethod
    def bytes_per_token(self, visible: np.ndarray) -> float:
        """The mean number of bytes that tokens read and write, for tokens that see ``visible`` positions, int64 [tokens],
        their own included."""

    def needed(self, slot: int, position: int, pages: HeldPages) -> list[StoredRows[A]]:
        """What a pass of the sequence in ``slot`` that begins at ``position`` reads and a snapshot must hold: entries of
        rings, and of pages that the sequence gives back.  pages: those of the sequence."""
        return []

    # --- for comparisons of two devices ------------------------------------------------------------------------

    def contents(self, length: int, download: Download) -> Iterator[tuple[str, np.ndarray]]:
        """What the next pass of the sequence in slot 0 sees after ``length`` tokens, besides :meth:`needed`: names, and
        arrays that do not depend on the numbers of pages."""
        yield from ()

    def before_pass(self, like: "LayerMemory[Any]", position: int) -> "LayerMemory[Any] | None":
        """A copy of what a pass of the sequence in slot 0 at ``position`` may overwrite although it reads it, with arrays as
        long as those of ``like``; None if there is no such thing.  This memory is in NumPy arrays."""
        return None

    def placed_like(self, like: "LayerMemory[Any]", end: int, download: Download) -> "LayerMemory[Any]":
        """A copy of the positions before ``end`` of the sequence in slot 0, in the pages that ``like`` has them in; or this
        memory itself, if operations give the same results with any pages.  This memory is in NumPy arrays."""
        return self


class CacheSpec(ABC):
    """What one layer stores.  A subclass is a frozen dataclass of sizes."""

    @abstractmethod
    def allocate(self, memory: PagedMemory, types: Types) -> LayerMemory[Any]:
        """Allocate the memory of the layer."""

    def page_bytes(self, types: Types) -> dict[Paging, int]:
        """The bytes of a page of this layer, for each kind of pages that it has."""
        return {}

    def ring_bytes(self, max_rows: int) -> int:
        """The bytes of its rings for one sequence."""
        return 0

    def rings(self, max_rows: int) -> list[Ring]:
        """The parts of it that are overwritten as positions advance."""
        return []

    @property
    def segments(self) -> int:
        """The number of segments whose states it keeps to roll tokens back; 0 if it has no states."""
        return 0

    @property
    def snapshot_bytes(self) -> int:
        """The bytes that the layer adds to a snapshot of a sequence, with latents in float16."""
        return 0

    @property
    def restorable(self) -> bool:
        """Whether a snapshot and pages without a window are all that a sequence needs to continue."""
        return True

    def refusal(self, types: Types, architecture: str) -> str:
        """Why it cannot have elements of these types, as a sentence without a period; "" if it can.  architecture: the
        model's, for the sentence."""
        return ""

    def n_bytes(self, n_ctx: int, max_rows: int, types: Types, n_sequences: int = 1, capacity: int = 0) -> int:
        """Its memory in bytes, for sequences of n_ctx positions read at most max_rows at a time, which share ``capacity``
        positions; 0: n_ctx for each."""
        sizes = n_ctx, max_rows, n_sequences, capacity
        pages = (paging.pages(*sizes) * n for paging, n in self.page_bytes(types).items())
        return sum(pages) + n_sequences * self.ring_bytes(max_rows)
