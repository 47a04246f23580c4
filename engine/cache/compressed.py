"""The cache of a layer that attends to a window and to compressed rows.

A *latent* is both the key and the value of a position.  Each layer stores the latents of its window in pages.  A sequence
frees these pages when the window has passed them.  A layer that compresses also stores

- *compressed rows*: row r is computed from the positions of block r, [r * ratio, (r + 1) * ratio), and, if blocks overlap,
  from those of block r - 1.  It is written when its block is complete, and written again if the block is completed again
  after a rollback.  A token at position p sees only the rows below (p + 1) // ratio.  Rows are therefore never removed, and
  every visible row is up to date.  A page holds 64 rows;
- an *open block*: the values and scores of the positions from which the next row is computed, in a ring for each sequence,
  indexed by position.  It has room for the positions of the next row and, in addition, for a decode batch or for the tokens
  that may be rolled back, whichever is more;
- with an indexer, a key for each compressed row, and an open block for the keys.

To roll tokens back, a sequence continues from an earlier position.  No data has to be restored.

Latents and compressed rows are stored in pages of 64, [pages, 64, d].  The keys of the indexer are transposed within a page,
[pages, d, 64].
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, cast

import numpy as np

from engine.arrays import A
from engine.cache.contents import rows_at
from engine.cache.pages import PagedMemory, Paging
from engine.cache.spec import CacheSpec, Download, HeldPages, LayerMemory, Ring, StoredRows, of_sequence
from engine.cache.types import CHUNK, CacheType, Types, refusal_for_latents
from engine.limits import DECODE_ROWS


@dataclass
class PagedRows(Generic[A]):
    """Compressed rows, or keys of an indexer.

    rows: float32, or uint16 for the bits of float16, [pages, 64, d]; [pages, d, 64] for the keys of an indexer.
    table: int32 [sequences, chunks]; row r of a sequence is in page ``table[sequence, r // 64]``.
    """

    rows: A
    table: A


@dataclass
class Blocks(PagedRows[A]):
    """Compressed rows, or keys of an indexer, and the open block from which the next ones are computed.

    pending: float32 [sequences, length, 2, overlap * d]; the values and scores of position p are in row p % length.
    """

    pending: A


@dataclass
class CompressedCache(LayerMemory[A]):
    """The cache of one layer: latents and, if the layer has them, compressed rows and the keys of an indexer.

    latents: [pages, 64, d], float32, or uint16 for the bits of float16.
    table: int32 [sequences, chunks], the pages of the latents of each sequence.
    paging: how latents are divided into pages.
    ratio: the number of positions per compressed row; 0: there are no compressed rows.
    top_k: the number of rows that the indexer selects.
    back: the number of positions before its last one from which a compressed row is computed.
    """

    latents: A
    table: A
    paging: Paging
    k_type: CacheType
    v_type: CacheType
    ratio: int
    top_k: int
    back: int
    compressed: Blocks[A] | None = None
    keys: Blocks[A] | None = None

    @property
    def window(self) -> int:
        """The number of latest positions whose latents a row reads, its own position included."""
        return self.paging.window

    @property
    def types(self) -> Types:
        """The element type of latents and of compressed rows, given both as key type and as value type."""
        return Types(self.k_type, self.v_type)

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """The mean number of bytes that a token reads: latents of the window, compressed rows, and keys of the indexer.

        visible: int64 [tokens], the number of positions that each token sees, its own included.
        """
        size = self.k_type.row_bytes(1)
        total = size * self.latents.shape[2] * float(np.minimum(visible, self.window).mean())
        if self.compressed is None:
            return total
        rows = visible // self.ratio
        if self.keys is not None:
            total += size * self.keys.rows.shape[1] * float(np.where(rows > self.top_k, rows, 0).mean())
            rows = np.minimum(rows, self.top_k)
        return total + size * self.latents.shape[2] * float(rows.mean())

    def needed(self, slot: int, position: int, pages: HeldPages) -> list[StoredRows[A]]:
        """The entries that a pass of the sequence in ``slot`` reads if it begins at ``position`` and that a snapshot must
        contain: the latents of the window, and the open blocks."""
        n, lanes, d = (int(n) for n in self.latents.shape)
        latents, own = cast(A, self.latents.reshape(n * lanes, d)), pages(self.paging)
        found = [StoredRows("latents", latents, max(0, position - self.window + 1), position, own)]
        for name, blocks in (("open block", self.compressed), ("indexer's open block", self.keys)):
            if blocks is not None:
                pending = of_sequence(blocks.pending, slot)
                found.append(StoredRows(name, pending, max(0, position - self.back), position))
        return found

    def contents(self, length: int, download: Download) -> Iterator[tuple[str, np.ndarray]]:
        """The names and arrays of what the sequence in slot 0 stores for its first ``length`` tokens, besides
        :meth:`needed`: compressed rows [rows, d], and keys of the indexer [rows, n_keys]."""
        at = np.arange(length // max(self.ratio, 1))
        if self.compressed is not None:
            yield "compressed rows", rows_at((download(self.compressed.rows), download(self.compressed.table)), at)
        if self.keys is not None:
            yield "indexer's keys", rows_at((download(self.keys.rows).swapaxes(1, 2), download(self.keys.table)), at)


@dataclass(frozen=True)
class CompressedCacheSpec(CacheSpec):
    """The specification of a cache of latents for a window and of compressed rows.

    d: the number of elements of a latent and of a compressed row.
    window: the number of latest positions whose latents a row reads, its own position included.
    ratio: the number of positions per compressed row; 0: there are no compressed rows.
    overlap: the number of consecutive blocks from which a row is computed.
    n_keys: the number of elements of an indexer's key; 0: there is no indexer.
    top_k: the number of rows that the indexer selects.
    rewind: the number of tokens that can always be rolled back.
    decode_rows: the maximum number of rows in a decode batch.
    """

    d: int
    window: int
    ratio: int
    overlap: int
    n_keys: int
    top_k: int
    rewind: int
    decode_rows: int = DECODE_ROWS

    @property
    def paging(self) -> Paging:
        """The division of latents into pages."""
        return Paging(CHUNK, self.window, self.decode_rows)

    @property
    def row_paging(self) -> Paging:
        """The division of compressed rows into pages."""
        return Paging(CHUNK * self.ratio)

    @property
    def back(self) -> int:
        """The number of positions before its last one from which a row is computed."""
        return max(0, self.overlap * self.ratio - 1)

    def pending(self, max_rows: int) -> int:
        """The length of the ring of an open block in positions.

        A pass with more rows does not need the ring for its own values and scores, and stores only the last of them.
        """
        return max(min(max_rows, self.decode_rows), self.rewind) + self.back

    @property
    def _widths(self) -> list[int]:
        """The numbers of elements of a compressed row and of a key."""
        return [width for width in (self.d, self.n_keys) if width] if self.ratio else []

    def _block_bytes(self, positions: int) -> int:
        return sum(4 * positions * 2 * self.overlap * width for width in self._widths)

    @property
    def snapshot_bytes(self) -> int:
        """The size in bytes of this layer's part of a snapshot, with latents in float16."""
        return 2 * (self.window - 1) * self.d + self._block_bytes(self.back)

    def refusal(self, types: Types, architecture: str) -> str:
        """Why latents cannot have these element types, as a sentence without a period; "" if they can.

        A latent is both key and value, so the two types must be equal, and not quantized.  architecture: the name for the
        sentence.
        """
        return refusal_for_latents(types, architecture)

    def page_bytes(self, types: Types) -> dict[Paging, int]:
        """The size in bytes of a page of latents and, if the layer has compressed rows, of a page of rows with their keys."""
        pages = {self.paging: CHUNK * types.k.row_bytes(self.d)}
        if self.ratio:
            pages[self.row_paging] = sum(CHUNK * types.k.row_bytes(width) for width in self._widths)
        return pages

    def ring_bytes(self, max_rows: int) -> int:
        """The size in bytes of the open blocks of one sequence."""
        return self._block_bytes(self.pending(max_rows))

    def rings(self, max_rows: int) -> list[Ring]:
        """The ring of the open block, or none if the layer has no compressed rows."""
        return [Ring(self.back, self.pending(max_rows))] if self.ratio else []

    def allocate(self, memory: PagedMemory, types: Types) -> CompressedCache[Any]:
        """Allocate the pages and rings of the layer."""
        kind, dtype, pool, length = types.k, types.k.dtype, memory.pool(self.paging), self.pending(memory.max_rows)
        latents = memory.pages(pool, (pool.n_pages, CHUNK, self.d), dtype)

        def blocks(width: int, *page: int) -> Blocks[Any] | None:
            if not self.ratio or not width:
                return None
            rows = memory.pool(self.row_paging)
            pending = memory.zeros((memory.n_sequences, length, 2, self.overlap * width), np.float32)
            return Blocks(memory.pages(rows, (rows.n_pages, *page), dtype), memory.table(self.row_paging), pending)

        compressed, keys = blocks(self.d, CHUNK, self.d), blocks(self.n_keys, self.n_keys, CHUNK)
        numbers = self.ratio, self.top_k, self.back
        return CompressedCache(
            latents, memory.table(self.paging), self.paging, kind, types.v, *numbers, compressed, keys
        )
