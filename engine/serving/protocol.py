"""HTTP of one connection: uvicorn's with h11, which refuses ambiguous lengths of bodies, and which here also ends connections
whose requests do not arrive."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.serving.errors import Refusal
from engine.serving.limits import Limits
from engine.serving.openai.shapes import error_body


class Protocol(H11Protocol):
    """One connection.

    A client that connects must send the header of a request within ``seconds``, and so must one that has begun to send the
    header of a further request.  As much time is left for the rest of a body when the answer, which does not need it, has
    been sent.
    """

    def __init__(self, *args: Any, seconds: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self._seconds = seconds
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called when a client has connected."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._seconds, self._late)

    def data_received(self, data: bytes) -> None:
        """Called when bytes have arrived."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Called when an answer has been sent."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection has ended."""
        self._forget()
        super().connection_lost(exc)

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
            refusal = Refusal(problem, 408)
            body = json.dumps(error_body(refusal)).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            response = h11.Response(status_code=408, headers=list((headers | dict(refusal.headers())).items()))
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def protocol(limits: Limits) -> Callable[..., Protocol]:
    """What makes the protocol of a connection."""
    return partial(Protocol, seconds=limits.header_seconds)
