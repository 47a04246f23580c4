"""The cache of latent attention: for each position, one vector, which is the key and whose first elements are the value.

With an indexer, a position also has a key of the indexer.  A page holds both.

Position j of a sequence is in row j % 64 of page ``table[sequence, j // 64]``, as in ``engine/cache/kv.py``.  The elements of
a row are adjacent, because a chunk is read twice: for scores, which are sums over the elements of a row, and for weighted
values, which are sums over rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.arrays import A
from engine.cache.compressed import PagedRows
from engine.cache.contents import rows_at
from engine.cache.pages import PagedMemory, Paging
from engine.cache.spec import CacheSpec, Download, LayerMemory
from engine.cache.types import CHUNK, CacheType, Types, refusal_for_latents


@dataclass(frozen=True)
class LatentCacheSpec(CacheSpec):
    """The specification of the cache of latent attention: ``width`` elements per position, for the whole context.

    n_keys: the number of elements of an indexer's key; 0: the layer has no indexer.
    top_k: the number of positions that an indexer selects for the layer; 0: it attends to all.
    """

    width: int
    n_keys: int = 0
    top_k: int = 0

    def page_bytes(self, types: Types) -> dict[Paging, int]:
        """The size of a page in bytes."""
        keys = types.k.row_bytes(self.n_keys) if self.n_keys else 0
        return {Paging(): CHUNK * (types.k.row_bytes(self.width) + keys)}

    def refusal(self, types: Types, architecture: str) -> str:
        """Why latents cannot have these element types, as a sentence without a period; "" if they can.

        A latent is both key and value, so the two types must be equal, and not quantized.  architecture: the name for the
        sentence.
        """
        return refusal_for_latents(types, architecture)

    def allocate(self, memory: PagedMemory, types: Types) -> "LatentCache[Any]":
        """Allocate the pages of the layer."""
        pool = memory.pool(Paging())
        rows, table = memory.pages(pool, (pool.n_pages, CHUNK, self.width), types.k.dtype), memory.table(Paging())
        keys = None
        if self.n_keys:
            keys = PagedRows(memory.pages(pool, (pool.n_pages, self.n_keys, CHUNK), types.k.dtype), table)
        chooses = 0 < self.top_k < int(table.shape[1]) * CHUNK
        return LatentCache(rows, table, types.k, types.v, self.width, memory.max_rows, keys, self.top_k, chooses)


@dataclass
class LatentCache(LayerMemory[A]):
    """The pages of one layer with latent attention.

    rows: [pages, 64, width], float32, or uint16 for the bits of float16.
    table: int32 [sequences, chunks], the pages of the chunks of each sequence.
    max_rows: the maximum number of rows in a pass that reads the cache.
    keys: the keys of the indexer, or None.
    top_k: the number of positions that an indexer selects.
    chooses: whether a sequence can be so long that an indexer leaves positions out.
    k_type, v_type: the element type; both are the same.
    """

    rows: A
    table: A
    k_type: CacheType
    v_type: CacheType
    width: int
    max_rows: int
    keys: PagedRows[A] | None = None
    top_k: int = 0
    chooses: bool = False

    @property
    def pages(self) -> int:
        """The number of pages."""
        return int(self.rows.shape[0])

    @property
    def types(self) -> Types:
        """The element type of latents, given both as key type and as value type."""
        return Types(self.k_type, self.v_type)

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """The mean number of bytes that a token reads: the latents of all positions that it sees, or of those that the
        indexer selects, and the keys of the indexer.

        visible: int64 [tokens], the number of positions that each token sees, its own included.
        """
        if not self.chooses:
            return self.k_type.row_bytes(self.width) * float(visible.mean())
        total = self.k_type.row_bytes(self.width) * float(np.minimum(visible, self.top_k).mean())
        if self.keys is not None:
            scored = float(np.where(visible > self.top_k, visible, 0).mean())
            total += self.k_type.row_bytes(int(self.keys.rows.shape[1])) * scored
        return total

    def contents(self, length: int, download: Download) -> Iterator[tuple[str, np.ndarray]]:
        """The names and arrays of the first ``length`` positions of the sequence in slot 0: latents [length, width], and keys
        of the indexer [length, n_keys]."""
        at = np.arange(length)
        yield "latents", rows_at((download(self.rows), download(self.table)), at)
        if self.keys is not None:
            yield "indexer's keys", rows_at((download(self.keys.rows).swapaxes(1, 2), download(self.keys.table)), at)
