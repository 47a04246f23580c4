"""The requests that wait for slots."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice

import numpy as np

from engine.decode.company import Company
from engine.decode.request import Request
from engine.limits import STEP_ROWS


class Waiting:
    """The requests that wait for slots of a company, in the order of their arrival."""

    def __init__(self, company: Company) -> None:
        self._company = company
        self._slots = company.reader.slots
        self._requests: list[Request] = []
        self._arrived = 0

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def arrive(self, request: Request) -> None:
        """Let a request wait, unless it has arrived before or has been closed."""
        if not request.number and not request.done:
            self._arrived += 1
            request.number = self._arrived
            self._requests.append(request)

    def come_back(self, request: Request) -> None:
        """Let a request that had a slot wait again, in its place in the order of arrival."""
        at = next((i for i, other in enumerate(self._requests) if other.number > request.number), len(self._requests))
        self._requests.insert(at, request)

    def leave(self, request: Request) -> None:
        """Let a request wait no longer, if it does."""
        if request in self._requests:
            self._requests.remove(request)

    def admit(self, wanted: Request | None, failing: Callable[[Request], AbstractContextManager[None]]) -> bool:
        """Give free slots to requests, in the order of their arrival: to those that are asked for, or, if ``wanted`` is None,
        to all that are not paused; to no more than have rows in a pass, since a device may have nothing to do meanwhile.
        Returns whether there was no room for one of them.

        failing: what handles the errors of a request.
        """
        if not self._requests:
            return False
        ready = (request for request in self._requests if (request.asking if wanted else not request.paused))
        for request in list(islice(ready, STEP_ROWS)):
            if len(self._company.active) == len(self._slots):
                return True
            placed = True
            with failing(request):
                placed = self._place(request)
            if not placed:
                return True
        return False

    def _place(self, request: Request) -> bool:
        """Give a slot to a request; returns whether there was room for it."""
        known = np.array(request.known, np.int32)
        # Nothing is left to read if the sequence holds all but the certain token.
        tokens = known[:-1] if request.begun and known.size > 1 else known
        slot = self._slots.free(tokens, request.salt)
        if slot is None or (self._company.active and not self._slots.has_room(slot, tokens)):
            return False
        self._requests.remove(request)
        slot.owner, request.slot = request, slot
        self._company.active.append(request)
        if request.begun:
            tokens = known
        if request.scored:
            slot.clear()  # the logits of tokens that the cache holds are not kept
            self._slots.use(slot)
        kept = 0 if request.scored else self._slots.rewind(slot, tokens)
        request.stops = slot.stops(tokens, kept)
        if kept in request.stops:
            slot.save(kept)
        if not request.begun:
            request.kept = kept
        elif kept == len(request.target):
            self._company.begin(request, np.empty((0, 0), np.float32))
        return True
