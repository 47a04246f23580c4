"""The memory of the tokens a model has read, addressed by sequence and absolute position.

Attention keeps keys and values in chunks of 64 positions, each in a page (``engine/cache/pages.py``): position j of a
sequence is lane j % 64 of page ``table[sequence, j // 64]``.  What else a layer keeps per sequence, such as the states of
recurrent layers (``engine/cache/recurrent.py``), is in rings by position, one for each sequence.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from engine.arrays import A
from engine.cache.pages import SPARE, PagedMemory, Paging, Store, Zeros
from engine.cache.types import CHUNK, CacheType, Types
from engine.limits import STEP_ROWS


@dataclass(frozen=True)
class Ring:
    """A ring of one sequence: a pass that begins at position p needs what is stored at positions p - ``back`` .. p - 1; the
    ring holds ``capacity`` positions."""

    back: int
    capacity: int


def pass_rows(batch_size: int, n_ctx: int) -> int:
    """The most rows of any pass if prompts are read ``batch_size`` rows at a time."""
    return min(max(batch_size, STEP_ROWS), n_ctx)


class CacheSpec(ABC):
    """What one layer stores per position."""

    def page_bytes(self, types: Types) -> dict[Paging, int]:
        """The bytes of a page of this layer, for each kind of pages that it has."""
        return {}

    def ring_bytes(self, max_rows: int) -> int:
        """The bytes of its rings for one sequence."""
        return 0

    def rings(self, max_rows: int) -> list[Ring]:
        """The parts of it that are overwritten as positions advance."""
        return []

    @abstractmethod
    def allocate(self, memory: PagedMemory, types: Types) -> Any:
        """Allocate the memory."""

    def n_bytes(self, n_ctx: int, max_rows: int, types: Types, n_sequences: int = 1, capacity: int = 0) -> int:
        """Its memory in bytes, for sequences of n_ctx positions read at most max_rows at a time, which share ``capacity``
        positions; 0: n_ctx for each."""
        sizes = n_ctx, max_rows, n_sequences, capacity
        pages = (paging.pages(*sizes) * n for paging, n in self.page_bytes(types).items())
        return sum(pages) + n_sequences * self.ring_bytes(max_rows)


@dataclass(frozen=True)
class AttentionCacheSpec(CacheSpec):
    """What an attention layer stores per position: n_head_kv keys of d_k and values of d_v; window 0 = all positions."""

    n_head_kv: int
    d_k: int
    d_v: int
    window: int = 0

    @property
    def paging(self) -> Paging:
        """How it is divided into pages."""
        return Paging(CHUNK, self.window)

    def page_bytes(self, types: Types) -> dict[Paging, int]:
        """The bytes of a page."""
        position = types.k.row_bytes(self.d_k) + types.v.row_bytes(self.d_v)
        return {self.paging: CHUNK * self.n_head_kv * position}

    def allocate(self, memory: PagedMemory, types: Types) -> "AttentionCache[Any]":
        """Allocate the pages."""
        pool, heads, k, v = memory.pool(self.paging), self.n_head_kv, types.k, types.v
        keys = memory.pages(pool, k.shape(heads, pool.n_pages, self.d_k, CHUNK), k.dtype, axis=1)
        values = memory.pages(pool, v.shape(heads, pool.n_pages, CHUNK, self.d_v), v.dtype, axis=1)
        return AttentionCache(keys, values, pool.table, self.window, k, v, heads, self.d_k, self.d_v)


@dataclass
class AttentionCache(Generic[A]):
    """The pages of one layer: keys [n_head_kv, pages, d_k, 64], values [n_head_kv, pages, 64, d_v], float32 or the bits of
    float16; quantized ones are words [n_head_kv, pages, ...] (``engine/cache/types.py``).  table: int32 [sequences, chunks],
    the pages of the chunks of a sequence."""

    keys: A
    values: A
    table: A
    window: int
    k_type: CacheType
    v_type: CacheType
    n_head_kv: int
    d_k: int
    d_v: int

    @property
    def pages(self) -> int:
        """The number of pages."""
        return int(self.keys.shape[1])


class KVCache(PagedMemory):
    """The memory of all layers.  What it holds is known to ``engine/cache/sequence.py``."""

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
    ) -> None:
        """max_rows: the most rows of any pass (``pass_rows``); store: writes arrays that ``zeros`` returns, None: they are
        NumPy arrays; others: rings that a model has for each sequence besides those of its layers; capacity: the positions
        that all sequences share, 0: n_ctx for each."""
        super().__init__(n_ctx, max_rows, zeros, store, n_sequences, capacity)
        self.n_bytes = sum(spec.n_bytes(n_ctx, max_rows, types, n_sequences, capacity) for spec in specs)
        #: The bytes of a page of each kind, of all layers together.
        self.page_bytes: Counter[Paging] = Counter()
        for spec in specs:
            self.page_bytes.update(spec.page_bytes(types))
        self.layers: list[Any] = [spec.allocate(self, types) for spec in specs]
        #: The kinds of rings that lose positions as others are stored.
        self.rings = frozenset([*others, *(ring for spec in specs for ring in spec.rings(max_rows))])

    @property
    def rewind(self) -> int:
        """The number of latest tokens that can be rolled back, whatever has been read before them."""
        spare = [SPARE for paging in self.pools if 0 < paging.window < self.n_ctx]
        return min((*spare, *(ring.capacity - ring.back for ring in self.rings)), default=self.n_ctx)
