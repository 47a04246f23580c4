"""The cache of latent attention: for each position, one vector, which is the key and whose first elements are the value.

Position j of a sequence is in row j % 64 of page ``table[sequence, j // 64]``, as in ``engine/cache/kv.py``.  The elements of
a row are adjacent, because a chunk is read twice: for scores, which are sums over the elements of a row, and for weighted
values, which are sums over rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.arrays import A
from engine.cache.contents import rows_at
from engine.cache.pages import PagedMemory, Paging
from engine.cache.spec import CacheSpec, Download, LayerMemory
from engine.cache.types import CHUNK, CacheType, Types, refusal_for_latents


@dataclass(frozen=True)
class LatentCacheSpec(CacheSpec):
    """The specification of the cache of latent attention: ``width`` elements per position, for the whole context."""

    width: int

    def page_bytes(self, types: Types) -> dict[Paging, int]:
        """The size of a page in bytes."""
        return {Paging(): CHUNK * types.k.row_bytes(self.width)}

    def refusal(self, types: Types, architecture: str) -> str:
        """Why latents cannot have these element types, as a sentence without a period; "" if they can.

        A latent is both key and value, so the two types must be equal, and not quantized.  architecture: the name for the
        sentence.
        """
        return refusal_for_latents(types, architecture)

    def allocate(self, memory: PagedMemory, types: Types) -> "LatentCache[Any]":
        """Allocate the pages of the layer."""
        pool = memory.pool(Paging())
        rows = memory.pages(pool, (pool.n_pages, CHUNK, self.width), types.k.dtype)
        return LatentCache(rows, memory.table(Paging()), types.k, types.v, self.width, memory.max_rows)


@dataclass
class LatentCache(LayerMemory[A]):
    """The pages of one layer with latent attention.

    rows: [pages, 64, width], float32, or uint16 for the bits of float16.
    table: int32 [sequences, chunks], the pages of the chunks of each sequence.
    max_rows: the maximum number of rows in a pass that reads the cache.
    k_type, v_type: the element type; both are the same.
    """

    rows: A
    table: A
    k_type: CacheType
    v_type: CacheType
    width: int
    max_rows: int

    @property
    def pages(self) -> int:
        """The number of pages."""
        return int(self.rows.shape[0])

    @property
    def types(self) -> Types:
        """The element type of latents, given both as key type and as value type."""
        return Types(self.k_type, self.v_type)

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """The mean number of bytes that a token reads: the latents of all positions that it sees.

        visible: int64 [tokens], the number of positions that each token sees, its own included.
        """
        return self.k_type.row_bytes(self.width) * float(visible.mean())

    def contents(self, length: int, download: Download) -> Iterator[tuple[str, np.ndarray]]:
        """The name and array [length, width] of the latents of the first ``length`` positions of the sequence in slot 0."""
        yield "latents", rows_at((download(self.rows), download(self.table)), np.arange(length))
