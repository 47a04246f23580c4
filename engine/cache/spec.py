"""The interface of caches: the specification of what one layer stores, and the memory that is allocated for it.

A kind of cache consists of a subclass of :class:`CacheSpec` and a subclass of :class:`LayerMemory`, in a file of their own.
The configuration of a mixer returns the specification (``MixerConfig.cache_spec``).  No other code depends on the kind.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, cast

import numpy as np

from engine.arrays import A
from engine.cache.pages import PagedMemory, Paging
from engine.cache.types import CHUNK, F16, Types

HeldPages: TypeAlias = Callable[[Paging], Mapping[int, int]]
"""Returns the pages of one kind that a sequence holds, by chunk (``Sequence.pages``)."""

Download: TypeAlias = Callable[[Any], np.ndarray]
"""Copies an array of a backend to host memory (``Operations.download``)."""


@dataclass(frozen=True)
class Ring:
    """A ring of one sequence, which holds ``capacity`` positions.

    A pass that begins at position p needs the entries of positions p - ``back`` to p - 1.
    """

    back: int
    capacity: int


def ring_length(taps: int, rewind: int, decode_rows: int, max_rows: int) -> int:
    """The number of rows of a ring of the inputs of a convolution.

    No decode batch overwrites rows that it reads, and no pass overwrites rows that are needed after a rollback.

    taps: the number of latest positions that a token reads, its own included.
    rewind: the number of tokens that can always be rolled back.
    decode_rows, max_rows: the maximum number of rows in a decode batch, and in any pass.
    """
    return max(min(max_rows, decode_rows), rewind) + taps - 1


@dataclass
class StoredRows(Generic[A]):
    """The entries [first, end) of a ring or of pages.

    name: a description of the entries.
    ring: an array [length, ...].  Entry i is in row i % length, or, with ``pages``, in row i % 64 of a page of 64 rows.
    pages: the page of each chunk, so that entry i is in page ``pages[i // 64]``; None: ``ring`` is a ring.
    """

    name: str
    ring: A
    first: int
    end: int
    pages: Mapping[int, int] | None = None

    def runs(self) -> Iterator[slice]:
        """The rows of the array that contain the entries, as contiguous slices, in the order of the entries."""
        first, length = self.first, int(self.ring.shape[0])
        while first < self.end:
            if self.pages is not None:
                row, left = CHUNK * self.pages[first // CHUNK] + first % CHUNK, CHUNK - first % CHUNK
            else:
                row, left = first % length, length - first % length
            count = min(self.end - first, left)
            yield slice(row, row + count)
            first += count

    def moved(self, length: int) -> np.ndarray:
        """The entries of a ring, which must be a NumPy array, copied into a new ring of ``length`` rows."""
        out = np.zeros((length, *self.ring.shape[1:]), cast(np.ndarray, self.ring).dtype)
        for i in range(self.first, self.end):
            out[i % length] = cast(np.ndarray, self.ring)[i % self.ring.shape[0]]
        return out


def of_sequence(array: A, slot: int) -> A:
    """A view of the part of an array [sequences, ...] that belongs to the sequence in ``slot``."""
    return cast(A, array[slot : slot + 1].reshape(*array.shape[1:]))


class LayerMemory(ABC, Generic[A]):
    """The cache of one layer for all sequences.  A subclass is a dataclass of arrays ``A`` and numbers."""

    @property
    def types(self) -> Types | None:
        """The element types of the cache; None if the user cannot choose them."""
        return None

    @abstractmethod
    def bytes_per_token(self, visible: np.ndarray) -> float:
        """The mean number of bytes that a token reads and writes.

        visible: int64 [tokens], the number of positions that each token sees, its own included.
        """

    def needed(self, slot: int, position: int, pages: HeldPages) -> list[StoredRows[A]]:
        """The entries that a pass of the sequence in ``slot`` reads if it begins at ``position`` and that a snapshot must
        contain: entries of rings, and of pages that the sequence frees when a window has passed them.

        pages: returns the pages of the sequence.
        """
        return []

    # --- for comparisons of two devices ------------------------------------------------------------------------

    def contents(self, length: int, download: Download) -> Iterator[tuple[str, np.ndarray]]:
        """The names and arrays of what the next pass of the sequence in slot 0 sees after ``length`` tokens, besides
        :meth:`needed`.  The arrays do not depend on which pages are used.

        download: copies an array to host memory.
        """
        yield from ()

    def before_pass(self, like: "LayerMemory[Any]", position: int) -> "LayerMemory[Any] | None":
        """A copy of the entries that a pass of the sequence in slot 0 at ``position`` reads and may overwrite; None if there
        are none.  The arrays of the copy are as long as those of ``like``.  The arrays of this cache must be NumPy arrays."""
        return None

    def placed_like(self, like: "LayerMemory[Any]", end: int, download: Download) -> "LayerMemory[Any]":
        """A copy of the positions before ``end`` of the sequence in slot 0, in the pages that ``like`` uses for them; or this
        cache itself, if results do not depend on which pages are used.  The arrays of this cache must be NumPy arrays.

        download: copies an array of ``like`` to host memory.
        """
        return self


class CacheSpec(ABC):
    """The specification of the cache of one layer.  A subclass is a frozen dataclass of sizes."""

    @abstractmethod
    def allocate(self, memory: PagedMemory, types: Types) -> LayerMemory[Any]:
        """Allocate the cache of the layer."""

    def part(self, owner: int, n_owners: int) -> "CacheSpec":
        """The specification of what one of several devices stores that share the layer: the data of its own heads.  Only
        layers that can be shared (``MixerConfig.most_owners``) need this method."""
        raise NotImplementedError(f"{type(self).__name__} cannot be shared by several devices")

    def joined(self, name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
        """An array of the whole layer from those of several devices that share it, each [entries, its heads, ...].

        name: the name of the array in :meth:`LayerMemory.needed` or :meth:`LayerMemory.contents`.
        """
        return np.concatenate(parts, axis=1)

    def page_bytes(self, types: Types) -> dict[Paging, int]:
        """The size in bytes of a page of this layer, for each kind of page that it has."""
        return {}

    def ring_bytes(self, max_rows: int) -> int:
        """The size in bytes of the rings of one sequence, if a pass has at most ``max_rows`` rows."""
        return 0

    def rings(self, max_rows: int) -> list[Ring]:
        """The rings of one sequence, whose entries are overwritten as positions advance, if a pass has at most ``max_rows``
        rows."""
        return []

    @property
    def can_be_thinned(self) -> bool:
        """Whether pages without a window can be dropped (``engine/cache/thinning.py``), or there are none."""
        return all(paging.window > 0 for paging in self.page_bytes(F16))

    @property
    def segments(self) -> int:
        """The number of states that are stored so that tokens can be rolled back; 0 if the layer has no states."""
        return 0

    @property
    def snapshot_bytes(self) -> int:
        """The size in bytes of this layer's part of a snapshot, with latents in float16."""
        return 0

    @property
    def restorable(self) -> bool:
        """Whether a snapshot and pages without a window are all that a sequence needs to continue."""
        return True

    def refusal(self, types: Types, architecture: str) -> str:
        """Why the cache cannot have these element types, as a sentence without a period; "" if it can.

        architecture: the architecture of the model, for the sentence.
        """
        return ""

    def n_bytes(self, n_ctx: int, max_rows: int, types: Types, n_sequences: int = 1, capacity: int = 0) -> int:
        """The size of the cache in bytes, for sequences of n_ctx positions and passes of at most max_rows rows.

        capacity: the number of positions that all sequences share in layers without a window; 0: n_ctx for each sequence.
        """
        sizes = n_ctx, max_rows, n_sequences, capacity
        pages = (paging.pages(*sizes) * n for paging, n in self.page_bytes(types).items())
        return sum(pages) + n_sequences * self.ring_bytes(max_rows)
