"""HTTP of one connection: uvicorn's with h11, which refuses ambiguous lengths of bodies, and which here also ends connections
whose clients do not send what they have begun, or do not read."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.serving.connections import BODY, REQUEST, UNREAD, Connections, Wait
from engine.serving.errors import Refusal
from engine.serving.limits import Limits
from engine.serving.openai.shapes import error_body

LOOKS = 8
"""How often it is looked whether a client reads, in the time in which it must."""

MOST_CORKED = 64 << 10
"""Bytes that are sent without waiting for more of the same round, so that a client that does not read is noticed."""

log = logging.getLogger("bitmirror.serving")


def _nothing() -> None: ...


class CorkedTransport:
    """A transport that sends what is written in one round of the event loop at once: the head of an answer with its body, and
    the last text of a stream with its end.  Each sending takes longer than writing a text, and wakes the client."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, sent: Callable[[], None]) -> None:
        """sent: called when bytes have been given to the system, as far as it has taken them."""
        self._transport = transport
        self._loop = loop
        self._sent = sent
        self._parts: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send bytes in the next round, or now if they are many."""
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size >= MOST_CORKED:
            self.flush()

    def close(self) -> None:
        """Close the connection when all has been sent."""
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection, whatever the client has not read."""
        self.flush()
        self._transport.abort()

    def release(self) -> None:
        """Forget who is told of bytes that are sent: the connection has ended, and is freed without a search for garbage."""
        self._sent = _nothing

    def flush(self) -> None:
        """Send what has been written."""
        if self._parts:
            data, self._parts, self._size = b"".join(self._parts), [], 0
            self._transport.write(data)
            self._sent()


class Protocol(H11Protocol):
    """One connection.

    A client that connects must send the header of a request within ``header_seconds``, and so must one that has begun to send
    the header of a further request.  As much time is left for the rest of a body when the answer, which does not need it, has
    been sent.  A client that reads nothing for ``reader_seconds`` although there is something to read is disconnected: in
    the middle of a stream, before the end of a long answer, and when the answer is complete.
    """

    def __init__(self, *args: Any, limits: Limits, others: Connections, **more: Any) -> None:
        super().__init__(*args, **more)
        self._seconds = limits.header_seconds
        self._patience = limits.reader_seconds
        self._others = others
        self._deadline: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        #: When the connection began to wait for a request, or the latest request began.
        self._since = time.monotonic()
        #: Bytes that the client has not read, as far as the system does not keep them, and since when it has read none.
        self._unread, self._unread_since = 0, self._since

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called when a client has connected."""
        super().connection_made(CorkedTransport(transport, self.loop, self._watch_reader))  # type: ignore[arg-type]
        self._deadline = self.loop.call_later(self._seconds, self._late)
        self._others.add(self, transport.get_extra_info("socket").fileno())

    def data_received(self, data: bytes) -> None:
        """Called when bytes have arrived."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._since = time.monotonic()
        self._watch()

    def eof_received(self) -> None:
        """Called when the client sends nothing more.  What has been written is sent before the connection is closed."""
        self.transport.flush()  # type: ignore[attr-defined]
        super().eof_received()

    def pause_writing(self) -> None:
        """Called when much is left that the client has not read."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Called when little is left."""
        super().resume_writing()
        self._unread_since = time.monotonic()

    def on_response_complete(self) -> None:
        """Called when an answer has been written."""
        self._since = time.monotonic()
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection has ended."""
        self._forget()
        if self._look is not None:
            self._look.cancel()
        self._others.remove(self)
        super().connection_lost(exc)
        self.transport.release()  # type: ignore[attr-defined]

    @property
    def waits(self) -> Wait | None:
        """What the connection waits for; None if its client waits for the server."""
        if self.cycle is None or self.cycle.response_complete:
            return Wait(REQUEST, self._since)
        if self.cycle.more_body:
            return Wait(BODY, self._since)
        return Wait(UNREAD, self._unread_since) if self.flow.write_paused else None

    def drop(self) -> None:
        """Close the connection, whatever has not been sent."""
        if self.cycle is None and self.conn.our_state is h11.IDLE and not self.transport.is_closing():
            self._refuse(Refusal("this server has no room for a further connection; try later.", 503, retry_after=1))
        self.transport.abort()

    @property
    def _header_begun(self) -> bool:
        """Whether a part of a header has arrived."""
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    @property
    def _body_left(self) -> bool:
        """Whether a part of a body is missing that nobody wants any more."""
        return self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete

    def _watch(self) -> None:
        self._watch_reader()
        if not self._header_begun and not self._body_left:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._seconds, self._late)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._header_begun:
            problem = f"the header did not arrive within {self._seconds:g} seconds (--header-seconds); send it faster."
            self._refuse(Refusal(problem, 408))
        self.transport.close()
        self._watch_reader()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer what is no request yet."""
        body = json.dumps(error_body(refusal)).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=refusal.status, headers=list((headers | dict(refusal.headers())).items()))
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    # --- clients that do not read ----------------------------------------------------------------------------------

    @property
    def _should_read(self) -> bool:
        """Whether the client has something to read before anything else can happen."""
        return self.transport.get_write_buffer_size() > 0 and (
            self.flow.write_paused or self.transport.is_closing() or self.cycle is None or self.cycle.response_complete
        )

    def _watch_reader(self) -> None:
        if self._look is None and self._should_read:
            self._unread, self._unread_since = self.transport.get_write_buffer_size(), time.monotonic()
            self._look = self.loop.call_later(self._patience / LOOKS, self._look_at_reader)

    def _look_at_reader(self) -> None:
        self._look = None
        if not self._should_read:
            return
        left, now = self.transport.get_write_buffer_size(), time.monotonic()
        if left != self._unread:
            self._unread, self._unread_since = left, now
        elif now - self._unread_since >= self._patience:
            log.info("a client that read nothing for %g seconds was disconnected (--reader-seconds)", self._patience)
            self.transport.abort()
            return
        self._look = self.loop.call_later(self._patience / LOOKS, self._look_at_reader)


def protocol(limits: Limits, connections: Connections) -> Callable[..., Protocol]:
    """What makes the protocol of a connection."""
    return partial(Protocol, limits=limits, others=connections)
