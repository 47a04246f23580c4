"""Slots as values: what a slot holds is copied out, and taken up by a slot of this or another model with the same layout.

Both happen piece by piece, so that the answers of others are computed meanwhile.  The pages that are copied are *pinned*
until the end: nobody else can write to them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from engine.cache.pages import NoPages, Paging
from engine.cache.recurrent import Snapshot
from engine.cache.sequence import Sequence as TokenSequence
from engine.cache.values import PageValues
from engine.decode.core import EngineCore
from engine.decode.served_model import ServedModel
from engine.decode.slot import Slot
from engine.models.base import Model

PIECE = 16 << 20
"""Bytes of pages that are copied while the model is locked."""


class ValuedModel(ServedModel, Protocol):
    """A model whose slots are values."""

    core: EngineCore

    @property
    def closed(self) -> bool:
        """Whether the model has been closed."""


class PageAt(NamedTuple):
    """A page of a sequence: its kind, and its chunk."""

    paging: Paging
    chunk: int


@dataclass
class Held:
    """What a slot holds.

    tokens: those of its sequence; salt: the salt that it has; snapshot: what the sequence needs besides pages, None if its
    contents cannot be continued; pages: the places of the pages; copied: the values of those that others may write to.
    """

    tokens: list[int]
    salt: str
    snapshot: Snapshot | None = None
    pages: dict[PageAt, int] = field(default_factory=dict)
    copied: dict[PageAt, np.ndarray] = field(default_factory=dict)


class SlotValues:
    """The values of the slots of a model."""

    def __init__(self, served: ValuedModel) -> None:
        self._served = served
        model = served.model
        owners = [model.placement.memory(il) for il in model.config.owners]
        self.pages = PageValues(model.cache, owners)

    # --- copy out ------------------------------------------------------------------------------------------------

    def pin(self, slot: Slot) -> Held:
        """What a slot holds.  Its full pages are pinned until :meth:`unpin`."""
        served = self._served
        with served.lock:
            served.check_open()
            if slot.owner is not None:
                served.core.interrupt()
            sequence = slot.sequence
            held = Held(list(slot.text), sequence.salt)
            if not sequence.tokens or sequence.thinned or not sequence.intact:
                return held
            with served.core.guarded():
                held.snapshot = served.model.save(sequence)
                for paging in self.pages.kinds:
                    for chunk, page in sequence.pages(paging).items():
                        at = PageAt(paging, chunk)
                        if paging.span * (chunk + 1) <= sequence.length:
                            served.model.cache.pools[paging].share(page)
                            served.slots.pinned[paging][page] += 1
                            held.pages[at] = page
                        elif paging.span * chunk < sequence.length:
                            # The next tokens of the slot are stored there.
                            held.copied[at] = self.pages.read(paging, [page])[0]
            return held

    def copies(self, held: Held) -> Iterator[tuple[PageAt, np.ndarray]]:
        """The values of the pages of a slot, uint8 [n] each, in the order of ``places``."""
        left = list(held.pages)
        while left:
            paging = left[0].paging
            most = max(1, PIECE // self.pages.n_bytes[paging])
            piece = [at for at in left[:most] if at.paging == paging]
            with self.turn():
                values = self.pages.read(paging, [held.pages[at] for at in piece])
            yield from zip(piece, values, strict=True)
            del left[: len(piece)]
        yield from held.copied.items()

    @staticmethod
    def places(held: Held) -> list[PageAt]:
        """The places of the values of a slot's pages, those of a kind in a row."""
        return [*held.pages, *held.copied]

    def unpin(self, held: Held) -> None:
        """Let the pages of a slot go."""
        with self._served.lock:
            if not self._served.closed:
                for at, page in held.pages.items():
                    self._let_go(at.paging, page)
        held.pages.clear()

    # --- take up -------------------------------------------------------------------------------------------------

    def take_up(
        self,
        slot: Slot,
        tokens: Sequence[int],
        salt: str,
        snapshot: Snapshot,
        values: Iterator[tuple[PageAt, np.ndarray | None]],
        on_pages: Callable[[int], None] | None = None,
    ) -> bool:
        """Let a slot hold ``tokens`` with a salt, whose pages have these values, and what a snapshot has.  Returns whether
        there was a value for each page; if not, the slot is empty.

        values: in any order, best with consecutive chunks; None for a value that cannot be used.  on_pages: called with the
        number of pages that have been copied.

        Raises NoPages if all pages of the cache are in use.
        """
        served, taken = self._served, dict[Paging, dict[int, int]]()
        with self.turn():
            if slot.owner is not None:
                served.core.interrupt()
            slot.clear()
            served.slots.use(slot)
        complete = False
        try:
            for piece in self._pieces(values):
                if piece is None:
                    return False
                with self.turn():
                    self._write(slot, piece, taken)
                    if on_pages is not None:
                        on_pages(sum(map(len, taken.values())))
            with self.turn():
                complete = self._finish(slot, tokens, salt, snapshot, taken)
        finally:
            if not complete:
                with served.lock:
                    for paging, own in {} if served.closed else taken.items():
                        for page in own.values():
                            self._let_go(paging, page)
        return complete

    def _pieces(
        self, values: Iterator[tuple[PageAt, np.ndarray | None]]
    ) -> Iterator[list[tuple[PageAt, np.ndarray]] | None]:
        """Values of one kind, as many as a piece has; None for one that cannot be used."""
        piece: list[tuple[PageAt, np.ndarray]] = []
        for at, value in values:
            if value is None or value.size != self.pages.n_bytes[at.paging]:
                yield None
                return
            if piece and (at.paging != piece[0][0].paging or (len(piece) + 1) * value.size > PIECE):
                yield piece
                piece = []
            piece.append((at, value))
        if piece:
            yield piece

    def _write(
        self, slot: Slot, piece: Sequence[tuple[PageAt, np.ndarray]], taken: dict[Paging, dict[int, int]]
    ) -> None:
        """Copy values to new pages, which are pinned."""
        served, paging = self._served, piece[0][0].paging
        own = taken.setdefault(paging, {})
        pages: list[int] = []
        for at, _ in piece:
            pages.append(self.take(paging, slot))
            served.slots.pinned[paging][pages[-1]] += 1
            own[at.chunk] = pages[-1]
        self.pages.write(paging, pages, [value for _, value in piece])

    def take(self, paging: Paging, slot: Slot, interrupts: bool = True) -> int:
        """A page for new contents.  If all are in use, other slots than ``slot`` that nobody uses are cleared, and, if it
        interrupts them, those of requests, which continue later.  Raises NoPages."""
        served = self._served
        while True:
            try:
                return served.model.cache.pools[paging].take()
            except NoPages:
                if interrupts:
                    served.core.interrupt()
                if not served.slots.free_pages(besides=slot):
                    raise

    def _finish(
        self,
        slot: Slot,
        tokens: Sequence[int],
        salt: str,
        snapshot: Snapshot,
        taken: dict[Paging, dict[int, int]],
    ) -> bool:
        """Let a slot hold tokens in pages that have their values; returns whether the snapshot fits."""
        served = self._served
        if slot.owner is not None:
            served.core.interrupt()
        slot.clear()
        sequence = slot.sequence
        sequence.belong(salt)
        sequence.take_up(tokens, {paging: dict(sorted(own.items())) for paging, own in taken.items()})
        for paging, own in taken.items():
            # From now on they are those of the sequence.
            for page in own.values():
                self._unpin(paging, page)
        taken.clear()
        if snapshot.length != sequence.length or not sequence.intact or not fits(served.model, snapshot, sequence):
            slot.clear()
            return False
        served.model.restore(snapshot, sequence)
        sequence.settle()
        served.slots.use(slot)
        return True

    # --- both ----------------------------------------------------------------------------------------------------

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the model for a moment, and then let it do what others have wanted of it meanwhile."""
        with self._served.lock:
            self._served.check_open()
            with self._served.core.guarded():
                yield
        self._served.core.catch_up()

    def _unpin(self, paging: Paging, page: int) -> None:
        pinned = self._served.slots.pinned[paging]
        pinned[page] -= 1
        if not pinned[page]:
            del pinned[page]

    def _let_go(self, paging: Paging, page: int) -> None:
        self._unpin(paging, page)
        self._served.model.cache.pools[paging].give_back(page)


def fits(model: Model, snapshot: Snapshot, sequence: TokenSequence) -> bool:
    """Whether a snapshot has what a sequence needs after as many tokens, with the shapes that this has there."""
    remembered = (rows for _, rows in model.remembered(snapshot.length, sequence))
    wanted = [
        ((rows.end - rows.first, *rows.ring.shape[1:]), np.dtype(cast(Any, rows.ring).dtype))
        for rows in remembered
        if rows.first < rows.end
    ]
    return wanted == [(array.shape, array.dtype) for array in snapshot.arrays]
