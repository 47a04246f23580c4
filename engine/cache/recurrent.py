"""The memory of a recurrent layer: the state after each of the latest positions, in a ring of slots.

The state after position p lies in slot p % slots, so there is no live state to save and none to restore: a pass that
begins at p reads slot (p - 1) % slots, and taking tokens back means no more than to go on from an earlier position.  A
pass of k rows leaves k states, one per boundary between tokens, as long as there are slots; a longer one leaves those of
its last rows.

The convolution before the state looks a few positions back; its inputs lie in a ring by position, too.  It has room for a
step of an answer and what that looks back at: a longer pass has its own inputs at hand, and leaves the last of them there.
"""

from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from engine.arrays import A
from engine.cache.kv import Ring, Zeros
from engine.cache.types import Types
from engine.limits import STEP_ROWS


@dataclass
class RecurrentLayer(Generic[A]):
    """conv: float32 [length, n_channels], the inputs of position p in row p % length; states: float32 [slots, n_heads,
    d, d], the state after position p in slot p % slots."""

    conv: A
    states: A


@dataclass(frozen=True)
class RecurrentShape:
    """What one recurrent layer stores: n_channels inputs of a convolution of n_conv taps, and in each of ``slots`` slots
    n_heads matrices [d, d]."""

    n_channels: int
    n_conv: int
    n_heads: int
    d: int
    slots: int

    def length(self, max_rows: int) -> int:
        """Rows of the ring of inputs: a step never overwrites what it reads, nor any pass what an earlier state needs."""
        return max(min(max_rows, STEP_ROWS), self.slots) + self.n_conv - 1

    @property
    def slot_bytes(self) -> int:
        """Memory of a slot."""
        return 4 * self.n_heads * self.d * self.d

    def n_bytes(self, n_ctx: int, max_rows: int, types: Types) -> int:
        """Memory of the layer; it does not grow with the context."""
        return 4 * self.length(max_rows) * self.n_channels + self.slots * self.slot_bytes

    def rings(self, n_ctx: int, max_rows: int) -> list[Ring]:
        """A pass needs the last state, and n_conv - 1 inputs."""
        return [Ring(1, self.slots), Ring(self.n_conv - 1, self.length(max_rows))]

    def layer(self, n_ctx: int, max_rows: int, types: Types, zeros: Zeros) -> RecurrentLayer[Any]:
        """The rings."""
        conv = zeros((self.length(max_rows), self.n_channels), np.float32)
        return RecurrentLayer(conv, zeros((self.slots, self.n_heads, self.d, self.d), np.float32))


@dataclass
class Snapshot:
    """What a model needs beside keys and values to go on after ``length`` tokens: arrays in host memory, in its own order."""

    length: int
    arrays: list[np.ndarray]

    @property
    def n_bytes(self) -> int:
        """Memory of it."""
        return sum(array.nbytes for array in self.arrays)


class Snapshots:
    """Snapshots along one text, within a budget of bytes: the first stays, as long as there is room for two, and the
    latest."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._kept: dict[int, Snapshot] = {}

    @property
    def n_bytes(self) -> int:
        """Memory of all of them."""
        return sum(snapshot.n_bytes for snapshot in self._kept.values())

    @property
    def lengths(self) -> list[int]:
        """Where they were taken, in rising order."""
        return sorted(self._kept)

    def add(self, snapshot: Snapshot) -> None:
        """Keep one; others make room for it."""
        self._kept[snapshot.length] = snapshot
        while self.n_bytes > self.budget and self._kept:
            lengths = self.lengths
            del self._kept[lengths[1] if len(lengths) > 2 else lengths[0]]

    def best(self, length: int) -> Snapshot | None:
        """The longest that is not longer than ``length``."""
        fitting = [at for at in self._kept if at <= length]
        return self._kept[max(fitting)] if fitting else None

    def forget(self, length: int) -> None:
        """The text goes on otherwise after ``length`` tokens."""
        self._kept = {at: snapshot for at, snapshot in self._kept.items() if at <= length}
