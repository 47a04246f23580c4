"""Responses that end with their client: streams of events, and answers that are computed as a whole."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import EngineError
from engine.serving.answer import Answer, Delta
from engine.serving.errors import Refusal, note, refusal_of

T = TypeVar("T")

PING_SECONDS = 15.0
"""Seconds without a text after which something is sent that clients skip, so that nobody between takes the connection for
dead."""


class Framing(NamedTuple):
    """How the texts of a stream are written.

    media_type: what the stream is; ping: what fills its silence, which clients skip.
    """

    media_type: str
    ping: str


SSE = Framing("text/event-stream", ": ping\n\n")
"""Server-sent events; a comment fills the silence."""

NDJSON = Framing("application/x-ndjson", " ")
"""Lines of JSON.  A line may begin with blanks, but must not be empty."""

JSON = Framing("application/json", " ")
"""One JSON object, before which there may be blanks."""

log = logging.getLogger("bitmirror.serving")

# json.dumps would make an encoder for each value.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dump(value: Any) -> str:
    """JSON as it is sent: compact, and the characters as they are."""
    return _ENCODER.encode(value)


def sse(value: Any, event: str = "") -> str:
    """One server-sent event; ``event``: its name."""
    data = value if isinstance(value, str) else dump(value)
    return f"event: {event}\ndata: {data}\n\n" if event else f"data: {data}\n\n"


def line(value: Any) -> str:
    """One line of a stream of JSON."""
    return dump(value) + "\n"


class Last(str):
    """The last text of a stream, which is sent together with its end."""


class Disconnected(Exception):
    """The client has left."""


async def _left(receive: Receive) -> None:
    """Return when the client has left.  The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def started(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that runs at once until it waits for something, if this Python has such tasks, and else as all others.

    Requests that arrive together would otherwise take turns, and all be read before the first one is submitted.
    """
    if sys.version_info >= (3, 12):
        return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
    return asyncio.ensure_future(work)


async def soon(request: Request, work: asyncio.Task[Any]) -> bool:
    """Wait until ``work`` is done, but only as long as a client may hear nothing; returns whether it is done.

    Raises Disconnected if the client leaves before.  The body must have been read.
    """
    if work.done():
        return True
    watcher = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({work, watcher}, timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if watcher.done() and not work.done():
            raise Disconnected
        return work.done()
    finally:
        await ended(watcher)


async def ended(task: asyncio.Task[Any]) -> None:
    """End a task, whatever becomes of it."""
    if task.done() and not task.cancelled() and task.exception() is None:
        return
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def whole(
    request: Request, text: Coroutine[Any, Any, str], error: Callable[[Refusal], Mapping[str, Any]]
) -> Response:
    """The response whose JSON is ``text``.  If that takes long, blanks are sent before it.

    error: the object of an error, if blanks have been sent.  Raises what ``text`` raises, and Disconnected.
    """
    async with AsyncExitStack() as stack:
        work = started(text)
        stack.push_async_callback(ended, work)
        if await soon(request, work):
            return Response(work.result(), media_type=JSON.media_type)
        return Stream(_late(work), lambda refusal: dump(error(refusal)), stack.pop_all(), JSON)


async def _late(work: asyncio.Task[str]) -> AsyncIterator[str]:
    """A whole answer that takes long, as a stream that begins at once."""
    yield JSON.ping
    yield await work


class Stream(Response):
    """A response that is written while it is computed.

    Each text of ``content`` is sent when it is there, and the head with the first one.  The stream ends, and what computes it
    is closed, when the client leaves or is disconnected because it reads nothing.  An error becomes what ``failed`` makes of
    it.  ``held``: what is released at the end, even if nothing of the content was computed; ``framing``: how the texts are
    written.  If it does not end as it should, the log has the status that tells why instead of 200.
    """

    def __init__(
        self,
        content: AsyncIterator[str],
        failed: Callable[[Refusal], str],
        held: AsyncExitStack,
        framing: Framing,
    ) -> None:
        self.content = content
        self.failed = failed
        self.held = held
        self.ping = framing.ping
        self.status_code = 200
        self.media_type = framing.media_type
        self.background = None
        #: Whether the head has been sent, and the end.
        self._begun = self._complete = False
        #: Whether a text is being sent, and when the latest one was.
        self._sending, self._since = False, time.monotonic()
        #: What fills silence: a timer, and the latest text that was sent for it.
        self._timer: asyncio.TimerHandle
        self._pinging: asyncio.Task[None] | None = None
        # Without it a proxy may collect the whole answer before it passes it on.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        over = asyncio.Event()
        writing, leaving = started(self._write(scope, send)), started(_left(receive))
        for task in (writing, leaving):
            task.add_done_callback(lambda _: over.set())
        self._tend(send)
        try:
            # The second one is done, too, when all has been written.
            await over.wait()
            if not self._complete and not writing.done():
                scope.setdefault("state", {})["ended"] = 499  # the client left
        finally:
            self._timer.cancel()
            for each in (writing, leaving, self._pinging):
                if each is not None:
                    await ended(each)
            await self.held.aclose()

    async def _write(self, scope: Scope, send: Send) -> None:
        try:
            async with aclosing(self.content) as content:  # type: ignore[type-var]
                async for text in content:
                    await self._put(send, text)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status == 500:
                log.error("an answer failed: %s", refusal, exc_info=not isinstance(error, EngineError))
            note(scope, refusal)
            scope.setdefault("state", {})["ended"] = refusal.status
            await self._put(send, Last(self.failed(refusal)))
        if not self._complete:
            await self._put(send, Last())

    async def _put(self, send: Send, text: str) -> None:
        more = not isinstance(text, Last)
        self._sending, self._since = True, time.monotonic()
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
        self._sending, self._since, self._complete = False, time.monotonic(), not more

    def _tend(self, send: Send) -> None:
        """Fill silence.  This looks at the time now and then: a timer for each text would take longer than the text."""
        left = self._since + PING_SECONDS - time.monotonic()
        if left <= 0 and not self._sending:
            self._pinging = asyncio.ensure_future(self._put(send, self.ping))
        self._timer = asyncio.get_running_loop().call_later(left if left > 0 else PING_SECONDS, self._tend, send)


async def merged(answers: Iterable[Answer]) -> AsyncIterator[tuple[Answer, Delta]]:
    """The deltas of several answers, as they come: the last one of each has a ``finish_reason``."""
    own = list(answers)
    if len(own) == 1:
        async with aclosing(own[0].__aiter__()) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield own[0], delta
        return
    # A delta is taken when it is wanted, so that what an answer says about itself agrees with what has been sent of it.
    iterators = {answer: answer.__aiter__() for answer in own}
    waiting = {asyncio.ensure_future(answer.arrived()): answer for answer in own}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in waiting if task in done]:
                answer = waiting.pop(task)
                delta = await anext(iterators[answer])
                yield answer, delta
                if delta.finish_reason:
                    await iterators[answer].aclose()  # type: ignore[attr-defined]
                else:
                    waiting[asyncio.ensure_future(answer.arrived())] = answer
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for answer, each in iterators.items():
            await each.aclose()  # type: ignore[attr-defined]
            answer.cancel()  # it does so itself only if it has begun
