"""The memory of latent attention: for each position one vector that is its key, and whose first elements are its value.

Position j of a layer is row j % 64 of ring chunk (j // 64) % chunks, as in ``engine/cache/kv.py``.  The elements of a row are
adjacent: a chunk is read for scores, which sum over the elements of a row, and for weighted values, which sum over rows.
"""

from dataclasses import dataclass
from typing import Any, Generic

from engine.arrays import A
from engine.cache.kv import Ring, Zeros
from engine.cache.types import CHUNK, CacheType, Types


@dataclass(frozen=True)
class LatentShape:
    """What a layer with latent attention stores per position: ``width`` elements.  It sees the whole context."""

    width: int

    def chunks(self, n_ctx: int) -> int:
        """The length of the ring in chunks."""
        return -(-n_ctx // CHUNK)

    def n_bytes(self, n_ctx: int, max_rows: int, types: Types) -> int:
        """The memory of the ring in bytes."""
        return self.chunks(n_ctx) * CHUNK * types.k.row_bytes(self.width)

    def rings(self, n_ctx: int, max_rows: int) -> list[Ring]:
        """None: all positions of the context stay."""
        return []

    def layer(self, n_ctx: int, max_rows: int, types: Types, zeros: Zeros) -> "LatentCache[Any]":
        """The ring."""
        chunks = self.chunks(n_ctx)
        rows = zeros((chunks, CHUNK, self.width), types.k.dtype)
        return LatentCache(rows, types.k, types.v, chunks, self.width)


@dataclass
class LatentCache(Generic[A]):
    """The ring of one layer: rows [chunks, 64, width], float32 or the bits of float16.  Both types are the same."""

    rows: A
    k_type: CacheType
    v_type: CacheType
    chunks: int
    width: int
