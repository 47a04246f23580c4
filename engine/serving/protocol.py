"""HTTP of one connection: uvicorn's with h11, which refuses ambiguous lengths of bodies, and which here also ends connections
whose requests do not arrive or whose answers are not read."""

import asyncio
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.serving.connections import Connections
from engine.serving.errors import Refusal
from engine.serving.limits import Limits
from engine.serving.openai.shapes import error_body

log = logging.getLogger(__name__)


class Protocol(H11Protocol):
    """One connection.

    A client that connects must send the header of a request within ``seconds``, and so must one that has begun to send the
    header of a further request.  As much time is left for the rest of a body when the answer, which does not need it, has
    been sent.  A client that reads nothing of its answer for ``reader_seconds`` is disconnected, whether the answer is a
    stream or not.
    """

    def __init__(
        self, *args: Any, seconds: float, reader_seconds: float, connections: Connections, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self._seconds = seconds
        self._reader_seconds = reader_seconds
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None
        #: When it is examined whether the client has read something, and the bytes that were unread before.
        self._reading: asyncio.TimerHandle | None = None
        self._unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called when a client has connected."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._seconds, self._late)
        if not self._connections.add(self):
            problem = "the server has as many connections as it can have; send the request again later."
            self._answer(Refusal(problem, 503, retry_after=1))
            transport.close()

    def data_received(self, data: bytes) -> None:
        """Called when bytes have arrived."""
        self._connections.used(self)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Called when an answer has been sent."""
        super().on_response_complete()
        self._watch()
        self._watch_reader()

    def pause_writing(self) -> None:
        """Called when much of an answer waits to be read."""
        super().pause_writing()
        self._watch_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection has ended."""
        self._connections.remove(self)
        self._forget()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def drop(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def _watch_reader(self) -> None:
        if self._reading is None:
            self._unread = self.transport.get_write_buffer_size()
            if self._unread:
                self._reading = self.loop.call_later(self._reader_seconds, self._look_at_reader)

    def _look_at_reader(self) -> None:
        self._reading = None
        unread = self.transport.get_write_buffer_size()
        if unread and unread >= self._unread:
            log.info("a client that read nothing for %g seconds was disconnected", self._reader_seconds)
            self.transport.abort()
        else:
            self._watch_reader()

    @property
    def _header_begun(self) -> bool:
        """Whether a part of a header has arrived."""
        return self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])

    @property
    def _body_left(self) -> bool:
        """Whether a part of a body is missing that nobody wants any more."""
        return self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete

    def _watch(self) -> None:
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
            self._answer(Refusal(problem, 408))
        self.transport.close()

    def _answer(self, refusal: Refusal) -> None:
        """Send a refusal of a request that has not arrived."""
        body = json.dumps(error_body(refusal)).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        response = h11.Response(status_code=refusal.status, headers=list((headers | dict(refusal.headers())).items()))
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")


def protocol(limits: Limits) -> Callable[..., Protocol]:
    """What makes the protocol of a connection."""
    return partial(
        Protocol,
        seconds=limits.header_seconds,
        reader_seconds=limits.reader_seconds,
        connections=Connections(),
    )
