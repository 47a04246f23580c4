"""The memory of a recurrent layer: states at the ends of segments, and lists of the latest tokens, in rings.

Positions are divided into segments of 16, counted from position 0.  A layer stores its state where a segment begins, and for
each token what it adds to the state (``engine/cpu/delta_net.py``).  A pass that begins in the middle of a segment reads the
state at the segment's beginning and the tokens of the segment before the pass.  So rolling tokens back means only to continue
from an earlier position: what was stored for later positions is overwritten before it is read.

Rings hold the latest segments: of each the state at its beginning and 16 rows of each list.  Segment n is at index
n % segments.

The convolution before the state looks a few positions back; its inputs are also in a ring by position.  The ring has room
for a step of an answer and the positions that it looks back at: a longer pass has its own inputs, and stores the last ones.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from engine.arrays import A
from engine.cache.pages import PagedMemory, Paging
from engine.cache.spec import CacheSpec, HeldPages, LayerMemory, Ring, StoredRows, of_sequence
from engine.cache.types import Types
from engine.limits import DECODE_ROWS

SEGMENT = 16
"""Positions of a segment: a state is stored at each multiple of it.  The narrow kernels of a GPU compute at most as many
rows, so they end at most one segment of a sequence."""


@dataclass
class RecurrentCache(LayerMemory[A]):
    """The memory of a recurrent layer, for each of some sequences.

    conv: float32 [sequences, length, n_channels], the inputs of position p in row p % length; states: float32 [sequences,
    segments, n_v, d, d], the state before position 16 n at index n % segments (that before position 0 is zero and is not
    stored).  What position p adds to the state is in row p % (16 segments) of three lists: keys float32 [sequences, 16
    segments, n_k, d], normalized; deltas float32 [sequences, 16 segments, n_v, d]; decays float32 [sequences, 16 segments,
    n_v].  n_conv: the taps of the convolution, each of which reads one position.
    """

    conv: A
    states: A
    keys: A
    deltas: A
    decays: A
    n_conv: int

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """The state and the tokens of the segment that are read; a state is written where a segment ends, and one token is
        added."""
        within = (visible - 1) % SEGMENT
        states = 1 + float((within == SEGMENT - 1).mean())
        tokens = 1 + float(within.mean())
        of_token = sum(float(np.prod(ring.shape[2:])) for ring in (self.keys, self.deltas, self.decays))
        return 4 * (states * float(np.prod(self.states.shape[2:])) + tokens * of_token)

    def needed(self, slot: int, position: int, pages: HeldPages) -> list[StoredRows[A]]:
        """The inputs of the convolution, and the state and the tokens of the segment."""
        segment = position // SEGMENT
        inputs, state = (max(0, position - self.n_conv + 1), position), (segment, segment + (segment > 0))
        return self._rows(slot, inputs, state, (SEGMENT * segment, position))

    def written(self, slot: int, first: int, end: int) -> list[StoredRows[A]]:
        """What a pass of the sequence in ``slot`` over the positions [first, end) stores.  Of a long pass, the rings hold
        only the last entries."""
        return self._rows(slot, (first, end), (first // SEGMENT + 1, end // SEGMENT + 1), (first, end))

    def before_pass(self, like: LayerMemory[Any], position: int) -> "RecurrentCache[Any]":
        """All of it: a long pass overwrites the rings."""
        assert isinstance(like, RecurrentCache)
        needed = zip(self.needed(0, position, _no_pages), like.needed(0, position, _no_pages), strict=True)
        conv, states, keys, deltas, decays = (_moved(mine, theirs.ring.shape)[None] for mine, theirs in needed)
        return RecurrentCache(conv, states, keys, deltas, decays, self.n_conv)

    def _rows(
        self, slot: int, inputs: tuple[int, int], state: tuple[int, int], tokens: tuple[int, int]
    ) -> list[StoredRows[A]]:
        return [
            StoredRows("inputs", of_sequence(self.conv, slot), *inputs),
            StoredRows("state", of_sequence(self.states, slot), *state),
            StoredRows("keys", of_sequence(self.keys, slot), *tokens),
            StoredRows("deltas", of_sequence(self.deltas, slot), *tokens),
            StoredRows("decays", of_sequence(self.decays, slot), *tokens),
        ]


def _no_pages(paging: Paging) -> NoReturn:
    raise AssertionError("a recurrent layer has no pages")


def _moved(rows: StoredRows[Any], shape: tuple[int, ...]) -> np.ndarray:
    """The entries of a ring, in a NumPy array, copied into a ring of another length."""
    out = np.zeros(shape, rows.ring.dtype)
    for i in range(rows.first, rows.end):
        out[i % shape[0]] = rows.ring[i % rows.ring.shape[0]]
    return out


@dataclass(frozen=True)
class RecurrentCacheSpec(CacheSpec):
    """What a recurrent layer stores: n_channels inputs of a convolution of n_conv taps, and n_v matrices [d, d] with lists of
    n_k keys and n_v deltas per token, so that at least ``rewind`` tokens can be rolled back at any time.
    decode_rows: the most rows of a decode batch."""

    n_channels: int
    n_conv: int
    n_k: int
    n_v: int
    d: int
    rewind: int
    decode_rows: int = DECODE_ROWS

    @property
    def segments(self) -> int:
        """The number of segments in the rings: that of the last token to be rolled back, and those that may follow it."""
        return 1 + -(-max(self.rewind, 1) // SEGMENT)

    def length(self, max_rows: int) -> int:
        """Rows of the ring of inputs: a step never overwrites what it reads, nor any pass what an earlier position needs."""
        return max(min(max_rows, self.decode_rows), self.rewind) + self.n_conv - 1

    @property
    def segment_bytes(self) -> int:
        """The memory of a segment in bytes: a state and 16 rows of each list."""
        return 4 * (self.n_v * self.d * self.d + SEGMENT * (self.n_k * self.d + self.n_v * self.d + self.n_v))

    @property
    def snapshot_bytes(self) -> int:
        """The bytes that a segment adds to a snapshot."""
        return self.segment_bytes

    def ring_bytes(self, max_rows: int) -> int:
        """The memory of the layer in bytes for one sequence; it does not grow with the context."""
        return 4 * self.length(max_rows) * self.n_channels + self.segments * self.segment_bytes

    def rings(self, max_rows: int) -> list[Ring]:
        """A pass needs its segment, which may begin 15 positions before it, and n_conv - 1 inputs.  Segments are overwritten
        as a whole: after ``end`` positions, segment end // 16 and the ``segments`` - 1 before it are still there."""
        return [Ring(SEGMENT - 1, SEGMENT * self.segments - 1), Ring(self.n_conv - 1, self.length(max_rows))]

    def allocate(self, memory: PagedMemory, types: Types) -> RecurrentCache[Any]:
        """Allocate the rings."""
        n, tokens, n_v, d = memory.n_sequences, SEGMENT * self.segments, self.n_v, self.d
        shapes = [(n, self.length(memory.max_rows), self.n_channels), (n, self.segments, n_v, d, d)]
        shapes += [(n, tokens, self.n_k, d), (n, tokens, n_v, d), (n, tokens, n_v)]
        conv, states, keys, deltas, decays = (memory.zeros(shape, np.float32) for shape in shapes)
        return RecurrentCache(conv, states, keys, deltas, decays, self.n_conv)


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


