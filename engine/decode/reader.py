"""What the scheduler uses of the model whose answers it schedules."""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from engine.decode.part import Part
from engine.decode.slot import Slot
from engine.locking import Lock
from engine.models.base import Model


class Reader(Protocol):
    """What a scheduler uses of the model with slots that it serves; ``engine.reading.Reader`` implements it."""

    lock: Lock
    model: Model
    slots: list[Slot]
    slot_bytes: int

    def check_open(self) -> None:
        """Raise UsageError if the model has been closed."""

    def check_free(self) -> None:
        """Raise UsageError if this thread is in a function of the user that this model has called."""

    def reserved(self, caller: str) -> AbstractContextManager[None]:
        """Refuse any use of the model by ``caller``."""

    def free_slot(self, tokens: np.ndarray, salt: str) -> Slot | None:
        """A slot without an owner, with this salt, for a text int32 [n]; None if all have owners."""

    def has_room(self, slot: Slot, tokens: np.ndarray) -> bool:
        """Whether there are pages for a text int32 [n] in a slot, and a few more tokens."""

    def rewind(self, slot: Slot, tokens: np.ndarray) -> int:
        """Cut what a slot holds to a prefix of ``tokens``, shorter than these, and return its length."""

    def settled(self, slot: Slot) -> None:
        """Note that a slot is the one that was used last."""

    def part(self, slot: Slot, tokens: Sequence[int], n_logits: int, stops: Collection[int] = ()) -> Part:
        """Tokens to be read after those that a slot holds, with the logits of the last ``n_logits`` and snapshots after the
        numbers of tokens in ``stops``."""

    def free_pages(self) -> bool:
        """Forget what a slot without an owner holds; returns whether there was one."""
