"""The scheduler: which rows of which answers are in the next pass.

Threads that want a token of an answer call :meth:`Scheduler.next`.  Whoever finds none computes: it takes the lock and lets
the scheduler make one round, which reads a part of a prompt, if one waits, and completes one pass that has a row, or several
with drafts, of every answer that runs.  The tokens of the other answers are kept for those who want them.  So there is no
thread of its own, an answer that nobody asks for is not computed, and answers join and leave between passes.

The bits of a row do not depend on the other rows of its pass, so nothing here can change an answer: not the order, nor the
size of the parts in which prompts are read, nor which answer gives way when slots or pages are short.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from engine.cache.pages import NoPages
from engine.decode.company import Company, Displaced, NoRoom
from engine.decode.flights import Flights
from engine.decode.pace import Pace
from engine.decode.prompts import Prompts
from engine.decode.reader import Reader
from engine.decode.request import Item, Request
from engine.limits import STEP_ROWS

AHEAD_TOKENS = 16
"""Tokens of an answer that are computed before somebody asks for them, if others are computed at the same time."""

PATIENCE = 0.5
"""Seconds after which an answer whose tokens nobody fetches gives its slot to one that has none."""

POLL_SECONDS = 1e-3
"""The time, in seconds, that a thread sleeps while it waits for others to fetch their tokens."""


class Scheduler:
    """Decides what the next pass of a model computes.  Its caller holds the lock of ``reader``."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._waiting: deque[Request] = deque()
        self._arrived = 0
        self._company = Company(reader)
        pace = Pace()
        self._flights = Flights(self._company, pace)
        self._prompts = Prompts(self._company, self._flights, pace)

    # --- what requests need ----------------------------------------------------------------------------------------

    def next(self, request: Request) -> Item | None:
        """The next token of an answer, computed if necessary; None if there is none.  Raises what ended the answer, if that
        was an error."""
        request.thread, request.asking = threading.get_ident(), True
        try:
            while not request.items:
                with self._reader.lock:
                    if request.items:
                        break
                    if request.error is not None:
                        error, request.error = request.error, None
                        raise error
                    if request.done:
                        return None
                    self._reader.check_open()
                    self._reader.check_free()
                    moved = self._round(request)
                if not moved:
                    time.sleep(POLL_SECONDS)
        finally:
            request.asking, request.served = False, time.perf_counter()
        request.fetched += 1
        return request.items.popleft()

    def submit(self, request: Request) -> None:
        """Let a request be computed by :meth:`step`; its tokens are in ``items`` from then on."""
        if not request.number:
            self._arrived += 1
            request.number = self._arrived
            self._waiting.append(request)

    def step(self, on_wait: Callable[[], None] | None = None) -> bool:
        """Compute something for all requests that were submitted, however many of their tokens have been fetched.  Returns
        whether there were any.  on_wait: called, perhaps several times, before the device is waited for."""
        with self._reader.lock:
            self._reader.check_open()
            self._reader.check_free()
            if not self._company.active and not self._waiting:
                return False
            with self._company.waiting(on_wait):
                self._round(None)
            return True

    def close(self, request: Request) -> None:
        """End an answer: what nobody has fetched is forgotten, and its sequence ends where its reader does."""
        request.closing = True
        if not request.done:
            self._drop()
        elif request.items:
            for slot in self._reader.slots:
                if slot.latest is request and slot.owner is None:
                    self._company.cut(slot, request)
            request.items.clear()

    def interrupt(self) -> None:
        """Wait for the steps in flight and let all requests give their slots back; they continue later."""
        self._drop()
        self._flights.drain()
        for request in list(self._company.active):
            self._preempt(request)

    @property
    def company(self) -> int:
        """The number of answers that have a slot."""
        return len(self._company.active)

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _round(self, wanted: Request | None) -> bool:
        """Compute something that brings ``wanted``, or all requests, nearer to the next token; returns whether there was
        something to do."""
        if wanted is not None:
            self.submit(wanted)
        self._drop()
        self._admit(wanted)
        if (
            wanted is not None
            and wanted.slot is None
            and not self._flights
            and not any(self._moves(request, wanted) for request in self._company.active)
        ):
            # All others wait for their readers, who may be waiting for this one.
            idle = [r for r in self._company.active if not r.asking and self._idle(r, wanted)]
            if not idle:
                return False
            self._preempt(max(idle, key=lambda request: request.number))
            if wanted in self._waiting:
                self._waiting.remove(wanted)
                self._waiting.appendleft(wanted)
            self._admit(wanted)
        reading = self._prompts.first
        if reading is not None and len(self._flights) < self._flights.ahead_reading:
            with self._giving_way(wanted):
                self._prompts.read(reading)
            if self._prompts.goes_on:
                self._flights.drain()
                return True
        self._steps(wanted)
        return True

    def _steps(self, wanted: Request | None) -> None:
        """Start the passes that can be started, and wait for the first one."""
        started = True
        while started and len(self._flights) < self._company.ahead:
            active = self._company.active
            running = [r for r in active if r.run is not None and not r.done and self._moves(r, wanted)]
            with self._giving_way(wanted):
                started = self._flights.start(running)
        if self._flights:
            self._flights.take()
        else:
            self._flights.forget()  # all wait for their readers

    def _moves(self, request: Request, wanted: Request | None) -> bool:
        """Whether a request is computed while ``wanted``, or all, are waited for."""
        if request.paused:
            return False
        return request.reading or (wanted is None or request is wanted or len(request.items) < AHEAD_TOKENS)

    def _idle(self, request: Request, wanted: Request) -> bool:
        """Whether the reader of ``request``, who waits for no token, is not about to fetch one."""
        return request.thread == wanted.thread or time.perf_counter() - request.served > PATIENCE

    def _drop(self) -> None:
        """Let closed requests leave."""
        for request in [*self._company.active, *self._waiting]:
            if request.closing and not request.done:
                request.done = True
                if request in self._waiting:
                    self._waiting.remove(request)
                elif request.run is None or not request.run.started:
                    self._company.leave(request)
        while any(request.closing for request in self._company.active):
            self._flights.take()

    def _admit(self, wanted: Request | None) -> None:
        """Give free slots to waiting requests, in the order of their arrival: to those that are asked for, or, if ``wanted``
        is None, to all; to no more than have rows in a pass, since a device may have nothing to do meanwhile."""
        for request in [r for r in self._waiting if wanted is None or r.asking][:STEP_ROWS]:
            known = np.array(request.known, np.int32)
            # Nothing is left to read if the sequence holds all but the certain token.
            tokens = known[:-1] if request.begun and known.size > 1 else known
            slot = self._reader.slots.free(tokens, request.salt)
            if slot is None or (self._company.active and not self._reader.slots.has_room(slot, tokens)):
                return
            self._waiting.remove(request)
            slot.owner, request.slot = request, slot
            self._company.active.append(request)
            if request.begun:
                tokens = known
            if request.scored:
                slot.clear()  # the logits of tokens that the cache holds are not kept
                self._reader.slots.use(slot)
            kept = 0 if request.scored else self._reader.slots.rewind(slot, tokens)
            request.stops = slot.stops(tokens, kept)
            if kept in request.stops:
                slot.save(kept)
            if not request.begun:
                request.kept = kept
            elif kept == len(request.target):
                self._company.begin(request, np.empty((0, 0), np.float32))

    # --- giving way -------------------------------------------------------------------------------------------------

    @contextmanager
    def _giving_way(self, wanted: Request | None) -> Iterator[None]:
        """Let requests give their slots back if what is attempted needs that."""
        try:
            yield
        except Displaced as displaced:
            self._preempt(displaced.request)
        except NoRoom as full:
            self._make_room(full.request, wanted)

    def _preempt(self, request: Request) -> None:
        """Let a request give its slot back and wait again."""
        self._flights.drain()
        if request not in self._company.active:
            return  # it was done with the steps in flight
        request.abandon()
        slot = request.slot
        assert slot is not None
        request.end_steps()
        request.stopped()
        self._company.active.remove(request)
        request.slot, slot.owner = None, None
        self._reader.slots.use(slot)
        self._waiting.appendleft(request)

    def _make_room(self, request: Request, wanted: Request | None) -> None:
        """Free pages for a request: of slots that nobody uses, else of a request whose reader is away, else of the youngest,
        which may be this one."""
        if self._reader.slots.free_pages():
            return
        self._flights.drain()
        if len(self._company.active) == 1:
            raise NoPages(
                "the pages of the cache do not suffice for a single answer; this is a defect of this program."
            )
        away = [r for r in self._company.active if r is not request and not self._moves(r, wanted)]
        victim = max(away or self._company.active, key=lambda r: r.number, default=None)
        if victim is None or victim.slot is None:
            return  # all were done with the steps in flight
        slot = victim.slot
        self._preempt(victim)
        slot.clear()
