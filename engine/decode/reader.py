"""What the scheduler uses of the model whose answers it schedules."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from engine.decode.part import Part
from engine.decode.slot import Slot
from engine.decode.slots import Slots
from engine.locking import Lock
from engine.models.base import Model


class Reader(Protocol):
    """What a scheduler uses of the model with slots that it serves; ``engine.reading.Reader`` implements it."""

    lock: Lock
    model: Model
    slots: Slots
    slot_bytes: int

    def check_open(self) -> None:
        """Raise UsageError if the model has been closed."""

    def check_free(self) -> None:
        """Raise UsageError if this thread is in a function of the user that this model has called."""

    def reserved(self, caller: str) -> AbstractContextManager[None]:
        """Refuse any use of the model by ``caller``."""

    def part(self, slot: Slot, tokens: Sequence[int], n_logits: int, stops: Collection[int] = ()) -> Part:
        """Tokens to be read after those that a slot holds, with the logits of the last ``n_logits`` and snapshots after the
        numbers of tokens in ``stops``."""
