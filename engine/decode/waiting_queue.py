"""The requests that wait for slots."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice

import numpy as np

from engine.cache.thinning import first_observed, thins
from engine.decode.request import Request
from engine.decode.running_batch import RunningBatch


class WaitingQueue:
    """The requests that wait for slots, in the order of their arrival."""

    def __init__(self, batch: RunningBatch) -> None:
        self.requests: list[Request] = []
        self._batch = batch
        self._slots = batch.served.slots
        self._arrived = 0

    def arrive(self, request: Request) -> None:
        """Add a request, unless it has arrived before or has been closed."""
        if not request.number and not request.done:
            self._arrived += 1
            request.number = self._arrived
            self.requests.append(request)

    def come_back(self, request: Request) -> None:
        """Add a preempted request, in its place in the order of arrival."""
        at = next((i for i, other in enumerate(self.requests) if other.number > request.number), len(self.requests))
        self.requests.insert(at, request)

    def leave(self, request: Request) -> None:
        """Remove a request, if it waits."""
        if request in self.requests:
            self.requests.remove(request)

    def admit(self, wanted: Request | None, failing: Callable[[Request], AbstractContextManager[None]]) -> bool:
        """Give free slots to requests, in the order of their arrival: to those that are asked for, or, if ``wanted`` is None,
        to all that are not paused; to no more than a decode batch has rows, since a device may have nothing to do meanwhile.
        Returns whether there was no room for one of them.

        failing: a context that handles the errors of a request.
        """
        ready = (request for request in self.requests if (request.asking if wanted else not request.paused))
        for request in list(islice(ready, self._batch.decode_rows)):
            if len(self._batch.active) == len(self._slots):
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
        # Nothing is left to read if the sequence holds all but the last sampled token.
        tokens = known[:-1] if request.begun and known.size > 1 else known
        slot = self._slots.free(tokens, request.salt, request.wanted_slot)
        if slot is None or (self._batch.active and not self._slots.has_room(slot, tokens)):
            return False
        self.requests.remove(request)
        prefilling = self._batch.admit(request, slot)
        if request.begun:
            tokens = known
        if thins(request.n_read, self._batch.model.cache.budget):
            # The last rows of the prompt are always read, and the pages of tokens after it are not those of a whole prompt.
            tokens = tokens[: first_observed(request.n_read) + 1]
        if request.scored:
            slot.clear()  # the logits of tokens that the cache holds are not kept
            self._slots.use(slot)
        kept = 0 if request.scored else self._slots.rewind(slot, tokens)
        prefilling.kept, prefilling.begun = kept, time.perf_counter()
        prefilling.stops = slot.stops(tokens, kept)
        if kept in prefilling.stops:
            slot.save(kept)
        if not request.begun:
            request.kept = kept
        elif kept == len(request.target):
            self._batch.run(prefilling, np.empty((0, 0), np.float32))
        return True
