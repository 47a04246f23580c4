"""Pages: the cache of attention, divided so that many sequences can share it (Kwon et al. 2023, "PagedAttention").

Attention processes chunks of 64 absolute positions.  A *page* holds one chunk, for all layers of one kind: a page has the
same index in the arrays of all these layers.  A *page table* int32 [sequences, chunks] on the device contains the page of
each chunk of each sequence.  It changes only between launches.

A layer with a window reads only the latest positions, so a sequence frees the pages that its window has passed.

Sequences with a common prefix share pages (:class:`PagePool`).  Only full pages whose tokens are final are shared.  A
sequence never writes to a shared page.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from engine.cache.thinning import OBSERVED
from engine.cache.types import CHUNK
from engine.errors import ContextError
from engine.limits import DECODE_ROWS, IN_FLIGHT

Zeros = Callable[[tuple[int, ...], DTypeLike], Any]
"""Allocates zeroed memory on a backend."""

Store = Callable[[Any, int, np.ndarray], None]
"""``store(target, first, rows)`` writes ``rows`` to an array of a backend, from row ``first`` on
(``engine.ops.memory.MemoryOperations.store``)."""


class NoPages(ContextError):
    """Raised if no page of the cache is free."""


def spare(decode_rows: int) -> int:
    """The number of latest positions that can always be rolled back in a layer with a window.

    These are the positions of all decode batches in flight, of up to ``decode_rows`` rows each, rounded up to whole chunks.
    """
    return -(-IN_FLIGHT * decode_rows // CHUNK) * CHUNK


@dataclass(frozen=True)
class Paging:
    """The division of positions into pages for one kind of layer.

    span: the number of consecutive positions in a page.
    window: the number of latest positions that a row reads, its own included; 0: all.
    decode_rows: the maximum number of rows in a decode batch.
    """

    span: int = CHUNK
    window: int = 0
    decode_rows: int = DECODE_ROWS

    @property
    def spare(self) -> int:
        """The number of latest positions that can always be rolled back if there is a window."""
        return spare(self.decode_rows)

    def chunks(self, n_ctx: int) -> int:
        """The number of pages for a context of ``n_ctx`` positions."""
        return -(-n_ctx // self.span)

    def held(self, n_ctx: int, rows: int) -> int:
        """The maximum number of pages that a sequence holds while a pass stores ``rows`` positions."""
        chunks = self.chunks(n_ctx)
        if self.window == 0:
            return chunks
        return min(chunks, -(-(self.window - 1 + self.spare + rows) // self.span) + 1)

    def pages(self, n_ctx: int, max_rows: int, n_sequences: int, capacity: int = 0) -> int:
        """The number of pages to allocate for ``n_sequences`` sequences of up to ``n_ctx`` positions.

        With a window, there are enough pages for the windows of all sequences, provided that only one sequence at a time
        reads a prompt.  Without a window, all sequences share ``capacity`` positions; 0: ``n_ctx`` for each sequence.
        max_rows: the maximum number of rows in any pass.
        """
        if self.window == 0:
            most = n_sequences * self.chunks(n_ctx)
            # The last page of a sequence may hold a single position.
            return min(most, max(self.chunks(n_ctx), capacity // self.span + n_sequences)) if capacity else most
        step = self.held(n_ctx, min(max_rows, IN_FLIGHT * self.decode_rows))
        # Several sequences get twice as many: pages that a window has passed are kept, so that others can share them.
        return n_sequences * step * (2 if n_sequences > 1 else 1) + self.held(n_ctx, max_rows) - step

    def passed(self, length: int) -> int:
        """The number of leading chunks that no pass needs after ``length`` tokens, even if tokens are rolled back."""
        return max(0, length - (self.window - 1 + self.spare)) // self.span if self.window else 0


class PagePool:
    """The pages of one kind of layer, the page table, and the keys of the pages.

    A page whose contents are final has a *key*, which identifies the tokens in the page and all tokens before it.  Any
    sequence that begins with these tokens can share the page.  A page that has a key but no user is kept until its memory
    is needed.  The least recently used page is reused first.
    """

    def __init__(self, n_pages: int, n_chunks: int, n_sequences: int, zeros: Zeros, store: Store | None) -> None:
        """Create a pool of free pages.

        zeros: allocates the table.
        store: writes to the arrays that ``zeros`` returns; None: they are NumPy arrays.
        """
        self.n_pages = n_pages
        #: int32 [n_sequences, n_chunks]: the page of each chunk of each sequence, in the memory of the device.
        self.table = zeros((n_sequences, n_chunks), np.int32)
        self._pages = self.table if store is None else np.zeros((n_sequences, n_chunks), np.int32)
        self._store = store
        # The tables of further devices, and how they are written.
        self._copies: list[tuple[Any, Store]] = []
        self._changed: set[int] = set()
        # In descending order, so that pages are taken in ascending order.
        self._free = list(range(n_pages - 1, -1, -1))
        self._users = [0] * n_pages
        self._keys: list[bytes | None] = [None] * n_pages
        self._by_key: dict[bytes, int] = {}
        #: Called with a page and its key before its contents are given up for new ones.
        self.evicted: Callable[[int, bytes], None] | None = None
        # Pages with a key and without a user, the least recently used first.
        self._kept: dict[int, None] = {}

    @property
    def n_free(self) -> int:
        """The number of pages without a user, whether or not their contents are kept."""
        return len(self._free) + len(self._kept)

    @property
    def n_empty(self) -> int:
        """The number of pages without contents."""
        return len(self._free)

    @property
    def n_kept(self) -> int:
        """The number of pages without a user whose contents are kept."""
        return len(self._kept)

    @property
    def free_runs(self) -> list[tuple[int, int]]:
        """The pages without contents, as runs [first, end) in ascending order."""
        return _runs(np.sort(np.array(self._free, np.int64)))

    def take(self) -> int:
        """Allocate a page for new contents.  Raises NoPages if all pages are in use."""
        if self._free:
            page = self._free.pop()
        elif self._kept:
            page = next(iter(self._kept))
            del self._kept[page]
            key = self._keys[page]
            if self.evicted is not None and key is not None:
                self.evicted(page, key)
            self.forget(page)
        else:
            raise NoPages(f"all {self.n_pages} pages of the cache are in use.")
        self._users[page] = 1
        return page

    def find(self, key: bytes) -> int | None:
        """The page with this key, or None."""
        return self._by_key.get(key)

    def share(self, page: int) -> None:
        """Add a user to a page."""
        self._kept.pop(page, None)
        self._users[page] += 1

    def shared(self, page: int) -> bool:
        """Whether several sequences use a page."""
        return self._users[page] > 1

    def give_back(self, page: int) -> None:
        """Remove a user from a page.  A page without users is free, and is kept if it has a key."""
        self._users[page] -= 1
        if self._users[page] == 0:
            if self._keys[page] is None:
                self._free.append(page)
            else:
                self._kept[page] = None

    def settle(self, page: int, key: bytes) -> None:
        """Set the key of a page.  Does nothing if the page has a key or another page has this key."""
        if self._keys[page] is None and key not in self._by_key:
            self._keys[page], self._by_key[key] = key, page

    def forget(self, page: int) -> None:
        """Remove the key of a page, because its contents are about to change."""
        key, self._keys[page] = self._keys[page], None
        if key is not None:
            del self._by_key[key]

    def clear(self) -> None:
        """Discard the contents of all pages without a user."""
        for page in self._kept:
            self.forget(page)
        self._free += reversed(self._kept)
        self._kept.clear()

    def erase(self, key: bytes) -> None:
        """Discard the contents of the page with this key, if there is one that has no user."""
        page = self._by_key.get(key)
        if page in self._kept:
            del self._kept[page]
            self.forget(page)
            self._free.append(page)

    def check(self, held: Iterable[int]) -> None:
        """Check that the records of the pool are consistent.  Raises AssertionError if they are not, or if a page is lost.

        held: the pages of all sequences, a shared page once for each of its users.
        """
        counts = Counter(held)
        assert [counts[page] for page in range(self.n_pages)] == self._users, "sequences have other pages"
        assert sorted([*self._free, *self._kept, *counts]) == list(range(self.n_pages)), "pages are lost or held twice"
        assert self._by_key == {key: page for page, key in enumerate(self._keys) if key is not None}, "keys differ"
        assert all(self._keys[page] is None for page in self._free), "a free page has a key"
        assert all(self._keys[page] is not None for page in self._kept), "a page without a key is kept"

    def copy(self, zeros: Zeros, store: Store) -> Any:
        """A table for another device, which :meth:`publish` keeps equal to ``table``: int32 [n_sequences, n_chunks]."""
        self._copies.append((zeros((len(self._pages), self._pages.shape[1]), np.int32), store))
        return self._copies[-1][0]

    def place(self, slot: int, chunk: int, page: int) -> None:
        """Assign a page to a chunk of the sequence in a slot.  It takes effect with the next :meth:`publish`."""
        self._pages[slot, chunk] = page
        self._changed.add(slot)

    def placed(self, slot: int, first: int, end: int) -> list[tuple[int, int]]:
        """The pages of chunks [first, end) of the sequence in a slot, as runs [first, end) of consecutive pages."""
        return _runs(self._pages[slot, first:end])

    def publish(self) -> None:
        """Write the changes of the table to the devices."""
        targets = self._copies if self._store is None else [(self.table, self._store), *self._copies]
        for table, store in targets:
            for slot in self._changed:
                store(table, slot, self._pages[slot : slot + 1])
        self._changed.clear()


def _runs(pages: np.ndarray) -> list[tuple[int, int]]:
    """Pages, integers [n], as runs [first, end) of consecutive ones."""
    ends = np.flatnonzero(np.diff(pages) != 1)
    firsts, lasts = pages[np.append(0, ends + 1)[: pages.size]], pages[np.append(ends, pages.size - 1)[: pages.size]]
    return [(int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True)]


@dataclass(frozen=True)
class Paged:
    """An array whose axis ``axis`` indexes the pages of a pool."""

    pool: PagePool
    array: Any
    axis: int


class PagedMemory:
    """Paged memory of one device for ``n_sequences`` sequences of at most ``n_ctx`` positions.  A pass stores at most
    ``max_rows`` of them."""

    def __init__(
        self,
        n_ctx: int,
        max_rows: int,
        zeros: Zeros,
        store: Store | None = None,
        n_sequences: int = 1,
        capacity: int = 0,
        pools: dict[Paging, PagePool] | None = None,
        budget: int = 0,
    ) -> None:
        """Create memory without any pools.

        zeros: allocates arrays.
        store: writes to the arrays that ``zeros`` returns; None: they are NumPy arrays.
        capacity: the number of positions that all sequences share in layers without a window; 0: ``n_ctx`` for each.
        pools: the pools of another device that holds other layers of the same sequences; None: new ones.
        budget: the number of positions of a prompt that layers without a window keep; 0: all.
        """
        self.n_ctx = n_ctx
        self.max_rows = max_rows
        self.n_sequences = n_sequences
        self.capacity = capacity
        self.zeros = zeros
        self.pools: dict[Paging, PagePool] = {} if pools is None else pools
        self._tables: dict[Paging, Any] = {}
        #: All arrays that are divided into pages.
        self.paged: list[Paged] = []
        self._store = store
        #: The number of positions of a prompt that layers without a window keep; 0: all.
        self.budget = budget
        #: The number of positions that each sequence has dropped, int32 [n_sequences], and the masses of the chunks that its
        #: observed rows see, int32 [n_sequences * 64, chunks] (``engine/cache/thinning.py``); None if all positions stay.
        #: The row at position p of the sequence in slot s has the masses 64 s + p % 64.
        self.dropped: Any = zeros((n_sequences,), np.int32) if budget else None
        self.masses: Any = zeros((n_sequences * OBSERVED, -(-n_ctx // CHUNK)), np.int32) if budget else None

    def write(self, target: Any, first: int, rows: np.ndarray) -> None:
        """Write rows to an array, from row ``first`` on."""
        if self._store is None:
            target[first : first + len(rows)] = rows
        else:
            self._store(target, first, rows)

    def pool(self, paging: Paging) -> PagePool:
        """The pool of a kind of layer, created on the first call."""
        if paging not in self.pools:
            n_pages = paging.pages(self.n_ctx, self.max_rows, self.n_sequences, self.capacity)
            n_chunks = paging.chunks(self.n_ctx)
            self.pools[paging] = PagePool(n_pages, n_chunks, self.n_sequences, self.zeros, self._store)
            self._tables[paging] = self.pools[paging].table
        return self.pools[paging]

    def table(self, paging: Paging) -> Any:
        """The table of the pages of a kind of layer on this device: int32 [n_sequences, n_chunks]."""
        pool = self.pool(paging)
        if paging not in self._tables:
            assert self._store is not None
            self._tables[paging] = pool.copy(self.zeros, self._store)
        return self._tables[paging]

    @property
    def tables(self) -> list[Any]:
        """All tables on this device."""
        return list(self._tables.values())

    def pages(self, pool: PagePool, shape: tuple[int, ...], dtype: DTypeLike, axis: int = 0) -> Any:
        """Allocate a zeroed array whose axis ``axis`` indexes the pages of a pool."""
        assert shape[axis] == pool.n_pages
        self.paged.append(Paged(pool, self.zeros(shape, dtype), axis))
        return self.paged[-1].array

    def publish(self) -> None:
        """Write changes of all tables to the device.  Must be called before each pass."""
        for pool in self.pools.values():
            pool.publish()
