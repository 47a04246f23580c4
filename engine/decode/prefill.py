"""Prefill: tokens that are read into a slot, slice by slice."""

from collections.abc import Collection, Sequence

import numpy as np

from engine.cache.sequence import Sequence as TokenSequence
from engine.decode.request import Request, State
from engine.decode.slot import Slot
from engine.models.base import Model

AHEAD = 128
"""The most tokens of a prompt in flight, unless a single pass reads more."""


class PrefillSlice:
    """Tokens that follow those which a slot holds, in a pass that is started in pieces.

    The sequence of the slot claims their positions at once and contains the tokens after ``finish``.
    """

    def __init__(
        self,
        model: Model,
        slot: Slot,
        tokens: Sequence[int],
        n_logits: int,
        stops: Collection[int] = (),
        observed: bool = False,
    ) -> None:
        """n_logits: the number of last tokens whose logits are wanted; stops: the numbers of tokens of the sequence after
        which snapshots are taken; observed: whether the masses of chunks are computed.  Raises ContextError if the
        positions do not fit into the context, and NoPages."""
        self.tokens, self.n_logits = tokens, n_logits
        self.first = first = slot.sequence.length
        self._slot = slot
        self._stops = stops
        self._n_vocab = model.config.n_vocab
        ids = np.array(tokens, np.int32)
        positions = np.arange(first, first + ids.size, dtype=np.int32)
        self._pieces = model.split(ids, positions, n_logits, slot.sequence, observed)

        #: The number of pieces of the pass, at least 1, and how many have not been started.
        self.pieces = self.left = self._pieces.pieces

    def advance(self, count: int) -> int:
        """Start the next ``count`` pieces, at most those that are left; returns how many were started."""
        before, self.left = self.left, self._pieces.advance(count)
        return before - self.left

    def finish(self, beside: bool = False) -> np.ndarray:
        """Commit the tokens to the slot's sequence; all pieces must have been started.  Returns the logits of the last ones,
        float32 [n_logits, n_vocab].

        beside: wait only for logits and snapshots, because other requests run.  Otherwise at most ``AHEAD`` tokens are in
        flight, so that the reported progress is accurate and an interrupt is noticed.
        """
        sequence, end = self._slot.sequence, self.first + len(self.tokens)
        logits = self._pieces.logits(wait=not beside and end // AHEAD > self.first // AHEAD)
        sequence.commit(self.tokens)
        sequence.settle()
        for stop in sorted(stop for stop in self._stops if self.first < stop <= sequence.length):
            self._slot.save(stop)
        return np.empty((0, self._n_vocab), np.float32) if logits is None else logits

    def cancel(self) -> None:
        """Start no further piece.  The next pass of the sequence claims the same positions again."""
        self._pieces.cancel()


class Prefilling(State):
    """A request whose tokens are being read into a slot."""

    def __init__(self, request: Request, slot: Slot) -> None:
        self.request = request
        self.slot = slot
        #: The numbers of tokens after which snapshots are taken.
        self.stops: set[int] = set()
        #: The slice that has been started and not finished.
        self.slice: PrefillSlice | None = None

    @property
    def sequence(self) -> TokenSequence:
        """The sequence in its slot."""
        return self.slot.sequence

    def cancel(self) -> None:
        """Start no further piece of the slice; it has to be read again from its beginning."""
        if self.slice is not None:
            self.slice.cancel()
            self.slice = None
