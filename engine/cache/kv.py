"""The memory of the tokens a model has read, addressed by sequence and absolute position.

Attention keeps keys and values in chunks of 64 positions, each in a page (``engine/cache/pages.py``): position j of a
sequence is lane j % 64 of page ``table[sequence, j // 64]``.  What else a layer keeps per sequence, such as the states of
recurrent layers (``engine/cache/recurrent.py``), is in rings by position, one for each sequence.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from engine.arrays import A
from engine.cache.contents import stored
from engine.cache.pages import PagedMemory, Paging, Store, Zeros
from engine.cache.spec import CacheSpec, Download, LayerMemory, Ring
from engine.cache.types import BLOCK, CHUNK, CacheType, Types
from engine.limits import DECODE_ROWS


def pass_rows(batch_size: int, n_ctx: int, decode_rows: int) -> int:
    """The most rows of any pass if prompts are read ``batch_size`` rows at a time, and decode batches have up to
    ``decode_rows``."""
    return min(max(batch_size, decode_rows), n_ctx)


@dataclass(frozen=True)
class AttentionCacheSpec(CacheSpec):
    """What an attention layer stores per position: n_head_kv keys of d_k and values of d_v; window 0 = all positions;
    decode_rows: the most rows of a decode batch."""

    n_head_kv: int
    d_k: int
    d_v: int
    window: int = 0
    decode_rows: int = DECODE_ROWS

    @property
    def paging(self) -> Paging:
        """How it is divided into pages."""
        return Paging(CHUNK, self.window, self.decode_rows)

    def page_bytes(self, types: Types) -> dict[Paging, int]:
        """The bytes of a page."""
        position = types.k.row_bytes(self.d_k) + types.v.row_bytes(self.d_v)
        return {self.paging: CHUNK * self.n_head_kv * position}

    @property
    def restorable(self) -> bool:
        """False with a window: no snapshot holds keys and values."""
        return self.window == 0

    def refusal(self, types: Types, architecture: str) -> str:
        """Heads must consist of whole blocks of a quantized type."""
        for kind, d in ((types.k, self.d_k), (types.v, self.d_v)):
            if kind.quantized and not kind.block(d):
                blocks = f"blocks of {BLOCK}, as cache type {kind.name} has them"
                return f"heads of {d} elements do not fit into {blocks}; use f16"
        return ""

    def allocate(self, memory: PagedMemory, types: Types) -> "AttentionCache[Any]":
        """Allocate the pages."""
        pool, heads, k, v = memory.pool(self.paging), self.n_head_kv, types.k, types.v
        keys = memory.pages(pool, k.shape(heads, pool.n_pages, self.d_k, CHUNK), k.dtype, axis=1)
        values = memory.pages(pool, v.shape(heads, pool.n_pages, CHUNK, self.d_v), v.dtype, axis=1)
        return AttentionCache(keys, values, pool.table, self.window, k, v, heads, self.d_k, self.d_v)


@dataclass
class AttentionCache(LayerMemory[A]):
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

    @property
    def types(self) -> Types:
        """The element types of keys and values."""
        return Types(self.k_type, self.v_type)

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """Keys and values of the positions in the window."""
        position = self.n_head_kv * (self.k_type.row_bytes(self.d_k) + self.v_type.row_bytes(self.d_v))
        seen = np.minimum(visible, self.window) if self.window else visible
        return position * float(seen.mean())

    def contents(self, length: int, download: Download) -> Iterator[tuple[str, np.ndarray]]:
        """Keys [positions, n_head_kv, d_k] and values [positions, n_head_kv, d_v], or their words if they are quantized."""
        at = np.arange(max(0, length - self.window) if self.window else 0, length)
        pages, lanes = download(self.table)[0, at // CHUNK], at % CHUNK
        yield "keys", stored(download(self.keys), self.k_type, self.d_k, False, pages, lanes)
        yield "values", stored(download(self.values), self.v_type, self.d_v, True, pages, lanes)

    def placed_like(self, like: LayerMemory[Any], end: int, download: Download) -> "AttentionCache[Any]":
        """A copy in the pages of ``like``, which has as many, since kernels may depend on where pages are."""
        assert isinstance(like, AttentionCache)
        pages, own, copies = download(like.table[:1])[0], cast(AttentionCache[Any], self), []
        for memory in (own.keys, own.values):
            copies.append(np.zeros((memory.shape[0], like.pages, *memory.shape[2:]), memory.dtype))
            # In this order, because a page that a window has passed may hold a later chunk now.
            for chunk in range(-(-end // CHUNK)):
                copies[-1][:, pages[chunk]] = memory[:, own.table[0, chunk]]
        return replace(own, keys=copies[0], values=copies[1], table=np.ascontiguousarray(pages[None]))


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
        #: Whether a snapshot and pages without a window are all that a sequence needs to continue.
        self.restorable = all(spec.restorable for spec in specs)
        #: The kinds of rings that lose positions as others are stored.
        self.rings = frozenset([*others, *(ring for spec in specs for ring in spec.rings(max_rows))])

    @property
    def rewind(self) -> int:
        """The number of latest tokens that can be rolled back, whatever has been read before them."""
        spare = [paging.spare for paging in self.pools if 0 < paging.window < self.n_ctx]
        return min((*spare, *(ring.capacity - ring.back for ring in self.rings)), default=self.n_ctx)
