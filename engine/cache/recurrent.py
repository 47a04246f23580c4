"""The memory of a recurrent layer: the state after each of the latest positions, in a ring of slots.

The state after position p is stored in slot p % slots, so there is no live state to save and none to restore: a pass that
begins at p reads slot (p - 1) % slots, and rolling tokens back means only to continue from an earlier position.  A pass of
k rows stores k states, one per boundary between tokens, as far as there are slots; a longer one stores those of its last
rows.

The convolution before the state looks a few positions back; its inputs are also in a ring by position.  The ring has room
for a step of an answer and the positions that it looks back at: a longer pass has its own inputs, and stores the last ones.
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
    """The memory of a recurrent layer.

    conv: float32 [length, n_channels], the inputs of position p in row p % length; states: float32 [slots, n_heads,
    d, d], the state after position p in slot p % slots.
    """

    conv: A
    states: A


@dataclass(frozen=True)
class RecurrentShape:
    """What a recurrent layer stores: n_channels inputs of a convolution of n_conv taps, and n_heads matrices [d, d] in each
    of ``slots`` slots."""

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
        """The memory of a slot in bytes."""
        return 4 * self.n_heads * self.d * self.d

    def n_bytes(self, n_ctx: int, max_rows: int, types: Types) -> int:
        """The memory of the layer in bytes; it does not grow with the context."""
        return 4 * self.length(max_rows) * self.n_channels + self.slots * self.slot_bytes

    def rings(self, n_ctx: int, max_rows: int) -> list[Ring]:
        """A pass needs the last state and n_conv - 1 inputs."""
        return [Ring(1, self.slots), Ring(self.n_conv - 1, self.length(max_rows))]

    def layer(self, n_ctx: int, max_rows: int, types: Types, zeros: Zeros) -> RecurrentLayer[Any]:
        """The rings."""
        conv = zeros((self.length(max_rows), self.n_channels), np.float32)
        return RecurrentLayer(conv, zeros((self.slots, self.n_heads, self.d, self.d), np.float32))


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
