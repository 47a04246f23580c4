"""The cache of a recurrent layer: rings of states, one for each segment, and of the updates of each token.

Positions are divided into segments of 16, counted from position 0.  A layer stores its state at the beginning of each segment
and, for each token, the update of the state (``engine/cpu/delta_net.py``).  A pass that begins in the middle of a segment
reads the state at the beginning of the segment and the updates of the tokens before the pass.  To roll tokens back, a
sequence therefore continues from an earlier position.  Data of later positions is overwritten before it is read.

Rings hold the latest segments: of each the state at its beginning and 16 rows of each list.  Segment n is at index
n % segments.

The convolution before the state also reads a few earlier positions.  Its inputs are stored in a ring indexed by position,
which has room for these positions and a decode batch.  A pass with more rows does not need the ring for its own inputs, and
stores only the last of them.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from engine.arrays import A
from engine.cache.copies import Copies
from engine.cache.pages import PagedMemory, Paging
from engine.cache.spec import CacheSpec, HeldPages, LayerMemory, Ring, StoredRows, of_sequence, ring_length
from engine.cache.types import Types
from engine.limits import DECODE_ROWS
from engine.shares import HeadRows, share

SEGMENT = 16
"""The number of positions in a segment.  The narrow kernels of a GPU compute at most as many rows, so such a pass ends at
most one segment of a sequence."""


@dataclass
class RecurrentCache(LayerMemory[A]):
    """The cache of one recurrent layer.

    conv: float32 [sequences, length, n_channels]; the inputs of the convolution for position p are in row p % length.
    states: float32 [sequences, segments, n_v, d, d]; the state before position 16 n is at index n % segments.  The state
        before position 0 is zero and is not stored.
    keys: float32 [sequences, 16 segments, n_k, d], normalized.
    deltas: float32 [sequences, 16 segments, n_v, d].
    decays: float32 [sequences, 16 segments, n_v].
    n_conv: the number of taps of the convolution, each of which reads one position.

    The update of the state by position p is in row p % (16 segments) of ``keys``, ``deltas`` and ``decays``.
    """

    conv: A
    states: A
    keys: A
    deltas: A
    decays: A
    n_conv: int

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """The mean number of bytes that a token reads and writes: it reads the state and the updates of the tokens in its
        segment, and writes its own update and, at the end of a segment, a state.

        visible: int64 [tokens], the number of positions that each token sees, its own included.
        """
        within = (visible - 1) % SEGMENT
        states = 1 + float((within == SEGMENT - 1).mean())
        tokens = 1 + float(within.mean())
        of_token = sum(float(np.prod(ring.shape[2:])) for ring in (self.keys, self.deltas, self.decays))
        return 4 * (states * float(np.prod(self.states.shape[2:])) + tokens * of_token)

    def needed(self, slot: int, position: int, pages: HeldPages) -> list[StoredRows[A]]:
        """The entries that a pass of the sequence in ``slot`` reads if it begins at ``position``: inputs of the convolution,
        the state at the beginning of the segment, and the updates of the tokens in the segment before ``position``."""
        segment = position // SEGMENT
        inputs, state = (max(0, position - self.n_conv + 1), position), (segment, segment + (segment > 0))
        return self._rows(slot, inputs, state, (SEGMENT * segment, position))

    def written(self, slot: int, first: int, end: int) -> list[StoredRows[A]]:
        """The entries that a pass of the sequence in ``slot`` over the positions [first, end) stores.  After a long pass,
        the rings contain only the last of them."""
        return self._rows(slot, (first, end), (first // SEGMENT + 1, end // SEGMENT + 1), (first, end))

    def before_pass(self, like: LayerMemory[Any], position: int) -> "RecurrentCache[Any]":
        """A copy, in NumPy arrays, of what a pass of the sequence in slot 0 at ``position`` reads, because a long pass
        overwrites all entries of the rings.  The rings of the copy are as long as those of ``like``."""
        assert isinstance(like, RecurrentCache)
        needed = zip(self.needed(0, position, _no_pages), like.needed(0, position, _no_pages), strict=True)
        conv, states, keys, deltas, decays = (mine.moved(theirs.ring.shape[0])[None] for mine, theirs in needed)
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


@dataclass(frozen=True)
class RecurrentCacheSpec(CacheSpec):
    """The specification of the cache of a recurrent layer.

    n_channels: the number of inputs of the convolution per position.
    n_conv: the number of taps of the convolution.
    n_k: the number of key heads.
    n_v: the number of value heads, each of which has a state [d, d].
    d: the number of elements of a head.
    rewind: the number of tokens that can always be rolled back.
    decode_rows: the maximum number of rows in a decode batch.
    grouped: whether value head h uses key head h // (n_v / n_k); otherwise it uses key head h % n_k.
    """

    n_channels: int
    n_conv: int
    n_k: int
    n_v: int
    d: int
    rewind: int
    decode_rows: int = DECODE_ROWS
    grouped: bool = False

    def part(self, owner: int, n_owners: int) -> "RecurrentCacheSpec":
        """What is stored of some key heads and their value heads."""
        first, last = share(self.n_k, owner, n_owners)
        n_k, n_v = last - first, (last - first) * (self.n_v // self.n_k)
        return replace(self, n_channels=(2 * n_k + n_v) * self.d, n_k=n_k, n_v=n_v)

    def joined(self, name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
        """An array of the whole layer, whose heads, or channels of q, k and v, are in their order."""
        values = (self.n_v,) if self.grouped else (self.n_k,) * (self.n_v // self.n_k)
        segments = {"inputs": (self.n_k, self.n_k, *values), "keys": (self.n_k,)}.get(name, values)
        cut = HeadRows(self.n_k, segments).cut(len(parts))
        if name == "inputs":
            cut = cut.times(self.d)
        return np.concatenate([parts[p.owner][:, p.at : p.at + p.size] for p in cut.pieces], axis=1)

    @property
    def segments(self) -> int:
        """The number of segments in the ring: the one that the oldest token to be rolled back is in, and those that may
        follow it."""
        return 1 + -(-max(self.rewind, 1) // SEGMENT)

    def length(self, max_rows: int) -> int:
        """The number of rows in the ring of inputs, if a pass has at most ``max_rows`` rows."""
        return ring_length(self.n_conv, self.rewind, self.decode_rows, max_rows)

    @property
    def segment_bytes(self) -> int:
        """The size of a segment in bytes: a state and 16 rows of each list."""
        return 4 * (self.n_v * self.d * self.d + SEGMENT * (self.n_k * self.d + self.n_v * self.d + self.n_v))

    @property
    def snapshot_bytes(self) -> int:
        """The bytes that a segment adds to a snapshot."""
        return self.segment_bytes

    def ring_bytes(self, max_rows: int) -> int:
        """The size in bytes of the rings of one sequence.  It does not depend on the context."""
        return 4 * self.length(max_rows) * self.n_channels + self.segments * self.segment_bytes

    def rings(self, max_rows: int) -> list[Ring]:
        """The ring of segments and the ring of inputs.

        A pass needs its segment, which may begin 15 positions before the pass, and n_conv - 1 inputs.  Segments are
        overwritten as a whole: after ``end`` positions, the ring contains segment end // 16 and the ``segments`` - 1 segments
        before it.
        """
        return [Ring(SEGMENT - 1, SEGMENT * self.segments - 1), Ring(self.n_conv - 1, self.length(max_rows))]

    def allocate(self, memory: PagedMemory, types: Types) -> RecurrentCache[Any]:
        """Allocate the rings of the layer."""
        n, tokens, n_v, d = memory.n_sequences, SEGMENT * self.segments, self.n_v, self.d
        shapes = [(n, self.length(memory.max_rows), self.n_channels), (n, self.segments, n_v, d, d)]
        shapes += [(n, tokens, self.n_k, d), (n, tokens, n_v, d), (n, tokens, n_v)]
        conv, states, keys, deltas, decays = (memory.zeros(shape, np.float32) for shape in shapes)
        return RecurrentCache(conv, states, keys, deltas, decays, self.n_conv)


class Snapshot:
    """The data that a model needs, in addition to keys and values, to continue after ``length`` tokens."""

    def __init__(self, length: int, arrays: list[np.ndarray], copies: Sequence[Copies] = ()) -> None:
        """arrays: in host memory, in an order that the model defines; copies: what still fills them."""
        self.length = length
        self._arrays = arrays
        self._copies = copies

    @property
    def arrays(self) -> list[np.ndarray]:
        """The arrays, as soon as they are filled.  Raises DeviceError if the device has failed before."""
        for copies in self._copies:
            copies.wait()
        self._copies = ()
        return self._arrays

    @property
    def n_bytes(self) -> int:
        """The size of the arrays in bytes."""
        return sum(array.nbytes for array in self._arrays)


def default_budget(free: int) -> int:
    """The default limit of host memory for snapshots, in bytes: an eighth of the free memory, at most 2 GiB.

    The limit is low because snapshots are useless if they make the system swap.  free: the host memory in bytes that is free
    after the model has allocated everything else.
    """
    return min(2 << 30, max(0, free) // 8)


class States:
    """Snapshots, indexed by the keys of the texts that they follow (``engine/cache/sequence.py``).

    budget: the maximum size of all snapshots together, in bytes.  If it is exceeded, the least recently used snapshots are
    removed.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        #: The size of all snapshots in bytes.
        self.n_bytes = 0
        self._kept: dict[bytes, Snapshot] = {}

    def __contains__(self, key: object) -> bool:
        """Whether there is a snapshot for the text with this key."""
        return key in self._kept

    def __len__(self) -> int:
        """The number of snapshots."""
        return len(self._kept)

    def add(self, key: bytes, snapshot: Snapshot) -> None:
        """Add a snapshot, and remove the least recently used ones if the budget is exceeded."""
        self._remove(key)
        self._kept[key] = snapshot
        self.n_bytes += snapshot.n_bytes
        while self.n_bytes > self.budget and self._kept:
            self._remove(next(iter(self._kept)))

    def _remove(self, key: bytes) -> None:
        snapshot = self._kept.pop(key, None)
        self.n_bytes -= snapshot.n_bytes if snapshot is not None else 0

    def get(self, key: bytes) -> Snapshot:
        """The snapshot for the text with this key.  Raises KeyError if there is none."""
        snapshot = self._kept.pop(key)
        self._kept[key] = snapshot
        return snapshot

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove the snapshots with these keys."""
        for key in keys:
            self._remove(key)

    def keep(self, keys: Collection[bytes]) -> None:
        """Remove all snapshots except those with these keys."""
        self.remove([key for key in self._kept if key not in keys])

    def clear(self) -> None:
        """Remove all snapshots."""
        self.keep(())
