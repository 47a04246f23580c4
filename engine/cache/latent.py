"""The memory of latent attention: for each position one vector that is its key, and whose first elements are its value.

Position j of a sequence is row j % 64 of page ``table[sequence, j // 64]``, as in ``engine/cache/kv.py``.  The elements of a
row are adjacent: a chunk is read for scores, which sum over the elements of a row, and for weighted values, which sum over
rows.
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
    """What a layer with latent attention stores per position: ``width`` elements.  It sees the whole context."""

    width: int

    def page_bytes(self, types: Types) -> dict[Paging, int]:
        """The bytes of a page."""
        return {Paging(): CHUNK * types.k.row_bytes(self.width)}

    def refusal(self, types: Types, architecture: str) -> str:
        """A latent is key and value, so both types must be the same, and not quantized."""
        return refusal_for_latents(types, architecture)

    def allocate(self, memory: PagedMemory, types: Types) -> "LatentCache[Any]":
        """Allocate the pages."""
        pool = memory.pool(Paging())
        rows = memory.pages(pool, (pool.n_pages, CHUNK, self.width), types.k.dtype)
        return LatentCache(rows, pool.table, types.k, types.v, self.width)


@dataclass
class LatentCache(LayerMemory[A]):
    """The pages of one layer: rows [pages, 64, width], float32 or the bits of float16.  Both types are the same.  table:
    int32 [sequences, chunks], the pages of the chunks of a sequence."""

    rows: A
    table: A
    k_type: CacheType
    v_type: CacheType
    width: int

    @property
    def pages(self) -> int:
        """The number of pages."""
        return int(self.rows.shape[0])

    @property
    def types(self) -> Types:
        """The element type of latents, twice."""
        return Types(self.k_type, self.v_type)

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """The latents of all positions."""
        return self.k_type.row_bytes(self.width) * float(visible.mean())

    def contents(self, length: int, download: Download) -> Iterator[tuple[str, np.ndarray]]:
        """Latents [positions, width]."""
        yield "latents", rows_at((download(self.rows), download(self.table)), np.arange(length))
