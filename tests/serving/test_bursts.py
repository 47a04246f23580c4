"""Requests that arrive together, and how often the system is asked to send their answers."""

import asyncio
import gc
import json
import socket
import sys
import threading
import time
import weakref
from asyncio import selector_events
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
pytest.importorskip("httpx")
import httpx

from engine.serving import exchange, protocol
from engine.serving.app import app
from engine.serving.driver import Driver, Listener
from engine.serving.fields import Fields
from engine.serving.protocol import CorkedTransport, Protocol
from engine.serving.served import Spec
from tests.serving.bundled import bundled
from tests.serving.live import live

pytestmark = pytest.mark.together("serving")

N = 8


@pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python begins each task in a later round")
def test_each_request_is_submitted_before_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    check, submit = exchange.check, Driver.submit

    def checked(fields: Fields, table: Any) -> None:
        events.append(("read", fields.values["seed"]))
        check(fields, table)

    def submitted(driver: Driver, listener: Listener) -> None:
        events.append(("submitted", listener.generation.seed))
        submit(driver, listener)

    monkeypatch.setattr(exchange, "check", checked)
    monkeypatch.setattr(Driver, "submit", submitted)

    async def ask() -> list[httpx.Response]:
        application = app([Spec("pycoder", partial(bundled, parallel=N))])
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            bodies = [{"prompt": "x = ", "max_tokens": 2, "seed": i, "stream": i % 2 > 0} for i in range(N)]
            await client.post("/v1/completions", json=bodies[0])  # the model is open, and its fingerprint known
            events.clear()
            asked = [client.post("/v1/completions", json=body) for body in bodies]
            responses = await asyncio.gather(*asked)
        await application.state.models.close()
        return responses

    assert [response.status_code for response in asyncio.run(ask())] == [200] * N
    assert sorted(seed for name, seed in events if name == "read") == [*range(N)]
    assert events == [(name, seed) for kind, seed in events[::2] for name in ("read", "submitted")]


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with live(app([Spec("pycoder", bundled)])) as found:
        yield found


@pytest.mark.parametrize("stream", [True, False])
def test_the_end_of_an_answer_is_sent_at_once(
    stream: bool, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream's head with its first text, its last text with its end, and a whole answer with its head."""
    sent = []
    write = selector_events._SelectorSocketTransport.write  # type: ignore[attr-defined]

    def written(transport: Any, data: bytes) -> None:
        sent.append(data)
        write(transport, data)

    body = json.dumps({"prompt": "x = ", "max_tokens": 4, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    received = b""
    with monkeypatch.context() as patch, socket.create_connection(address) as connection:
        patch.setattr(selector_events._SelectorSocketTransport, "write", written)  # type: ignore[attr-defined]
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while piece := connection.recv(1 << 16):
            received += piece
    assert b"".join(sent) == received
    if stream:
        assert sent[0].startswith(b"HTTP/1.1 200 ") and b"data: " in sent[0]
        assert sent[-1].count(b"data: ") >= 2 and sent[-1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert len(sent) == 1 and sent[0].startswith(b"HTTP/1.1 200 ") and sent[0].endswith(b"}")


def test_a_connection_is_freed_without_a_search_for_garbage(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, lost, ended = list[weakref.ref[Protocol]](), Protocol.connection_lost, threading.Event()

    def connection_lost(connection: Protocol, error: Exception | None) -> None:
        made.append(weakref.ref(connection))
        lost(connection, error)
        ended.set()

    monkeypatch.setattr(Protocol, "connection_lost", connection_lost)
    body = json.dumps({"prompt": "x = ", "max_tokens": 2, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    gc.disable()
    try:
        with socket.create_connection(address) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while connection.recv(1 << 16):
                pass
        assert ended.wait(10)
        until = time.monotonic() + 10
        while made[0]() is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert made[0]() is None
    finally:
        gc.enable()


def test_a_client_that_sends_nothing_more_gets_its_answer(address: tuple[str, int]) -> None:
    """The end of what it sends may be seen before what was written is sent."""
    for _ in range(40):
        with socket.create_connection(address) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


class Recorder(asyncio.Transport):
    """A transport that keeps what is done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Any] = []

    def write(self, data: Any) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("closed")

    def abort(self) -> None:
        self.done.append("aborted")


@pytest.mark.parametrize("end", ["close", "abort"])
def test_nothing_that_was_written_is_lost(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does much wait for the next round: whether a client reads is only known of what was sent."""
    monkeypatch.setattr(protocol, "MOST_CORKED", 4)

    async def run() -> list[Any]:
        recorder = Recorder()
        corked = CorkedTransport(recorder, asyncio.get_running_loop(), lambda: None)
        corked.write(b"a")
        corked.write(b"b")
        assert recorder.done == []
        await asyncio.sleep(0)
        assert recorder.done == [b"ab"]
        for data in (b"c", b"def", b"g"):
            corked.write(data)
        assert recorder.done == [b"ab", b"cdef"]
        getattr(corked, end)()
        await asyncio.sleep(0)
        return recorder.done

    assert asyncio.run(run()) == [b"ab", b"cdef", b"g", {"close": "closed", "abort": "aborted"}[end]]