def default_budget(free: int) -> int:
    """The default limit of host memory for snapshots, in bytes, if ``free`` bytes of it are free beside everything else that
    a model needs there: an eighth of them, at most 2 GiB.  A snapshot is useless if it makes the system swap."""
    return min(2 << 30, max(0, free) // 8)


class States:
    """Snapshots by the keys of the texts that they follow (``engine/cache/sequence.py``), within a budget of bytes.  The one
    that has not been wanted for the longest time goes first."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        #: The memory of all of them in bytes.
        self.n_bytes = 0
        self._kept: dict[bytes, Snapshot] = {}

    def __contains__(self, key: object) -> bool:
        """Whether there is a snapshot after the text with this key."""
        return key in self._kept

    def __len__(self) -> int:
        """The number of snapshots."""
        return len(self._kept)

    def add(self, key: bytes, snapshot: Snapshot) -> None:
        """Keep a snapshot; others are removed to make room for it."""
        self._remove(key)
        self._kept[key] = snapshot
        self.n_bytes += snapshot.n_bytes
        while self.n_bytes > self.budget and self._kept:
            self._remove(next(iter(self._kept)))

    def _remove(self, key: bytes) -> None:
        snapshot = self._kept.pop(key, None)
        self.n_bytes -= snapshot.n_bytes if snapshot is not None else 0

    def get(self, key: bytes) -> Snapshot:
        """The snapshot after the text with this key, which must be there."""
        snapshot = self._kept.pop(key)
        self._kept[key] = snapshot
        return snapshot

    def keep(self, keys: Collection[bytes]) -> None:
        """Remove those after texts whose keys are not among these."""
        for key in [key for key in self._kept if key not in keys]:
            self._remove(key)

    def clear(self) -> None:
        """Remove all of them."""
        self.keep(())
