"""The cache of a layer of Mamba-2 or of Kimi delta attention: rings of states, one for each segment, and of what each token
does to them.

Positions are divided into segments of 16, counted from position 0.  A layer stores its state at the beginning of each segment
and, for each token, what the recurrence reads of it.  A pass that begins in the middle of a segment reads the state at the
beginning of the segment, and repeats the tokens before the pass, in the same order and hence with the same bits.  To roll
tokens back, a sequence therefore continues from an earlier position.  Data of later positions is overwritten before it is
read.

Rings hold the latest segments.  Segment n is at index n % segments.  The convolution before the recurrence also reads a few
earlier positions, whose inputs are in a ring of their own.  A pass for which the rings have no room does not need them for
its own rows, and stores only the last of these.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.arrays import A
from engine.cache.pages import PagedMemory
from engine.cache.recurrent import SEGMENT
from engine.cache.spec import CacheSpec, HeldPages, LayerMemory, Ring, StoredRows, of_sequence, ring_length
from engine.cache.types import Types
from engine.limits import DECODE_ROWS


@dataclass
class MambaCache(LayerMemory[A]):
    """The cache of one layer.

    inputs: float32 [sequences, length, n_channels]; the inputs of the convolution for position p are in row p % length.
    states: float32 [sequences, segments, n_head, d, n]; the state before position 16 s is at index s % segments.  The state
        before position 0 is zero and is not stored.
    tokens: float32 [sequences, 16 segments, width]; what the recurrence reads of position p to change the state, such as
        results of the convolution, steps and decays, is in row p % (16 segments).
    taps: the number of taps of the convolution, each of which reads one position.
    """

    inputs: A
    states: A
    tokens: A
    taps: int

    def bytes_per_token(self, visible: np.ndarray) -> float:
        """The mean number of bytes that a token reads and writes: it reads the state, the tokens of its segment and the
        inputs of the convolution, and writes its own and, at the end of a segment, a state.

        visible: int64 [tokens], the number of positions that each token sees, its own included.
        """
        within = (visible - 1) % SEGMENT
        states = 1 + float((within == SEGMENT - 1).mean())
        tokens = 1 + float(within.mean())
        inputs = float(np.minimum(visible, self.taps).mean())
        sizes = float(np.prod(self.states.shape[2:])), self.tokens.shape[2], self.inputs.shape[2]
        return 4 * (states * sizes[0] + tokens * sizes[1] + inputs * sizes[2])

    def needed(self, slot: int, position: int, pages: HeldPages) -> list[StoredRows[A]]:
        """The entries that a pass of the sequence in ``slot`` reads if it begins at ``position``: inputs of the convolution,
        the state at the beginning of the segment, and the tokens in the segment before ``position``."""
        return self._needed(slot, position)

    def written(self, slot: int, first: int, end: int) -> list[StoredRows[A]]:
        """The entries that a pass of the sequence in ``slot`` over the positions [first, end) stores.  After a long pass, the
        rings contain only the last of them."""
        return self._rows(slot, (first, end), (first // SEGMENT + 1, end // SEGMENT + 1), (first, end))

    def has_room(self, rows: int) -> bool:
        """Whether a pass of so many rows can store what later passes need without overwriting what it reads."""
        length, segments = int(self.inputs.shape[1]), int(self.states.shape[1])
        return rows + self.taps - 1 <= length and rows <= SEGMENT * (segments - 1)

    def before_pass(self, like: LayerMemory[Any], position: int) -> "MambaCache[Any]":
        """A copy, in NumPy arrays, of what a pass of the sequence in slot 0 at ``position`` reads, because a long pass
        overwrites all entries of the rings.  The rings of the copy are as long as those of ``like``."""
        assert isinstance(like, MambaCache)
        needed = zip(self._needed(0, position), like._needed(0, position), strict=True)
        inputs, states, tokens = (mine.moved(theirs.ring.shape[0])[None] for mine, theirs in needed)
        return MambaCache(inputs, states, tokens, self.taps)

    def _needed(self, slot: int, position: int) -> list[StoredRows[A]]:
        segment = position // SEGMENT
        inputs, state = (max(0, position - self.taps + 1), position), (segment, segment + (segment > 0))
        return self._rows(slot, inputs, state, (SEGMENT * segment, position))

    def _rows(
        self, slot: int, inputs: tuple[int, int], state: tuple[int, int], tokens: tuple[int, int]
    ) -> list[StoredRows[A]]:
        return [
            StoredRows("inputs", of_sequence(self.inputs, slot), *inputs),
            StoredRows("state", of_sequence(self.states, slot), *state),
            StoredRows("tokens", of_sequence(self.tokens, slot), *tokens),
        ]


@dataclass(frozen=True)
class MambaCacheSpec(CacheSpec):
    """The specification of the cache of a layer.

    n_channels: the number of inputs of the convolution per position.
    taps: the number of taps of the convolution.
    n_head: the number of heads, each of which has a state [d, n].
    d: the number of elements of a head.
    n: the number of elements of the state for each of them.
    width: the number of elements that the recurrence reads of a position.
    rewind: the number of tokens that can always be rolled back.
    decode_rows: the maximum number of rows in a decode batch.
    """

    n_channels: int
    taps: int
    n_head: int
    d: int
    n: int
    width: int
    rewind: int
    decode_rows: int = DECODE_ROWS

    @property
    def segments(self) -> int:
        """The number of segments in the ring: the one that the oldest token to be rolled back is in, and those that may
        follow it in a decode batch or before the rollback."""
        return 1 + -(-max(self.rewind, self.decode_rows) // SEGMENT)

    def length(self, max_rows: int) -> int:
        """The number of rows in the ring of inputs, if a pass has at most ``max_rows`` rows."""
        return ring_length(self.taps, self.rewind, self.decode_rows, max_rows)

    @property
    def segment_bytes(self) -> int:
        """The size of a segment in bytes: a state and 16 tokens."""
        return 4 * (self.n_head * self.d * self.n + SEGMENT * self.width)

    @property
    def snapshot_bytes(self) -> int:
        """The bytes that a segment adds to a snapshot."""
        return self.segment_bytes

    def ring_bytes(self, max_rows: int) -> int:
        """The size in bytes of the rings of one sequence.  It does not depend on the context."""
        return 4 * self.length(max_rows) * self.n_channels + self.segments * self.segment_bytes

    def rings(self, max_rows: int) -> list[Ring]:
        """The ring of segments and the ring of inputs.

        A pass needs its segment, which may begin 15 positions before the pass, and taps - 1 inputs.  States are overwritten
        when a segment ends: after ``end`` positions, the ring contains those of segment end // 16 and of the ``segments`` - 1
        segments before it.
        """
        return [Ring(SEGMENT - 1, SEGMENT * self.segments - 1), Ring(self.taps - 1, self.length(max_rows))]

    def allocate(self, memory: PagedMemory, types: Types) -> MambaCache[Any]:
        """Allocate the rings of the layer."""
        n, segments = memory.n_sequences, self.segments
        shapes = [(n, self.length(memory.max_rows), self.n_channels), (n, segments, self.n_head, self.d, self.n)]
        shapes.append((n, SEGMENT * segments, self.width))
        inputs, states, tokens = (memory.zeros(shape, np.float32) for shape in shapes)
        return MambaCache(inputs, states, tokens, self.taps)
