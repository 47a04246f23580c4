"""The memory of attention over a window and compressed rows.

A *latent* is the key and the value of a position at once.  Each layer has the latents of its window in a ring: that of
position p is in row p % length.  A layer that compresses also has

- *compressed rows*: row r is made of the positions of block r, [r * ratio, (r + 1) * ratio), and perhaps of the block before.
  It is written when the block is complete, and again whenever that happens again; a token at position p sees the rows
  below (p + 1) // ratio only.  So rows are never removed, and none that is seen is out of date;
- an *open block*: what a row is made of, values and scores of each position, in a ring by position.  It has room for the
  positions that the next row is made of and a step of an answer, or the tokens that may be rolled back;
- with an indexer, keys for each compressed row, and an open block for them.

Rolling tokens back means only to continue from an earlier position.

Latents and compressed rows are stored in chunks of 64, [chunks, 64, d]; keys of the indexer are transposed within a chunk,
[chunks, d, 64].
"""

from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from engine.arrays import A
from engine.cache.kv import SPARE, Ring, Zeros
from engine.cache.recurrent import Rows
from engine.cache.types import CHUNK, CacheType, Types
from engine.limits import STEP_ROWS


@dataclass
class Blocks(Generic[A]):
    """Compressed rows of one kind, and the open block that the next ones are made of.

    rows: float32, or uint16 for the bits of float16, [chunks, 64, d], or [chunks, d, 64] for an indexer; pending: float32
    [length, 2, overlap * d], values and scores of position p in row p % length.
    """

    rows: A
    pending: A


@dataclass
class CompressedLayer(Generic[A]):
    """The memory of a layer: latents [chunks, 64, d] float32 or uint16, the bits of float16; compressed rows of ``ratio``
    positions, and the keys of an indexer, which chooses ``top_k`` rows, if it has them.

    back: the number of latest positions that a row may be made of besides its last one.
    """

    latents: A
    window: int
    k_type: CacheType
    v_type: CacheType
    ratio: int
    top_k: int
    back: int
    compressed: Blocks[A] | None = None
    keys: Blocks[A] | None = None

    def read(self, position: int) -> list[Rows[A]]:
        """What a pass that begins at ``position`` reads from rings."""
        chunks, lanes, d = (int(n) for n in self.latents.shape)
        latents: Any = self.latents.reshape(chunks * lanes, d)
        found = [Rows("latents", latents, max(0, position - self.window + 1), position)]
        for name, blocks in (("open block", self.compressed), ("indexer's open block", self.keys)):
            if blocks is not None:
                found.append(Rows(name, blocks.pending, max(0, position - self.back), position))
        return found


@dataclass(frozen=True)
class CompressedShape:
    """What a layer stores: latents of d elements for a window, and rows of d elements for blocks of ``ratio`` positions, each
    made of ``overlap`` blocks; ratio 0: no rows.  n_keys: the length of the keys of an indexer that chooses ``top_k`` rows,
    0: no indexer.  At least ``rewind`` tokens can be rolled back at any time."""

    d: int
    window: int
    ratio: int
    overlap: int
    n_keys: int
    top_k: int
    rewind: int

    def chunks(self, n_ctx: int, max_rows: int) -> int:
        """The length of the ring of latents in chunks."""
        return -(-min(n_ctx, self.window + max(max_rows, SPARE)) // CHUNK)

    @property
    def back(self) -> int:
        """The number of positions that a row is made of, but for the last one."""
        return max(0, self.overlap * self.ratio - 1)

    def pending(self, max_rows: int) -> int:
        """The length of the ring of an open block: a longer pass has its own values and scores, and stores the last ones."""
        return max(min(max_rows, STEP_ROWS), self.rewind) + self.back

    def row_chunks(self, n_ctx: int) -> int:
        """The number of chunks of compressed rows."""
        return max(1, -(-(n_ctx // self.ratio) // CHUNK)) if self.ratio else 0

    @property
    def _widths(self) -> list[int]:
        """The lengths of compressed rows and of keys."""
        return [width for width in (self.d, self.n_keys) if width] if self.ratio else []

    def _block_bytes(self, positions: int) -> int:
        return sum(4 * positions * 2 * self.overlap * width for width in self._widths)

    @property
    def slot_bytes(self) -> int:
        """The memory of a snapshot in bytes, with latents in float16."""
        return 2 * (self.window - 1) * self.d + self._block_bytes(self.back)

    def n_bytes(self, n_ctx: int, max_rows: int, types: Types) -> int:
        """The memory of the layer in bytes."""
        rows = self.row_chunks(n_ctx) * CHUNK
        stored = self.chunks(n_ctx, max_rows) * CHUNK * types.k.row_bytes(self.d)
        stored += sum(rows * types.k.row_bytes(width) for width in self._widths)
        return stored + self._block_bytes(self.pending(max_rows))

    def rings(self, n_ctx: int, max_rows: int) -> list[Ring]:
        """The latents, if their ring is shorter than the context, and the open block."""
        capacity = self.chunks(n_ctx, max_rows) * CHUNK
        rings = [Ring(self.window - 1, capacity)] if capacity < n_ctx else []
        return [*rings, Ring(self.back, self.pending(max_rows))] if self.ratio else rings

    def layer(self, n_ctx: int, max_rows: int, types: Types, zeros: Zeros) -> CompressedLayer[Any]:
        """The rings and the rows."""
        kind, dtype = types.k, types.k.dtype
        latents = zeros((self.chunks(n_ctx, max_rows), CHUNK, self.d), dtype)
        n, length = self.row_chunks(n_ctx), self.pending(max_rows)

        def blocks(width: int, *chunk: int) -> Blocks[Any] | None:
            if not self.ratio or not width:
                return None
            return Blocks(zeros((n, *chunk), dtype), zeros((length, 2, self.overlap * width), np.float32))

        compressed, keys = blocks(self.d, CHUNK, self.d), blocks(self.n_keys, self.n_keys, CHUNK)
        numbers = self.ratio, self.top_k, self.back
        return CompressedLayer(latents, self.window, kind, types.v, *numbers, compressed, keys)
