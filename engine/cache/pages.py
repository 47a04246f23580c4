"""Pages: the memory of attention, divided so that many sequences share it (Kwon et al. 2023, "PagedAttention").

Attention works in chunks of 64 absolute positions.  A *page* holds what all layers of one kind store for one chunk: the index
of a page is the same in the arrays of all of these layers.  A *table* int32 [sequences, chunks] on the device says which page
holds which chunk of which sequence.  Kernels read it before anything else; it changes only between launches.

A layer with a window reads only the latest positions, so a sequence gives the pages back that its window has passed.

Sequences that begin with the same tokens share pages (:class:`PagePool`).  Only whole pages are shared, and only when the
tokens in them are certain: a page that a sequence may still write to is its own.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from engine.cache.types import CHUNK
from engine.errors import ContextError
from engine.limits import DECODE_ROWS, IN_FLIGHT

Zeros = Callable[[tuple[int, ...], DTypeLike], Any]
"""Allocates zeroed memory on a backend."""

Store = Callable[[Any, int, np.ndarray], None]
"""``store(target, first, rows)`` writes rows of an array of a backend (``engine.ops.memory.MemoryOperations.store``)."""


class NoPages(ContextError):
    """No page is free."""


def spare(decode_rows: int) -> int:
    """The least number of latest positions that can be rolled back in a layer with a window: those of all decode batches in
    flight, of up to ``decode_rows`` rows each, in whole chunks."""
    return -(-IN_FLIGHT * decode_rows // CHUNK) * CHUNK


@dataclass(frozen=True)
class Paging:
    """How a kind of layer divides positions: ``span`` consecutive ones in a page, of which a row reads those of the last
    ``window``, its own included; window 0: all.  decode_rows: the most rows of a decode batch."""

    span: int = CHUNK
    window: int = 0
    decode_rows: int = DECODE_ROWS

    @property
    def spare(self) -> int:
        """The least number of latest positions that can be rolled back if it has a window."""
        return spare(self.decode_rows)

    def chunks(self, n_ctx: int) -> int:
        """The number of chunks of a context."""
        return -(-n_ctx // self.span)

    def held(self, n_ctx: int, rows: int) -> int:
        """The most pages that a sequence holds while ``rows`` positions are stored."""
        chunks = self.chunks(n_ctx)
        if self.window == 0:
            return chunks
        return min(chunks, -(-(self.window - 1 + self.spare + rows) // self.span) + 1)

    def pages(self, n_ctx: int, max_rows: int, n_sequences: int, capacity: int = 0) -> int:
        """The number of pages.  A sequence never lacks one that its window needs, if one of them at a time reads a prompt;
        where every position is kept, all sequences share ``capacity`` positions, 0: ``n_ctx`` for each."""
        if self.window == 0:
            most = n_sequences * self.chunks(n_ctx)
            # The last page of a sequence may hold a single position.
            return min(most, max(self.chunks(n_ctx), capacity // self.span + n_sequences)) if capacity else most
        step = self.held(n_ctx, min(max_rows, IN_FLIGHT * self.decode_rows))
        # With several sequences, as much again for what their windows have passed, so that others can begin there.
        return n_sequences * step * (2 if n_sequences > 1 else 1) + self.held(n_ctx, max_rows) - step

    def passed(self, length: int) -> int:
        """The number of first chunks that no pass needs any more after ``length`` tokens, even if some are rolled back."""
        return max(0, length - (self.window - 1 + self.spare)) // self.span if self.window else 0


class PagePool:
    """The pages of one kind of layer, the table that says which sequence has which, and what they hold.

    A page whose content is settled has a *key*, which identifies all tokens before and in it: any sequence that begins with
    these tokens can have the page, too.  A page with a key that no sequence has any more stays until its room is wanted; the
    one that has not been wanted for the longest time goes first.
    """

    def __init__(self, n_pages: int, n_chunks: int, n_sequences: int, zeros: Zeros, store: Store | None) -> None:
        """store: writes arrays that ``zeros`` returns; None: they are NumPy arrays."""
        self.n_pages = n_pages
        #: int32 [n_sequences, n_chunks]: the page of each chunk of each sequence, where the device reads it.
        self.table = zeros((n_sequences, n_chunks), np.int32)
        self._pages = self.table if store is None else np.zeros((n_sequences, n_chunks), np.int32)
        self._store = store
        self._changed: set[int] = set()
        # The last one first, so that pages are taken in rising order.
        self._free = list(range(n_pages - 1, -1, -1))
        self._users = [0] * n_pages
        self._keys: list[bytes | None] = [None] * n_pages
        self._by_key: dict[bytes, int] = {}
        # Pages with a key and without a user, the one that was used least recently first.
        self._kept: dict[int, None] = {}

    @property
    def n_free(self) -> int:
        """The number of pages that no sequence has."""
        return len(self._free) + len(self._kept)

    @property
    def n_empty(self) -> int:
        """The number of pages that hold nothing."""
        return len(self._free)

    @property
    def n_kept(self) -> int:
        """The number of pages that no sequence has, but whose content is kept."""
        return len(self._kept)

    @property
    def free_runs(self) -> list[tuple[int, int]]:
        """The pages that hold nothing, as runs [first, end) in rising order."""
        free = np.sort(np.array(self._free, np.int64))
        ends = np.flatnonzero(np.diff(free) > 1)
        firsts, lasts = free[np.append(0, ends + 1)[: free.size]], free[np.append(ends, free.size - 1)[: free.size]]
        return [(int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True)]

    def take(self) -> int:
        """A page for new content.  Raises NoPages if sequences have all of them."""
        if self._free:
            page = self._free.pop()
        elif self._kept:
            page = next(iter(self._kept))
            del self._kept[page]
            self.forget(page)
        else:
            raise NoPages(f"all {self.n_pages} pages of the cache are in use.")
        self._users[page] = 1
        return page

    def find(self, key: bytes) -> int | None:
        """The page with this key, if there is one."""
        return self._by_key.get(key)

    def share(self, page: int) -> None:
        """Let another sequence have a page."""
        self._kept.pop(page, None)
        self._users[page] += 1

    def shared(self, page: int) -> bool:
        """Whether several sequences have a page."""
        return self._users[page] > 1

    def give_back(self, page: int) -> None:
        """Let a sequence give a page back."""
        self._users[page] -= 1
        if self._users[page] == 0:
            if self._keys[page] is None:
                self._free.append(page)
            else:
                self._kept[page] = None

    def settle(self, page: int, key: bytes) -> None:
        """Note what a page holds; nothing if another page holds the same."""
        if self._keys[page] is None and key not in self._by_key:
            self._keys[page], self._by_key[key] = key, page

    def forget(self, page: int) -> None:
        """Note that the content of a page is about to change."""
        key, self._keys[page] = self._keys[page], None
        if key is not None:
            del self._by_key[key]

    def clear(self) -> None:
        """Forget the content of all pages that no sequence has."""
        for page in self._kept:
            self.forget(page)
        self._free += reversed(self._kept)
        self._kept.clear()

    def check(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless ``held``, the pages of all sequences, and the others are all the pages there are, and
        everything that is known of them agrees."""
        counts = Counter(held)
        assert [counts[page] for page in range(self.n_pages)] == self._users, "sequences have other pages"
        assert sorted([*self._free, *self._kept, *counts]) == list(range(self.n_pages)), "pages are lost or held twice"
        assert self._by_key == {key: page for page, key in enumerate(self._keys) if key is not None}, "keys differ"
        assert all(self._keys[page] is None for page in self._free), "a free page has a key"
        assert all(self._keys[page] is not None for page in self._kept), "a page without a key is kept"

    def place(self, slot: int, chunk: int, page: int) -> None:
        """Let a page hold a chunk of the sequence in a slot, from the next :meth:`publish` on."""
        self._pages[slot, chunk] = page
        self._changed.add(slot)

    def publish(self) -> None:
        """Write the changes of the table to the device."""
        if self._store is not None:
            for slot in self._changed:
                self._store(self.table, slot, self._pages[slot : slot + 1])
        self._changed.clear()


