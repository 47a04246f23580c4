"""The thread that computes the answers of one model, for an event loop."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from typing import NamedTuple

from engine.decode.generation import Generation
from engine.decode.request import Request
from engine.errors import DeviceError, EngineError
from engine.llm import LLM

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""Seconds without work after which the pages of the cache are checked."""

REST = 3
"""How many times as long as the event loop has worked on tokens it gets none: what computes them needs the same lock of the
interpreter."""


class News(NamedTuple):
    """What a round has brought an answer: tokens that have text, and whether it is over, and why if that was an error."""

    listener: "Listener"
    tokens: list[int]
    done: bool
    error: Exception | None


class Listener:
    """Receives the tokens of an answer in the event loop."""

    generation: Generation

    def receive(self, news: News) -> None:
        """Take note of what a round has brought."""
        raise NotImplementedError


class Driver:
    """Computes passes as long as there are answers, and hands their tokens to an event loop, at most once per round.

    A first token and the end of an answer go at once.  Others wait while the event loop would otherwise take more than a
    quarter of the time; what it gets then is more tokens per answer, which it writes together.

    Only its thread uses the scheduler.  The event loop says what it wants by :meth:`submit`, :meth:`cancel`, :meth:`pause`
    and :meth:`proceed`, none of which waits: a round takes notice when it begins.

    Attributes: ``n_running`` and ``n_waiting`` answers; ``moved``: when the latest round began, of ``time.monotonic``,
    infinity while there is nothing to compute; ``failed``: the error of the device that ended the thread.
    """

    def __init__(self, llm: LLM, loop: asyncio.AbstractEventLoop) -> None:
        self.llm = llm
        self.moved = time.monotonic()
        self.failed: DeviceError | None = None
        self._loop = loop
        self._listeners: dict[Request, Listener] = {}
        self._inbox: deque[Listener] = deque()
        self._wake = threading.Event()
        self._closing = False
        #: Whether the event loop works on tokens, and when it may get the next ones, of ``time.monotonic``.
        self._busy, self._due = False, 0.0
        self._thread = threading.Thread(target=self._run, name="driver", daemon=True)
        self._thread.start()

    # --- for the event loop ----------------------------------------------------------------------------------------

    @property
    def n_answers(self) -> int:
        """The number of answers that are computed or wait."""
        return len(self._listeners) + len(self._inbox)

    @property
    def n_running(self) -> int:
        """The number of answers that are computed."""
        return sum(request.slot is not None for request in tuple(self._listeners))

    @property
    def n_waiting(self) -> int:
        """The number of answers that have not begun."""
        return self.n_answers - self.n_running

    def submit(self, listener: Listener) -> None:
        """Compute an answer."""
        self._inbox.append(listener)
        self._wake.set()

    def cancel(self, request: Request) -> None:
        """Compute no further token of an answer: it leaves before the next pass begins."""
        request.closing = True
        self._wake.set()

    def pause(self, request: Request) -> None:
        """Compute no token of an answer until :meth:`proceed`."""
        request.paused = True

    def proceed(self, request: Request) -> None:
        """Continue a paused answer."""
        request.paused = False
        self._wake.set()

    def stop(self) -> None:
        """End the thread, and with it every answer, after the round in progress."""
        self._closing = True
        self._wake.set()

    def close(self) -> None:
        """End the thread, and wait for its end."""
        self.stop()
        self._thread.join()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            self.moved = time.monotonic()
            try:
                self._submit()
                self.llm.scheduler.step()
            except DeviceError as error:
                # Its memory may hold anything: no later answer could be trusted.
                log.error("%s", error)
                self.failed = error
                self._end(error)
                return
            except Exception as error:
                log.exception("a round failed")
                self._end(error)
                with self.llm.lock:
                    self.llm.scheduler.interrupt()
            if self._urgent or (not self._busy and time.monotonic() >= self._due):
                self._hand_out()
            if not any(self._moves(request) for request in self._listeners) and not self._inbox:
                self._hand_out()
                self.moved = math.inf
                if not self._wake.wait(IDLE_SECONDS):
                    self._check()
                    self._wake.wait()
        self._end(EngineError("the server is shutting down; send the request again later."))

    def _check(self) -> None:
        """Look for pages that no sequence holds and that are not free."""
        try:
            self.llm.check_pages()
        except AssertionError:
            log.exception("pages of the cache are lost")

    @staticmethod
    def _moves(request: Request) -> bool:
        return request.closing or not request.paused

    def _submit(self) -> None:
        while self._inbox:
            listener = self._inbox.popleft()
            request = listener.generation.request
            self._listeners[request] = listener
            if request.speculation is not None:
                with self.llm.lock:
                    self.llm.model.ops.expect_drafts()
            self.llm.scheduler.submit(request)

    @property
    def _urgent(self) -> bool:
        """Whether an answer has its first token, or has ended."""
        return any(request.done or (request.items and not request.fetched) for request in self._listeners)

    def _hand_out(self) -> None:
        """Give the tokens that have been computed to the event loop."""
        news = [each for request in list(self._listeners) if (each := self._news(request)) is not None]
        if news and not self._loop.is_closed():
            self._busy = True
            self._loop.call_soon_threadsafe(self._deliver, news)

    def _deliver(self, news: list[News]) -> None:
        begun = time.thread_time()
        try:
            for each in news:
                each.listener.receive(each)
        finally:
            # What the listeners have woken runs before this.
            self._loop.call_soon(self._delivered, begun)

    def _delivered(self, begun: float) -> None:
        self._due = time.monotonic() + REST * (time.thread_time() - begun)
        self._busy = False

    def _news(self, request: Request) -> News | None:
        listener, tokens = self._listeners[request], []
        while request.items:
            token, logits = request.items.popleft()
            request.fetched += 1
            if listener.generation.took(token, logits):
                tokens.append(token)
        if not tokens and not request.done:
            return None
        error = request.error
        if request.done:
            del self._listeners[request]
        return News(listener, tokens, request.done, error if isinstance(error, Exception) else None)

    def _end(self, error: Exception) -> None:
        """End every answer, after the tokens that have been computed."""
        self._hand_out()
        news = []
        for request, listener in self._listeners.items():
            request.closing = True
            news.append(News(listener, [], True, error))
        self._listeners.clear()
        while self._inbox:
            news.append(News(self._inbox.popleft(), [], True, error))
        if news and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, news)
