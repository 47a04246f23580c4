"""Prefill: tokens that are read into slots, slice by slice."""

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import cast

import numpy as np

from engine.cache.sequence import Sequence as TokenSequence
from engine.decode.request import Request, RowReader, State
from engine.decode.slot import Slot
from engine.models.base import Model
from engine.ops.executor import ReadablePass

AHEAD = 128
"""The most tokens of a prompt in flight, unless a single pass reads more, or passes are started ahead."""


class PrefillSlice:
    """Tokens that follow those which a slot holds, and that a pass reads."""

    def __init__(self, slot: Slot, tokens: Sequence[int], n_logits: int, stops: Collection[int] = ()) -> None:
        """n_logits: the number of last tokens whose logits are wanted; stops: the numbers of tokens of the sequence after
        which snapshots are taken."""
        self.slot, self.tokens, self.n_logits = slot, tokens, n_logits
        self.first = slot.sequence.length
        self._stops = stops

    @property
    def end(self) -> int:
        """The number of tokens of the sequence after the slice."""
        return self.first + len(self.tokens)

    def commit(self) -> None:
        """Let the sequence of the slot contain the tokens, all of which have been read, or will be before whatever is
        started next."""
        sequence = self.slot.sequence
        sequence.commit(self.tokens)
        sequence.settle()
        for stop in sorted(stop for stop in self._stops if self.first < stop <= self.end):
            self.slot.save(stop)


class PrefillPass:
    """A pass over slices of one or several prompts that is started in pieces.

    The sequences of the slots claim their positions at once.  They contain the tokens after ``PrefillSlice.commit``, which
    follows ``finish``, or the start of the last piece if the next pass may read more tokens of them.
    """

    def __init__(
        self,
        model: Model,
        slices: Sequence[PrefillSlice],
        observed: bool = False,
        at_once: bool = False,
        reader: RowReader | None = None,
    ) -> None:
        """slices: if there are several, at most the last token of each has logits; observed: whether the masses of chunks are
        computed, of a single slice; at_once: whether nothing needs to run between its pieces, so that it may be started
        now; reader: what reads the logits of a single slice on the device, instead of a copy of them.
        Raises ContextError if the positions do not fit into the context, and NoPages."""
        self.slices = list(slices)
        self._n_vocab = model.config.n_vocab
        #: The number of tokens.
        self.rows = sum(len(each.tokens) for each in slices)
        if len(slices) == 1:
            (only,) = slices
            ids = np.array(only.tokens, np.int32)
            positions = np.arange(only.first, only.end, dtype=np.int32)
            self._pieces = model.split(ids, positions, only.n_logits, only.slot.sequence, observed, at_once)
            if reader is not None:
                cast(ReadablePass, self._pieces).read_by(partial(reader, first=only.end - only.n_logits))
        else:
            parts = [(each.slot.sequence, each.tokens) for each in slices]
            self._pieces = model.split_together(parts, [each.n_logits > 0 for each in slices], at_once)

        #: The number of pieces of the pass, at least 1, and how many have not been started.
        self.pieces = self.left = self._pieces.pieces

    @property
    def n_logits(self) -> int:
        """The number of tokens whose logits are wanted."""
        return sum(each.n_logits for each in self.slices)

    def advance(self, count: int) -> int:
        """Start the next ``count`` pieces, at most those that are left; returns how many were started."""
        before, self.left = self.left, self._pieces.advance(count)
        return before - self.left

    def is_running(self) -> bool:
        """Whether all pieces have been started, and the device is known to compute them still."""
        return self.left == 0 and self._pieces.is_running()

    def finish(self, beside: bool = False) -> list[np.ndarray]:
        """The logits of the last tokens of each slice, float32 [n_logits, n_vocab], or what the reader has made of them; all
        pieces must have been started.

        beside: wait only for logits, because other requests run.  Otherwise wait for a pass that reaches a multiple of
        ``AHEAD`` tokens of a prompt, so that the reported progress is accurate and an interrupt is noticed.
        """
        wait = not beside and any(each.end // AHEAD > each.first // AHEAD for each in self.slices)
        logits = self._pieces.logits(wait=wait)
        if logits is None:
            logits = np.empty((0, self._n_vocab), np.float32)
        ends = np.cumsum([each.n_logits for each in self.slices])
        return np.split(logits, ends[:-1])

    def cancel(self) -> None:
        """Start no further piece.  The next passes of the sequences claim the same positions again."""
        self._pieces.cancel()


class Prefilling(State):
    """A request whose tokens are being read into a slot."""

    def __init__(self, request: Request, slot: Slot) -> None:
        self.request = request
        self.slot = slot
        #: The numbers of tokens after which snapshots are taken.
        self.stops: set[int] = set()
        #: The number of tokens that need not be read, and when the others began to be.
        self.kept, self.begun = 0, 0.0
        #: The pass that has been started and not finished, and reads a slice of it.
        self.reading: Reading | None = None

    @property
    def sequence(self) -> TokenSequence:
        """The sequence in its slot."""
        return self.slot.sequence

    def cancel(self) -> None:
        """Leave the pass that reads a slice of it; the slice has to be read again from its beginning."""
        if self.reading is not None:
            self.reading.leave(self)


class Reading:
    """A pass that reads slices of requests in their prefill."""

    def __init__(self, passing: PrefillPass, members: Iterable[Prefilling]) -> None:
        """members: the requests, each with a slice of the pass, in the same order."""
        self.passing = passing
        #: The requests that wait for the pass, and their slices.
        self.members = list(zip(members, passing.slices, strict=True))
        #: The requests of which the next pass may read more tokens, and their slices.
        self.passed: list[tuple[Prefilling, PrefillSlice]] = []
        #: The number of pieces that were started because a request has left.
        self.rushed = 0
        for member, _ in self.members:
            member.reading = self

    @property
    def requests(self) -> list[Request]:
        """The requests that have not left the pass."""
        return [member.request for member, _ in (*self.members, *self.passed)]

    def let_pass(self, member: Prefilling, part: PrefillSlice) -> None:
        """Let a request go on with its next slice, since all pieces have been started."""
        self.members.remove((member, part))
        member.reading = None
        part.commit()
        self.passed.append((member, part))

    def leave(self, member: Prefilling) -> None:
        """Remove a request.  Its slot may then be used by others, so all pieces are started before; if no request is left,
        no further piece is started."""
        self.members = [each for each in self.members if each[0] is not member]
        member.reading = None
        if not self.members:
            self.passing.cancel()
        elif self.passing.left:
            self.rushed += self.passing.advance(self.passing.left)

    def end(self) -> list[tuple[Prefilling, PrefillSlice]]:
        """Remove all requests that wait for the pass, which has ended, and return them with their slices."""
        ended, self.members = self.members, []
        for member, _ in ended:
            member.reading = None
        return ended

    def cancel(self) -> None:
        """Start no further piece; all slices have to be read again."""
        self.passing.cancel()
        self.end()
