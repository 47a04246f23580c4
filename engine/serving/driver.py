"""The thread that computes the answers of one model, for an event loop."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from engine.decode.core import EngineCore
from engine.decode.generation import Generation, request_of, took
from engine.decode.orders import Order
from engine.decode.request import Request
from engine.errors import DeviceError
from engine.limits import MOST_TOGETHER
from engine.llm import LLM
from engine.serving.errors import Refusal

log = logging.getLogger("bitmirror.serving")

IDLE_SECONDS = 1.0
"""Seconds without work after which the pages of the cache are checked."""

REST_SECONDS = 10.0
"""Seconds after this check, without work, after which memory that holds nothing goes back to the system."""

FORGET_SECONDS = 600.0
"""Seconds after that after which texts that no slot holds are forgotten, if they are in memory of the system."""

GATHER_ROUNDS = 3
"""Rounds of the event loop without a new answer after which a thread that has nothing to compute begins: one in which bytes
arrive, one in which the request is read, and that in which this is noticed."""

REST = 3
"""The event loop gets no tokens for this many times as long as it has worked on the last ones: it shares the lock of the
interpreter with the thread that computes them."""


GIVE_WAY_SECONDS = 0.003
"""The most seconds that the event loop waits, before it reads a further request, for the thread to start the pass that it
prepares.  Each call of the device's driver gives the lock of the interpreter up, and would wait for the event loop to get it
back."""


class News(NamedTuple):
    """What one or several rounds have brought an answer: tokens that have text, and whether it is over, and why if that was
    an error."""

    listener: "Listener"
    tokens: list[int]
    done: bool
    error: Exception | None


class Listener:
    """Receives the tokens of an answer in the event loop."""

    generation: Generation

    def receive(self, news: News) -> None:
        """Take note of what one or several rounds have brought."""
        raise NotImplementedError


class Driver:
    """Computes passes as long as there are answers, and hands their tokens to an event loop.

    That happens whenever the device is about to be waited for, so that the event loop writes while the device computes.  A
    first token and the end of an answer are handed over as soon as that happens.  Others wait while the event loop would
    otherwise take more than a quarter of the time; what it gets then is more tokens per answer, which it writes together.

    Only its thread computes rounds.  The event loop says what it wants by :meth:`submit`, :meth:`cancel`, :meth:`pause`
    and :meth:`proceed`, none of which waits: a round takes notice when it begins.  An error ends the answers that it belongs
    to; only one of the device, or one that the scheduler cannot recover from, ends all.

    Attributes: ``n_running`` and ``n_waiting`` answers; ``moved``: when the latest round began, of ``time.monotonic``,
    infinity while there is nothing to compute; ``failed``: the error of the device that ended the thread.
    """

    def __init__(self, llm: LLM, loop: asyncio.AbstractEventLoop) -> None:
        self.llm = llm
        self.moved = time.monotonic()
        self.failed: DeviceError | None = None
        self._loop = loop
        #: None after the end: a closed model is not kept in memory.
        self._core: EngineCore | None = llm.core
        self._listeners: dict[Request, Listener] = {}
        #: The tokens that the event loop has not got yet.
        self._held: dict[Request, list[int]] = {}
        #: The errors of answers whose tokens could not be recorded.
        self._errors: dict[Request, Exception] = {}
        self._inbox: deque[Listener] = deque()
        self._wake = threading.Event()
        #: Set unless the thread prepares a pass: until the device computes it, or the event loop has waited long enough.
        self._started = threading.Event()
        self._started.set()
        #: Whether :meth:`_gather` is going to wake the thread.
        self._gathering = False
        self._closing = False
        #: Why no further answer is computed.
        self._ended: Exception | None = None
        #: How often the event loop got tokens, and how often it has worked on them; when it may get the next ones, of
        #: ``time.monotonic``.
        self._sent = self._worked = 0
        #: Whether a first token or the end of an answer is among what it has not got yet.
        self._urgent = False
        self._due = 0.0
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
        return sum(request.has_slot for request in tuple(self._listeners))

    @property
    def n_waiting(self) -> int:
        """The number of answers that have no slot."""
        return self.n_answers - self.n_running

    @property
    def n_paused(self) -> int:
        """The number of answers that wait for their clients to read."""
        return sum(request.paused for request in list(self._listeners))

    def submit(self, listener: Listener) -> None:
        """Compute an answer, with those of other requests that the event loop has received.  If the thread has ended, the
        answer ends with the reason."""
        self._inbox.append(listener)
        if self._fills_a_pass():
            if self.moved == math.inf and not self._wake.is_set():
                self._started.clear()  # the thread would do so only when it has the lock of the interpreter
            self._wake.set()
        elif not self._gathering:
            self._gathering = True
            self._gather(0, 0)
        if self._ended is not None:
            self._loop.call_soon(self._refuse, self._ended)
        if not self._started.is_set() and not self._started.wait(GIVE_WAY_SECONDS):
            self._started.set()

    def _fills_a_pass(self) -> bool:
        """Whether a pass over the prompts that have not been taken leaves no room for a further one."""
        model, waiting = self.llm.model, tuple(self._inbox)
        if len(waiting) >= (MOST_TOGETHER if model.reads_together else 1):
            return True
        return sum(request_of(listener.generation).n_prompt for listener in waiting) >= model.prompt_rows

    def _gather(self, seen: int, idle: int) -> None:
        """Wake the thread when the event loop has done nothing for answers to come in ``idle`` rounds."""
        idle = idle + 1 if len(self._inbox) == seen else 0
        if idle < GATHER_ROUNDS:
            self._loop.call_soon(self._gather, len(self._inbox), idle)
        else:
            self._gathering = False
            self._wake.set()

    def cancel(self, request: Request) -> None:
        """Compute no further token of an answer: it leaves before the next pass begins."""
        self._order(Order.CLOSE, request)

    def pause(self, request: Request) -> None:
        """Compute no token of an answer until :meth:`proceed`; it gives its slot to one that waits."""
        self._order(Order.PAUSE, request)

    def proceed(self, request: Request) -> None:
        """Continue a paused answer."""
        self._order(Order.PROCEED, request)

    def _order(self, order: Order, request: Request) -> None:
        if (core := self._core) is not None:
            core.order(order, request)
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
        while True:
            self._wake.clear()
            if self._closing:
                break
            self.moved = time.monotonic()
            self._started.clear()
            try:
                self._submit()
                moved = self.llm.core.step(self._on_wait)
            except DeviceError as error:
                # Its memory may hold anything: no later answer could be trusted.
                log.error("%s", error)
                self.failed = self._ended = error
                self._end(error)
                return
            except Exception as error:
                log.exception("the scheduler has failed")
                self._end(error)
                moved = False
            self._started.set()
            self._collect()
            if not moved and not self._inbox:
                self._hand_out()
                self.moved = math.inf
                if not self._wake.wait(IDLE_SECONDS):
                    self._check()
                    self._rest()
        problem = f"{self.llm.path.name} is being closed; send the request again later."
        self._ended = Refusal(problem, 503, retry_after=10)
        self._end(self._ended)

    def _check(self) -> None:
        """Look for pages that no sequence holds and that are not free."""
        try:
            self.llm.check_pages()
        except Exception:
            log.exception("pages of the cache are lost")

    def _rest(self) -> None:
        """Wait for work, and give memory back meanwhile."""
        if not self._wake.wait(REST_SECONDS):
            self.llm.rest()
            if not self._wake.wait(FORGET_SECONDS):
                self.llm.rest(forget=True)
                self._wake.wait()
            self.llm.resume()

    def _submit(self) -> None:
        while self._inbox:
            listener = self._inbox.popleft()
            request = request_of(listener.generation)
            self._listeners[request], self._held[request] = listener, []
            try:
                if request.speculation is not None:
                    with self.llm.lock:
                        self.llm.model.expect_drafts()
            except DeviceError:
                raise
            except Exception as error:
                self._fail(request, error)
            self.llm.core.submit(request)

    def _fail(self, request: Request, error: Exception) -> None:
        """End an answer with an error that is not the scheduler's."""
        self._errors[request], self._urgent = error, True
        self.cancel(request)

    def _on_wait(self) -> None:
        """Give the event loop what it should get now."""
        self._started.set()
        self._collect()
        if self._urgent or (self._sent == self._worked and time.monotonic() >= self._due):
            self._hand_out()

    def _collect(self) -> None:
        """Record the tokens that have been computed."""
        for request, listener in self._listeners.items():
            self._urgent = self._urgent or request.done or (bool(request.items) and not request.fetched)
            while request.items and request not in self._errors:
                token, logits = request.items.popleft()
                request.fetched += 1
                try:
                    if took(listener.generation, token, logits):
                        self._held[request].append(token)
                except Exception as error:
                    self._fail(request, error)

    def _hand_out(self) -> None:
        """Give the tokens that have been recorded to the event loop."""
        news, self._urgent = [], False
        for request, listener in list(self._listeners.items()):
            tokens, error = self._held[request], self._errors.pop(request, None)
            done = request.done or error is not None
            if tokens or done:
                if error is None and isinstance(request.error, Exception):
                    error = request.error
                news.append(News(listener, tokens, done, error))
                self._held[request] = []
            if done:
                del self._listeners[request], self._held[request]
        if news:
            self._sent += 1
            self._call(self._deliver, news)

    def _call(self, function: Callable[..., Any], *given: Any) -> None:
        """Let the event loop call a function; nobody waits for that if it is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *given)

    def _deliver(self, news: list[News]) -> None:
        begun = time.thread_time()
        try:
            for each in news:
                try:
                    each.listener.receive(each)
                except Exception:
                    log.exception("an answer could not receive its tokens")
                    self.cancel(request_of(each.listener.generation))
        finally:
            # What the listeners have woken runs before this.
            self._loop.call_soon(self._delivered, begun)

    def _delivered(self, begun: float) -> None:
        self._due = time.monotonic() + REST * (time.thread_time() - begun)
        self._worked += 1

    def _end(self, error: Exception) -> None:
        """End every answer, after the tokens that have been computed."""
        self._collect()
        self._hand_out()
        ended = list(self._listeners.items())
        for request, _ in ended:
            self.cancel(request)
        self._listeners.clear()
        self._held.clear()
        self._errors.clear()
        for _, listener in ended:
            self._call(listener.receive, News(listener, [], True, error))
        if self._ended is not None:
            self._core = None
            self._call(self._refuse, error)

    def _refuse(self, error: Exception) -> None:
        """End the answers that have not begun, after the thread has ended."""
        while self._inbox:
            listener = self._inbox.popleft()
            listener.receive(News(listener, [], True, error))
