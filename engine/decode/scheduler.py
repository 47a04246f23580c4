"""The scheduler: which rows of which answers are in the next pass.

Threads that want a token of an answer call :meth:`Scheduler.next`.  Whoever finds none computes: it takes the lock and lets
the scheduler make one round, which reads a part of a prompt, if one waits, and completes one pass that has a row, or several
with drafts, of every answer that runs.  The tokens of the other answers are kept for those who want them.  So there is no
thread of its own, an answer that nobody asks for is not computed, and answers join and leave between passes.

The bits of a row do not depend on the other rows of its pass, so nothing here can change an answer: not the order, nor the
size of the parts in which prompts are read, nor which answer gives way when slots or pages are short.

What other threads want of a request is an :class:`engine.decode.orders.Order`, which waits until a round begins: within a
round, nothing but the round changes whether a request is paused or closed.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

from engine.cache.pages import NoPages
from engine.decode.company import Broken, CannotGoOn, Company, Displaced, NoRoom
from engine.decode.flights import Flights
from engine.decode.orders import Order, Orders
from engine.decode.pace import Pace
from engine.decode.prompts import Prompts
from engine.decode.reader import Reader
from engine.decode.request import Item, Request
from engine.decode.waiting import Waiting
from engine.errors import DeviceError

log = logging.getLogger("bitmirror.decode")

AHEAD_TOKENS = 16
"""Tokens of an answer that are computed before somebody asks for them, if others are computed at the same time."""

PATIENCE = 0.5
"""Seconds after which an answer whose tokens nobody fetches gives its slot to one that has none."""

POLL_SECONDS = 1e-3
"""The time, in seconds, that a thread sleeps while it waits for others to fetch their tokens."""

MOST_FAILURES = 3
"""The number of rounds that may fail with an answer between two of its tokens; then it ends with the error."""


class Scheduler:
    """Decides what the next pass of a model computes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._orders = Orders()
        self._company = Company(reader)
        self._waiting = Waiting(self._company)
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
                self._catch_up()
                if not moved:
                    time.sleep(POLL_SECONDS)
        finally:
            request.asking, request.served = False, time.perf_counter()
        request.fetched += 1
        return request.items.popleft()

    def order(self, order: Order, request: Request) -> None:
        """Let the next round begin with an order.  Neither waits nor raises an error, whatever thread calls it, and when."""
        self._orders.give(order, request)

    def submit(self, request: Request) -> None:
        """Let a request be computed by :meth:`step`; its tokens are in ``items`` from then on."""
        self.order(Order.SUBMIT, request)

    def close(self, request: Request) -> None:
        """End an answer: now, unless a thread has the model, or else when its next round begins."""
        self.order(Order.CLOSE, request)
        self._catch_up()

    def step(self, on_wait: Callable[[], None] | None = None) -> bool:
        """Compute something for all requests that were submitted and are not paused, however many of their tokens have been
        fetched.  Returns whether there was something to compute.  on_wait: called, perhaps several times, before the device
        is waited for."""
        with self._reader.lock:
            self._reader.check_open()
            self._reader.check_free()
            with self._company.waiting(on_wait):
                return self._round(None)

    def interrupt(self) -> None:
        """Wait for the steps in flight and let all requests give their slots back; they continue later.  Its caller holds the
        lock."""
        try:
            self._obey()
            self._flights.drain()
            for request in list(self._company.active):
                self._preempt(request)
        except Exception as error:
            self._recover(error)

    @property
    def company(self) -> int:
        """The number of answers that have a slot."""
        return len(self._company.active)

    def asked_by_others(self) -> bool:
        """Whether other threads wait for a token."""
        me = threading.get_ident()
        return any(request.asking and request.thread != me for request in chain(self._company.active, self._waiting))

    # --- orders ----------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Carry out the orders that wait, unless a thread has the model, perhaps this one: then a round does so later."""
        lock = self._reader.lock
        while self._orders and lock.acquire(blocking=False):
            try:
                if lock.nested:
                    return
                self._obey()
            except Exception as error:
                self._recover(error)
            finally:
                lock.release()

    def _obey(self) -> None:
        """Carry out the orders that wait."""
        for order, request in self._orders.take() if self._orders else ():
            match order:
                case Order.SUBMIT:
                    self._waiting.arrive(request)
                case Order.CLOSE:
                    self._close(request)
                case Order.PAUSE | Order.PROCEED:
                    request.paused = order is Order.PAUSE
        while self._flights and any(request.closing for request in self._company.active):
            self._flights.take()

    def _close(self, request: Request) -> None:
        request.closing = True
        if not request.done:
            self._end(request)
        elif request.items:
            for slot in self._reader.slots:
                if slot.latest is request and slot.owner is None:
                    self._company.cut(slot, request)
            request.items.clear()

    def _end(self, request: Request, error: Exception | None = None) -> None:
        """Let a request leave, when its passes in flight have ended; error: why, if that is an error."""
        self._waiting.leave(request)
        self._flights.end(request, error)

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _round(self, wanted: Request | None) -> bool:
        """Compute something that brings ``wanted``, or all requests, nearer to the next token; returns whether there was
        something to do.  Raises DeviceError; any other error ends at most the requests that it belongs to."""
        try:
            return self._compute(wanted)
        except Exception as error:
            self._recover(error)
            return True

    def _compute(self, wanted: Request | None) -> bool:
        self._obey()
        active = self._company.active
        if wanted is not None:
            self._waiting.arrive(wanted)
        elif not self._flights and all(request.paused for request in chain(active, self._waiting)):
            return False
        while self._waiting.admit(wanted, self._alone) and (away := self._away(wanted)):
            self._preempt(max(away, key=lambda request: request.number))
        if wanted is not None and wanted in self._waiting and self._stands(wanted):
            return False
        reading = self._prompts.first
        if reading is not None and len(self._flights) < self._flights.ahead_reading:
            with self._giving_way(wanted), self._alone(reading):
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

    def _stands(self, wanted: Request) -> bool:
        """Whether nothing is computed for ``wanted``: all answers that have slots wait for their readers."""
        return not self._flights and not any(self._moves(request, wanted) for request in self._company.active)

    def _away(self, wanted: Request | None) -> list[Request]:
        """The answers that give their slots to those that wait, because their readers are away."""
        active = self._company.active
        if wanted is None:
            return [request for request in active if request.paused]
        if wanted not in self._waiting or not self._stands(wanted):
            return []
        # Their readers may be waiting for this one.
        return [request for request in active if not request.asking and self._idle(request, wanted)]

    def _idle(self, request: Request, wanted: Request) -> bool:
        """Whether the reader of ``request``, who waits for no token, is not about to fetch one."""
        return request.thread == wanted.thread or time.perf_counter() - request.served > PATIENCE

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
        if request in self._company.active:  # and was not done with the steps in flight
            self._withdraw(request)

    def _withdraw(self, request: Request) -> None:
        """Let a request without steps in flight give its slot back and wait again, unless it is done."""
        slot = request.slot
        assert slot is not None
        self._company.active.remove(request)
        request.slot, slot.owner = None, None
        self._reader.slots.use(slot)
        if not request.done:
            self._waiting.come_back(request)
        request.abandon()
        request.end_steps()
        request.stopped()

    def _make_room(self, request: Request, wanted: Request | None) -> None:
        """Free pages for a request: of slots that nobody uses, else of a request whose reader is away, else of the youngest,
        which may be this one."""
        if self._reader.slots.free_pages():
            return
        self._flights.drain()
        active = self._company.active
        if request not in active:
            return  # it was done with the steps in flight
        if len(active) == 1:
            problem = "the pages of the cache do not suffice for a single answer; this is a defect of this program."
            self._end(request, NoPages(problem))
            return
        away = [r for r in active if r is not request and not self._moves(r, wanted)]
        victim = max(away or active, key=lambda r: r.number)
        slot = victim.slot
        assert slot is not None
        self._preempt(victim)
        slot.clear()

    # --- errors -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self, request: Request) -> Iterator[None]:
        """Let an unexpected error end a request, and no other."""
        try:
            yield
        except (CannotGoOn, DeviceError):
            raise
        except Exception as error:
            self._end(request, error)

    def _recover(self, error: Exception) -> None:
        """Take all slots back after an unexpected error in a round, so that the tokens of their requests are read again.  The
        requests of the pass that has failed, or else all, end with the error if that has happened too often.

        Raises the error if it is one of the device.
        """
        if isinstance(error, DeviceError):
            raise error
        requests = list(self._company.active) or list(self._waiting)
        if isinstance(error, Broken):
            requests, error = list(error.requests), error.error
        log.error("a round has failed, and its answers are read again", exc_info=error)
        self._flights.drop()
        for request in list(self._company.active):
            slot = request.slot
            assert slot is not None
            try:
                self._withdraw(request)
                slot.clear()
            except DeviceError:
                raise
            except Exception as another:
                self._end(request, another)
        for request in requests:
            request.failures += 1
            if request.failures >= MOST_FAILURES and not request.done:
                self._end(request, error)
