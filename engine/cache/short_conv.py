"""The cache of a layer with a short convolution: a ring of its inputs, by position.

A token reads the inputs of the few positions before it.  A ring has room for these positions and, in addition, for a decode
batch or for the tokens that may be rolled back, whichever is more.  To roll tokens back, a sequence therefore continues from
an earlier position.  A longer pass does not need the ring for its own inputs, and stores only the last of them.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.arrays import A
from engine.cache.pages import PagedMemory
from engine.cache.spec import CacheSpec, HeldPages, LayerMemory, Ring, StoredRows, of_sequence, ring_length
from engine.cache.types import Types
from engine.limits import DECODE_ROWS


@dataclass
class ShortConvCache(LayerMemory[A]):
    """The cache of one layer.

    inputs: float32 [sequences, length, n]; the inputs of the convolution for position p are in row p % length.
    taps: the number of taps of the convolution, each of which reads one position.
    """

    inputs: A
    taps: int

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """The mean number of bytes that a token reads and writes: the inputs of earlier positions, and its own.

        visible: int64 [tokens], the number of positions that each token sees, its own included.
        """
        return 4 * self.inputs.shape[2] * float(np.minimum(visible, self.taps).mean())

    def needed(self, slot: int, position: int, pages: HeldPages) -> list[StoredRows[A]]:
        """The entries that a pass of the sequence in ``slot`` reads if it begins at ``position``: the inputs of the positions
        before it."""
        return self.written(slot, max(0, position - self.taps + 1), position)

    def written(self, slot: int, first: int, end: int) -> list[StoredRows[A]]:
        """The entries that a pass of the sequence in ``slot`` over the positions [first, end) stores.  After a long pass, the
        ring contains only the last of them."""
        return [StoredRows("inputs", of_sequence(self.inputs, slot), first, end)]

    def has_room(self, rows: int) -> bool:
        """Whether a pass of so many rows can store its inputs without overwriting those that it reads."""
        return rows + self.taps - 1 <= int(self.inputs.shape[1])

    def before_pass(self, like: LayerMemory[Any], position: int) -> "ShortConvCache[Any]":
        """A copy, in NumPy arrays, of what a pass of the sequence in slot 0 at ``position`` reads, because a long pass
        overwrites all entries of the ring.  The ring of the copy is as long as that of ``like``."""
        assert isinstance(like, ShortConvCache)
        (inputs,) = self.written(0, max(0, position - self.taps + 1), position)
        return ShortConvCache(inputs.moved(like.inputs.shape[1])[None], self.taps)


@dataclass(frozen=True)
class ShortConvCacheSpec(CacheSpec):
    """The specification of the cache of a layer with a short convolution.

    n: the number of inputs of the convolution per position.
    taps: the number of taps of the convolution.
    rewind: the number of tokens that can always be rolled back.
    decode_rows: the maximum number of rows in a decode batch.
    """

    n: int
    taps: int
    rewind: int
    decode_rows: int = DECODE_ROWS

    def length(self, max_rows: int) -> int:
        """The number of rows in the ring, if a pass has at most ``max_rows`` rows."""
        return ring_length(self.taps, self.rewind, self.decode_rows, max_rows)

    @property
    def snapshot_bytes(self) -> int:
        """The size in bytes of this layer's part of a snapshot: the inputs that the next token reads."""
        return 4 * (self.taps - 1) * self.n

    def ring_bytes(self, max_rows: int) -> int:
        """The size in bytes of the ring of one sequence.  It does not depend on the context."""
        return 4 * self.length(max_rows) * self.n

    def rings(self, max_rows: int) -> list[Ring]:
        """The ring of inputs."""
        return [Ring(self.taps - 1, self.length(max_rows))]

    def allocate(self, memory: PagedMemory, types: Types) -> ShortConvCache[Any]:
        """Allocate the ring of the layer."""
        shape = memory.n_sequences, self.length(memory.max_rows), self.n
        return ShortConvCache(memory.zeros(shape, np.float32), self.taps)