@dataclass(frozen=True)
class Paged:
    """An array whose axis ``axis`` has an element for each page of a pool."""

    pool: PagePool
    array: Any
    axis: int


class PagedMemory:
    """Room for ``n_sequences`` sequences of at most ``n_ctx`` positions, stored at most ``max_rows`` at a time."""

    def __init__(
        self,
        n_ctx: int,
        max_rows: int,
        zeros: Zeros,
        store: Store | None = None,
        n_sequences: int = 1,
        capacity: int = 0,
    ) -> None:
        """store: writes arrays that ``zeros`` returns; None: they are NumPy arrays; capacity: see :meth:`Paging.pages`."""
        self.n_ctx = n_ctx
        self.max_rows = max_rows
        self.n_sequences = n_sequences
        self.capacity = capacity
        self.zeros = zeros
        self.pools: dict[Paging, PagePool] = {}
        #: All arrays that are divided into pages.
        self.paged: list[Paged] = []
        self._store = store

    def pool(self, paging: Paging) -> PagePool:
        """The pages of a kind of layer."""
        if paging not in self.pools:
            n_pages = paging.pages(self.n_ctx, self.max_rows, self.n_sequences, self.capacity)
            n_chunks = paging.chunks(self.n_ctx)
            self.pools[paging] = PagePool(n_pages, n_chunks, self.n_sequences, self.zeros, self._store)
        return self.pools[paging]

    def pages(self, pool: PagePool, shape: tuple[int, ...], dtype: DTypeLike, axis: int = 0) -> Any:
        """Allocate a zeroed array whose axis ``axis`` is the pages of a pool."""
        assert shape[axis] == pool.n_pages
        self.paged.append(Paged(pool, self.zeros(shape, dtype), axis))
        return self.paged[-1].array

    def publish(self) -> None:
        """Write the changes of all tables to the device.  Call it before a pass."""
        for pool in self.pools.values():
            pool.publish()
