"""The memory of attention over a window and compressed rows.

A *latent* is the key and the value of a position at once.  Each layer has the latents of its window in pages, which a
sequence gives back when the window has passed them.  A layer that compresses also has

- *compressed rows*: row r is made of the positions of block r, [r * ratio, (r + 1) * ratio), and perhaps of the block before.
  It is written when the block is complete, and again whenever that happens again; a token at position p sees the rows
  below (p + 1) // ratio only.  So rows are never removed, and none that is seen is out of date.  A page holds 64 rows;
- an *open block*: what a row is made of, values and scores of each position, in a ring of each sequence by position.  It has
  room for the positions that the next row is made of and a step of an answer, or the tokens that may be rolled back;
- with an indexer, keys for each compressed row, and an open block for them.

Rolling tokens back means only to continue from an earlier position.

Latents and compressed rows are stored in pages of 64, [pages, 64, d]; keys of the indexer are transposed within a page,
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
class Blocks(Generic[A]):
    """Compressed rows of one kind, and the open block that the next ones are made of.

    rows: float32, or uint16 for the bits of float16, [pages, 64, d], or [pages, d, 64] for an indexer; table int32
    [sequences, chunks]: row r of a sequence is in page ``table[sequence, r // 64]``; pending: float32 [sequences, length, 2,
    overlap * d], values and scores of position p in row p % length.
    """

    rows: A
    table: A
    pending: A


@dataclass
class CompressedCache(LayerMemory[A]):
    """The memory of a layer: latents [pages, 64, d] float32 or uint16, the bits of float16, with their table int32
    [sequences, chunks]; compressed rows of ``ratio`` positions, and the keys of an indexer, which chooses ``top_k`` rows, if
    it has them.

    paging: how latents are divided into pages; back: the number of latest positions that a row may be made of besides its
    last one.
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
        """The number of latest positions whose latents a row reads."""
        return self.paging.window

    @property
    def types(self) -> Types:
        """The element type of latents and of compressed rows, twice."""
        return Types(self.k_type, self.v_type)

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """Latents of the window, compressed rows, and keys of the indexer."""
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
        """The latents of the window, and the open blocks."""
        n, lanes, d = (int(n) for n in self.latents.shape)
        latents, own = cast(A, self.latents.reshape(n * lanes, d)), pages(self.paging)
        found = [StoredRows("latents", latents, max(0, position - self.window + 1), position, own)]
        for name, blocks in (("open block", self.compressed), ("indexer's open block", self.keys)):
            if blocks is not None:
                pending = of_sequence(blocks.pending, slot)
                found.append(StoredRows(name, pending, max(0, position - self.back), position))
        return found

    def contents(self, length: int, download: Download) -> Iterator[tuple[str, np.ndarray]]:
        """Compressed rows [rows, d], and keys of the indexer [rows, d]."""
        at = np.arange(length // max(self.ratio, 1))
        if self.compressed is not None:
            yield "compressed rows", rows_at((download(self.compressed.rows), download(self.compressed.table)), at)
        if self.keys is not None:
            yield "indexer's keys", rows_at((download(self.keys.rows).swapaxes(1, 2), download(self.keys.table)), at)


@dataclass(frozen=True)
class CompressedCacheSpec(CacheSpec):
    """What a layer stores: latents of d elements for a window, and rows of d elements for blocks of ``ratio`` positions, each
    made of ``overlap`` blocks; ratio 0: no rows.  n_keys: the length of the keys of an indexer that chooses ``top_k`` rows,
    0: no indexer.  At least ``rewind`` tokens can be rolled back at any time.  decode_rows: the most rows of a
    decode batch."""

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
        """How latents are divided into pages."""
        return Paging(CHUNK, self.window, self.decode_rows)

    @property
    def row_paging(self) -> Paging:
        """How compressed rows are divided into pages."""
        return Paging(CHUNK * self.ratio)

    @property
    def back(self) -> int:
        """The number of positions that a row is made of, but for the last one."""
        return max(0, self.overlap * self.ratio - 1)

    def pending(self, max_rows: int) -> int:
        """The length of the ring of an open block: a longer pass has its own values and scores, and stores the last ones."""
        return max(min(max_rows, self.decode_rows), self.rewind) + self.back

    @property
    def _widths(self) -> list[int]:
        """The lengths of compressed rows and of keys."""
        return [width for width in (self.d, self.n_keys) if width] if self.ratio else []

    def _block_bytes(self, positions: int) -> int:
        return sum(4 * positions * 2 * self.overlap * width for width in self._widths)

    @property
    def snapshot_bytes(self) -> int:
        """The bytes that the layer adds to a snapshot, with latents in float16."""
        return 2 * (self.window - 1) * self.d + self._block_bytes(self.back)

    def refusal(self, types: Types, architecture: str) -> str:
        """A latent is key and value, so both types must be the same, and not quantized."""
        return refusal_for_latents(types, architecture)

    def page_bytes(self, types: Types) -> dict[Paging, int]:
        """The bytes of a page of latents and, if there are any, of a page of rows with their keys."""
        pages = {self.paging: CHUNK * types.k.row_bytes(self.d)}
        if self.ratio:
            pages[self.row_paging] = sum(CHUNK * types.k.row_bytes(width) for width in self._widths)
        return pages

    def ring_bytes(self, max_rows: int) -> int:
        """The bytes of the open blocks of one sequence."""
        return self._block_bytes(self.pending(max_rows))

    def rings(self, max_rows: int) -> list[Ring]:
        """The open block."""
        return [Ring(self.back, self.pending(max_rows))] if self.ratio else []

    def allocate(self, memory: PagedMemory, types: Types) -> CompressedCache[Any]:
        """Allocate the pages and the rings."""
        kind, dtype, pool, length = types.k, types.k.dtype, memory.pool(self.paging), self.pending(memory.max_rows)
        latents = memory.pages(pool, (pool.n_pages, CHUNK, self.d), dtype)

        def blocks(width: int, *page: int) -> Blocks[Any] | None:
            if not self.ratio or not width:
                return None
            rows = memory.pool(self.row_paging)
            pending = memory.zeros((memory.n_sequences, length, 2, self.overlap * width), np.float32)
            return Blocks(memory.pages(rows, (rows.n_pages, *page), dtype), rows.table, pending)

        compressed, keys = blocks(self.d, CHUNK, self.d), blocks(self.n_keys, self.n_keys, CHUNK)
        numbers = self.ratio, self.top_k, self.back
        return CompressedCache(latents, pool.table, self.paging, kind, types.v, *numbers, compressed, keys)
