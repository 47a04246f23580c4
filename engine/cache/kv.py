"""The key-value cache of a model, addressed by sequence and absolute position.

Attention stores keys and values in chunks of 64 positions, one chunk per page (``engine/cache/pages.py``): position j of a
sequence is in lane j % 64 of page ``table[sequence, j // 64]``.  Other data, such as the states of recurrent layers
(``engine/cache/recurrent.py``), is stored in rings indexed by position, one for each sequence.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import A, Batch
from engine.cache.contents import stored
from engine.cache.pages import PagedMemory, Paging, Store, Zeros
from engine.cache.shared import allocated
from engine.cache.spec import CacheSpec, Download, LayerMemory, Ring
from engine.cache.thinning import OBSERVED
from engine.cache.types import BLOCK, CHUNK, CacheType, Types
from engine.cache.window import NOT_FIRST, frames, longest
from engine.limits import DECODE_ROWS
from engine.shares import share


def pass_rows(batch_size: int, n_ctx: int, decode_rows: int) -> int:
    """The maximum number of rows in any pass, if a pass reads up to ``batch_size`` tokens of a prompt and decode batches have
    up to ``decode_rows`` rows."""
    return min(max(batch_size, decode_rows), n_ctx)


@dataclass(frozen=True)
class AttentionCacheSpec(CacheSpec):
    """The specification of the cache of an attention layer.

    It stores n_head_kv keys of d_k elements and n_head_kv values of d_v elements per position.  window: the number of latest
    positions that a row reads, its own included; 0: all.  decode_rows: the maximum number of rows in a decode batch.
    hides_first: whether no row reads position 0, in a layer without a window.  framed: whether a row reads only the
    positions of its own frame, one of ``window`` positions, instead of the latest ones.
    """

    n_head_kv: int
    d_k: int
    d_v: int
    window: int = 0
    decode_rows: int = DECODE_ROWS
    hides_first: bool = False
    framed: bool = False

    @property
    def paging(self) -> Paging:
        """The division of the cache into pages.  A frame needs no page that a window of the same size does not need."""
        return Paging(CHUNK, self.window, self.decode_rows)

    def page_bytes(self, types: Types) -> dict[Paging, int]:
        """The size of a page in bytes."""
        position = types.k.row_bytes(self.d_k) + types.v.row_bytes(self.d_v)
        return {self.paging: CHUNK * self.n_head_kv * position}

    def part(self, owner: int, n_owners: int) -> "AttentionCacheSpec":
        """The keys and values of some heads."""
        first, last = share(self.n_head_kv, owner, n_owners)
        return replace(self, n_head_kv=last - first)

    @property
    def restorable(self) -> bool:
        """Whether a snapshot and pages without a window are all that a sequence needs to continue.

        False with a window, because snapshots do not contain keys and values.
        """
        return self.window == 0

    @property
    def can_be_thinned(self) -> bool:
        """True: pages without a window can be dropped."""
        return True

    def refusal(self, types: Types, architecture: str) -> str:
        """Why the cache cannot have these element types, as a sentence without a period; "" if it can.

        The elements of a head must fill whole blocks of a quantized type.
        """
        for kind, d in ((types.k, self.d_k), (types.v, self.d_v)):
            if kind.quantized and not kind.block(d):
                blocks = f"blocks of {BLOCK}, as cache type {kind.name} has them"
                return f"heads of {d} elements do not fit into {blocks}; use f16"
        return ""

    def allocate(self, memory: PagedMemory, types: Types) -> "AttentionCache[Any]":
        """Allocate the pages of the layer."""
        pool, heads, k, v = memory.pool(self.paging), self.n_head_kv, types.k, types.v
        keys = memory.pages(pool, k.shape(heads, pool.n_pages, self.d_k, CHUNK), k.dtype, axis=1)
        values = memory.pages(pool, v.shape(heads, pool.n_pages, CHUNK, self.d_v), v.dtype, axis=1)
        table = memory.table(self.paging)
        window = NOT_FIRST if self.hides_first else frames(self.window) if self.framed else self.window
        return AttentionCache(keys, values, table, window, k, v, heads, self.d_k, self.d_v)


@dataclass
class AttentionCache(LayerMemory[A]):
    """The pages of one attention layer.

    keys: [n_head_kv, pages, d_k, 64], and values: [n_head_kv, pages, 64, d_v]; float32, or uint16 for the bits of float16.
        Quantized keys and values are uint32 words [n_head_kv, pages, ...] (``engine/cache/types.py``).
    table: int32 [sequences, chunks], the pages of the chunks of each sequence.
    window: which positions a row reads, as in ``engine/cache/window.py``.
    """

    keys: A
    values: A
    table: A
    window: int
    k_type: CacheType
    v_type: CacheType
    n_head_kv: int
    d_k: int
    d_v: int

    def places(self, batch: Batch[A]) -> A:
        """Where the pages hold the rows of a pass, int32 [rows]: at their positions, or, in a layer without a window, at
        their places if sequences may be thinned."""
        return batch.positions if longest(self.window) or batch.thinned is None else batch.thinned.places

    def masses(self, batch: Batch[A], window: int) -> A | None:
        """Where the attention of the rows of a pass, which read back as far as ``window``, adds masses; None: nowhere."""
        return None if longest(window) or longest(self.window) or batch.thinned is None else batch.thinned.masses

    @property
    def pages(self) -> int:
        """The number of pages."""
        return int(self.keys.shape[1])

    @property
    def types(self) -> Types:
        """The element types of keys and values."""
        return Types(self.k_type, self.v_type)

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """The mean number of bytes that a token reads: the keys and values of the positions in its window.

        visible: int64 [tokens], the number of positions that each token sees, its own included.
        """
        position = self.n_head_kv * (self.k_type.row_bytes(self.d_k) + self.v_type.row_bytes(self.d_v))
        seen = np.minimum(visible, self.window) if self.window > 0 else visible
        if self.window < NOT_FIRST:
            seen = (visible - 1) % -self.window + 1
        return position * float(seen.mean())

    def contents(self, length: int, download: Download) -> Iterator[tuple[str, np.ndarray]]:
        """The names and arrays of the keys [positions, n_head_kv, d_k] and values [positions, n_head_kv, d_v] that the next
        pass of the sequence in slot 0 sees after ``length`` tokens; of quantized types, the words and scales."""
        most = longest(self.window)
        at = np.arange(max(0, length - most) if most else 0, length)
        pages, lanes = download(self.table)[0, at // CHUNK], at % CHUNK
        yield "keys", stored(download(self.keys), self.k_type, self.d_k, False, pages, lanes)
        yield "values", stored(download(self.values), self.v_type, self.d_v, True, pages, lanes)

    def placed_like(self, like: LayerMemory[Any], end: int, download: Download) -> "AttentionCache[Any]":
        """A copy of the positions before ``end`` of the sequence in slot 0, in the pages that ``like`` uses for them.  The
        copy has as many pages as ``like``, because kernels may depend on the positions of pages in memory."""
        assert isinstance(like, AttentionCache)
        pages, own, copies = download(like.table[:1])[0], cast(AttentionCache[Any], self), []
        for memory in (own.keys, own.values):
            copies.append(np.zeros((memory.shape[0], like.pages, *memory.shape[2:]), memory.dtype))
            # In ascending order: a page that the window has passed may have been reused for a later chunk.
            for chunk in range(-(-end // CHUNK)):
                copies[-1][:, pages[chunk]] = memory[:, own.table[0, chunk]]
        return replace(own, keys=copies[0], values=copies[1], table=np.ascontiguousarray(pages[None]))


class Place(Protocol):
    """What a cache uses of a backend whose memory holds a layer."""

    @property
    def owners(self) -> "tuple[Place, ...]":
        """The backends that share the layer; usually only this one."""

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """A zeroed array."""

    def store(self, target: Any, first: int, rows: np.ndarray) -> None:
        """target[first : first + len(rows)] = rows."""


class KVCache(PagedMemory):
    """The caches of all layers.  ``engine/cache/sequence.py`` keeps track of the contents."""

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        n_ctx: int,
        max_rows: int,
        types: Types,
        zeros: Zeros,
        store: Store | None = None,
        others: Iterable[Ring] = (),
        n_sequences: int = 1,
        capacity: int = 0,
        places: Sequence[Place] = (),
        budget: int = 0,
    ) -> None:
        """Allocate the caches of layers with the given specifications.

        max_rows: the maximum number of rows in any pass (``pass_rows``).
        zeros: allocates the arrays.
        store: writes to the arrays that ``zeros`` returns; None: they are NumPy arrays.
        others: rings that the model has for each sequence in addition to those of its layers.
        capacity: the number of positions that all sequences share; 0: n_ctx for each sequence.
        places: the device of each layer; by default that of ``zeros``.
        budget: the number of positions of a prompt that layers without a window keep; 0: all.
        """
        self.specs = tuple(specs)
        self.types = types
        if places:
            zeros, store = places[0].owners[0].zeros, places[0].owners[0].store
        super().__init__(n_ctx, max_rows, zeros, store, n_sequences, capacity, budget=budget)
        #: The memory of each device that holds layers.
        self.memories: dict[Place, PagedMemory] = {}
        sizes = n_sequences, capacity, self.pools, budget
        for owner in (owner for place in places for owner in place.owners):
            if owner not in self.memories:
                own = self if not self.memories else PagedMemory(n_ctx, max_rows, owner.zeros, owner.store, *sizes)
                self.memories[owner] = own
        self.n_bytes = sum(spec.n_bytes(n_ctx, max_rows, types, n_sequences, capacity) for spec in specs)
        self._bytes: Counter[Place] = Counter()
        for place, spec in zip(places, specs, strict=False):
            self._bytes[place] += spec.n_bytes(n_ctx, max_rows, types, n_sequences, capacity)
        #: The size in bytes of a page of each kind, summed over all layers.
        self.page_bytes: Counter[Paging] = Counter()
        for spec in specs:
            self.page_bytes.update(spec.page_bytes(types))
        memories = [[self.memories[owner] for owner in place.owners] for place in places] or [[self]] * len(specs)
        self.layers: list[Any] = [allocated(spec, own, types) for spec, own in zip(specs, memories, strict=True)]
        #: Whether a snapshot and pages without a window are all that a sequence needs to continue.
        self.restorable = all(spec.restorable for spec in specs)
        #: The kinds of rings, in which new positions overwrite old ones.
        self.rings = frozenset([*others, *(ring for spec in specs for ring in spec.rings(max_rows))])

    def thin(self, slot: int, positions: int) -> None:
        """Tell all devices the number of positions that the sequence in a slot has dropped."""
        for memory in self._all:
            memory.write(memory.dropped, slot, np.array([positions], np.int32))

    def clear_masses(self, slot: int, first: int, count: int) -> None:
        """Set the masses of rows [first, first + count) of the sequence in a slot to 0."""
        for memory in self._all:
            for position in range(first, first + count):
                row = slot * OBSERVED + position % OBSERVED
                memory.write(memory.masses, row, np.zeros((1, memory.masses.shape[1]), np.int32))

    @property
    def _all(self) -> Sequence[PagedMemory]:
        return list(self.memories.values()) or [self]

    def memory_bytes(self, place: Place) -> int:
        """The bytes that it has in the memory of a device."""
        return self._bytes[place] if self.memories else self.n_bytes

    @cached_property
    def rewind(self) -> int:
        """The number of latest tokens that can always be rolled back."""
        spare = [paging.spare for paging in self.pools if 0 < paging.window < self.n_ctx]
        return min((*spare, *(ring.capacity - ring.back for ring in self.rings)), default=self.n_ctx)
