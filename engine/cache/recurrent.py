"""The memory of a recurrent layer: states at the ends of chunks, and lists of the latest tokens, in rings.

Positions are divided into chunks of 16, counted from position 0.  A layer stores its state where a chunk begins, and for each
token what it adds to the state (``engine/cpu/delta_net.py``).  A pass that begins in the middle of a chunk reads the state at
the chunk's beginning and the tokens of the chunk before the pass.  So rolling tokens back means only to continue from an
earlier position: what was stored for later positions is overwritten before it is read.

A slot holds a chunk: the state at its beginning and 16 rows of each list.  Chunk n is in slot n % slots.

The convolution before the state looks a few positions back; its inputs are also in a ring by position.  The ring has room
for a step of an answer and the positions that it looks back at: a longer pass has its own inputs, and stores the last ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from engine.arrays import A
from engine.cache.kv import Ring, Zeros
from engine.cache.types import Types
from engine.limits import STEP_ROWS

SPAN = 16
"""Positions of a chunk: a state is stored at each multiple of it.  A step has at most as many rows, so it ends at most one
chunk."""


@dataclass
class Rows(Generic[A]):
    """Entries ``first`` .. ``end`` - 1 of a ring, whose entry i is in row i % length.  name: what they are."""

    name: str
    ring: A
    first: int
    end: int

    def runs(self) -> Iterator[slice]:
        """The rows of the ring that hold the entries, as slices without gaps, in the order of the entries."""
        first, length = self.first, int(self.ring.shape[0])
        while first < self.end:
            row = first % length
            count = min(self.end - first, length - row)
            yield slice(row, row + count)
            first += count


@dataclass
class RecurrentLayer(Generic[A]):
    """The memory of a recurrent layer.

    conv: float32 [length, n_channels], the inputs of position p in row p % length; states: float32 [slots, n_v, d, d], the
    state before position 16 n in slot n % slots (that before position 0 is zero and is not stored).  What position p adds to
    the state is in row p % (16 slots) of three lists: keys float32 [16 slots, n_k, d], normalized; deltas float32 [16 slots,
    n_v, d]; decays float32 [16 slots, n_v].
    """

    conv: A
    states: A
    keys: A
    deltas: A
    decays: A

    def read(self, position: int, n_conv: int) -> list[Rows[A]]:
        """What a pass that begins at ``position`` reads."""
        chunk = position // SPAN
        tokens = (SPAN * chunk, position)
        return [
            Rows("inputs", self.conv, max(0, position - n_conv + 1), position),
            Rows("state", self.states, chunk, chunk + (chunk > 0)),
            Rows("keys", self.keys, *tokens),
            Rows("deltas", self.deltas, *tokens),
            Rows("decays", self.decays, *tokens),
        ]

    def written(self, first: int, end: int) -> list[Rows[A]]:
        """What a pass over the positions [first, end) stores.  Of a long pass, the rings hold only the last entries."""
        return [
            Rows("inputs", self.conv, first, end),
            Rows("state", self.states, first // SPAN + 1, end // SPAN + 1),
            Rows("keys", self.keys, first, end),
            Rows("deltas", self.deltas, first, end),
            Rows("decays", self.decays, first, end),
        ]


@dataclass(frozen=True)
class RecurrentShape:
    """What a recurrent layer stores: n_channels inputs of a convolution of n_conv taps, and n_v matrices [d, d] with lists of
    n_k keys and n_v deltas per token, so that at least ``rewind`` tokens can be rolled back at any time."""

    n_channels: int
    n_conv: int
    n_k: int
    n_v: int
    d: int
    rewind: int

    @property
    def slots(self) -> int:
        """The number of chunks: that of the last token to be rolled back, and those that may follow it."""
        return 1 + -(-max(self.rewind, 1) // SPAN)

    def length(self, max_rows: int) -> int:
        """Rows of the ring of inputs: a step never overwrites what it reads, nor any pass what an earlier position needs."""
        return max(min(max_rows, STEP_ROWS), self.rewind) + self.n_conv - 1

    @property
    def slot_bytes(self) -> int:
        """The memory of a slot in bytes: a state and the lists of a chunk."""
        return 4 * (self.n_v * self.d * self.d + SPAN * (self.n_k * self.d + self.n_v * self.d + self.n_v))

    def n_bytes(self, n_ctx: int, max_rows: int, types: Types) -> int:
        """The memory of the layer in bytes; it does not grow with the context."""
        return 4 * self.length(max_rows) * self.n_channels + self.slots * self.slot_bytes

    def rings(self, n_ctx: int, max_rows: int) -> list[Ring]:
        """A pass needs its chunk, which may begin 15 positions before it, and n_conv - 1 inputs.  Chunks are overwritten as a
        whole: after ``end`` positions, chunk end // 16 and the ``slots`` - 1 before it are still there."""
        return [Ring(SPAN - 1, SPAN * self.slots - 1), Ring(self.n_conv - 1, self.length(max_rows))]

    def layer(self, n_ctx: int, max_rows: int, types: Types, zeros: Zeros) -> RecurrentLayer[Any]:
        """The rings."""
        tokens, n_v, d = SPAN * self.slots, self.n_v, self.d
        shapes = [(self.length(max_rows), self.n_channels), (self.slots, n_v, d, d)]
        shapes += [(tokens, self.n_k, d), (tokens, n_v, d), (tokens, n_v)]
        return RecurrentLayer(*(zeros(shape, np.float32) for shape in shapes))


@dataclass
class Snapshot:
    """What a model needs besides keys and values to continue after ``length`` tokens: arrays in host memory, in its own
    order."""

    length: int
    arrays: list[np.ndarray]

    @property
    def n_bytes(self) -> int:
        """Its memory in bytes."""
        return sum(array.nbytes for array in self.arrays)


class Snapshots:
    """Snapshots along one text, within a budget of bytes: the first, if there is room for two, and the latest ones."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._kept: dict[int, Snapshot] = {}

    @property
    def n_bytes(self) -> int:
        """The memory of all of them in bytes."""
        return sum(snapshot.n_bytes for snapshot in self._kept.values())

    @property
    def lengths(self) -> list[int]:
        """The positions at which they were taken, in rising order."""
        return sorted(self._kept)

    def add(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; others are removed to make room for it."""
        self._kept[snapshot.length] = snapshot
        while self.n_bytes > self.budget and self._kept:
            lengths = self.lengths
            del self._kept[lengths[1] if len(lengths) > 2 else lengths[0]]

    def best(self, length: int) -> Snapshot | None:
        """The longest snapshot that is not longer than ``length``."""
        fitting = [at for at in self._kept if at <= length]
        return self._kept[max(fitting)] if fitting else None

    def forget(self, length: int) -> None:
        """Remove snapshots longer than ``length``: the text changes after that many tokens."""
        self._kept = {at: snapshot for at, snapshot in self._kept.items() if at <= length}
