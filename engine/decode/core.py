"""The engine core: threads ask it for tokens, and one of them at a time runs a step for all.

There is no scheduler thread: a caller that has no token takes the lock and runs one round, which is one step of
:class:`engine.decode.scheduler.Scheduler`.  The tokens of other requests are kept for their readers.  So a request that
nobody asks for is not computed, and requests join and leave between steps.

What other threads want of a request is an :class:`engine.decode.orders.Order`, which is carried out when a round begins:
within a round, nothing else changes whether a request is paused or closed.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain

from engine.decode.orders import Order, Orders
from engine.decode.preemption import FailedStep
from engine.decode.request import Item, Request
from engine.decode.scheduler import Scheduler
from engine.decode.served_model import ServedModel
from engine.errors import DeviceError, DeviceMemoryError

log = logging.getLogger("bitmirror.decode")

POLL_SECONDS = 1e-3
"""The time, in seconds, that a thread sleeps while it waits for others to fetch their tokens."""

MOST_FAILURES = 3
"""The number of rounds that may fail with a request between two of its tokens; then it ends with the error."""


class EngineCore:
    """Computes the requests of a model for all threads that use it."""

    def __init__(self, served: ServedModel) -> None:
        self.scheduler = Scheduler(served)
        self._served = served
        self._orders = Orders()

    def next(self, request: Request) -> Item | None:
        """The next token of a request, computed if necessary; None if there is none.  Raises the error that ended the
        request, if there is one."""
        request.thread, request.asking = threading.get_ident(), True
        try:
            while not request.items:
                with self._served.lock:
                    if request.items:
                        break
                    if request.error is not None:
                        error, request.error = request.error, None
                        raise error
                    if request.done:
                        return None
                    self._served.check_open()
                    self._served.check_free()
                    moved = self._round(request)
                self.catch_up()
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
        """End a request: now, unless a thread has the model, or else when its next round begins."""
        self.order(Order.CLOSE, request)
        self.catch_up()

    def step(self, on_wait: Callable[[], None] | None = None) -> bool:
        """Compute something for all requests that were submitted and are not paused, however many of their tokens have been
        fetched.  Returns whether there was something to compute.  on_wait: called, perhaps several times, before the device
        is waited for."""
        with self._served.lock:
            self._served.check_open()
            self._served.check_free()
            with self.scheduler.batch.waiting(on_wait):
                return self._round(None)

    def interrupt(self) -> None:
        """Wait for the steps in flight and take the slots of all requests; they continue later.  Its caller holds the
        lock."""
        try:
            self._obey()
            self.scheduler.drain()
            for request in self.scheduler.batch.requests:
                self.scheduler.preemption.preempt(request)
        except Exception as error:
            self._recover(error)

    @property
    def n_active(self) -> int:
        """The number of requests that have a slot."""
        return len(self.scheduler.batch.active)

    def asked_by_others(self) -> bool:
        """Whether other threads wait for a token."""
        me, scheduler = threading.get_ident(), self.scheduler
        requests = chain(scheduler.batch.requests, scheduler.waiting.requests)
        return any(request.asking and request.thread != me for request in requests)

    # --- orders ----------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Carry out the orders that wait, unless a thread has the model, perhaps this one: then a round does so later."""
        lock = self._served.lock
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
                    self.scheduler.waiting.arrive(request)
                case Order.CLOSE:
                    self._close(request)
                case Order.PAUSE | Order.PROCEED:
                    request.paused = order is Order.PAUSE
        while self.scheduler.in_flight and any(request.closing for request in self.scheduler.batch.requests):
            self.scheduler.take()

    def _close(self, request: Request) -> None:
        request.closing = True
        if not request.done:
            self.scheduler.end(request)
        elif request.items:
            for slot in self._served.slots:
                if slot.latest is request and slot.owner is None:
                    self.scheduler.batch.cut(slot, request)
            request.items.clear()

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _round(self, wanted: Request | None) -> bool:
        """Run a step for ``wanted``, or for all requests; returns whether there was something to do.  Raises DeviceError; any
        other error ends at most the requests that it belongs to."""
        try:
            self._obey()
            if wanted is not None:
                self.scheduler.waiting.arrive(wanted)
            return self.scheduler.step(wanted)
        except Exception as error:
            self._recover(error)
            return True

    def _recover(self, error: Exception) -> None:
        """Take all slots back after an unexpected error in a round, so that the tokens of their requests are read again.  The
        requests of the step that has failed, or else all, end with the error if that has happened too often.

        Raises the error if it is one of the device.
        """
        with self.guarded():
            if isinstance(error, DeviceError):
                raise error
            requests = self.scheduler.batch.requests or list(self.scheduler.waiting.requests)
            if isinstance(error, FailedStep):
                requests, error = list(error.requests), error.error
            log.error("a round has failed, and its answers are read again", exc_info=error)
            self.scheduler.drop()
            self.scheduler.preemption.clear()
        for request in requests:
            request.failures += 1
            if request.failures >= MOST_FAILURES and not request.done:
                self.scheduler.end(request, error)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A context in which an error of the device ends all requests: what its memory holds is unknown then, so the results
        of all passes in flight are dropped, and no token in the cache is used again.  Its caller holds the lock.

        If memory runs out, what it holds is known, and all requests may go on.
        """
        try:
            yield
        except DeviceMemoryError:
            raise
        except DeviceError as error:
            scheduler = self.scheduler
            for request in (*scheduler.batch.requests, *scheduler.waiting.requests):
                if not request.done:
                    request.done, request.error = True, error
            scheduler.waiting.requests.clear()
            # All of these, the last one first, even if the device is lost or somebody interrupts one of them.
            with suppress(DeviceError), ExitStack() as last:
                last.callback(self._served.forget)
                last.callback(scheduler.preemption.clear)
                last.callback(scheduler.drop)
            raise
