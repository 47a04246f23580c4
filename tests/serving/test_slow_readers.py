"""Clients that do not read their answers: others do not wait for them, and they get the same answers when they read."""

import json
import math
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from engine.serving.app import app
from engine.serving.limits import Limits
from engine.serving.served import Served, Spec
from tests.serving.bundled import bundled
from tests.serving.live import live

pytestmark = pytest.mark.together("serving")

PROMPTS = ["def add(a, b):", "class Stack:\n"]
LONG = 120
"""Tokens of an answer that is too large for the buffers between a server and a client that does not read."""


def body(prompt: str, count: int) -> bytes:
    """A request for a stream with several kilobytes per token."""
    fields = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return json.dumps(fields | {"logprobs": 20, "stream": True}).encode()


def request(address: tuple[str, int], prompt: str, count: int) -> list[Any]:
    """The choices of a stream that is read at once."""
    asked = urllib.request.Request(
        "http://{}:{}/v1/completions".format(*address), body(prompt, count), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return choices(answer.read())


def choices(stream: bytes) -> list[Any]:
    """The choices of the events of a whole stream."""
    *frames, end, nothing = stream.decode().split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    return [choice for frame in frames for choice in json.loads(frame.removeprefix("data: "))["choices"]]


@contextmanager
def unread(address: tuple[str, int], prompt: str) -> Iterator[Callable[[], list[Any]]]:
    """A stream that nobody reads until what this gives is called, which returns its choices."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(address)
        asked = body(prompt, LONG)
        head = f"POST /v1/completions HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(asked)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + asked)

        def read() -> list[Any]:
            received = b"".join(iter(lambda: connection.recv(1 << 20), b""))
            head, _, stream = received.partition(b"\r\n\r\n")
            assert b"chunked" not in head
            return choices(stream)

        yield read


def wait(holds: Callable[[], bool]) -> None:
    """Wait until ``holds()``."""
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_unread_streams_keep_nobody_waiting() -> None:
    """They have all slots, until others want one."""
    guarded = app([Spec("pycoder", partial(bundled, parallel=2, n_ctx=512))], limits=Limits(backlog=8))
    with live(guarded, send_bytes=4096) as address:
        expected = [request(address, prompt, LONG) for prompt in PROMPTS]
        short = request(address, "import ", 5)
        served = guarded.state.models.entries["pycoder"].served
        assert isinstance(served, Served)
        driver = served.driver
        with unread(address, PROMPTS[0]) as first, unread(address, PROMPTS[1]) as second:
            wait(lambda: driver.n_paused == 2 and driver.moved == math.inf)
            assert driver.n_running == 2
            assert request(address, "import ", 5) == short
            assert driver.n_answers == 2  # nobody has read them, and they are not over
            assert [first(), second()] == expected
        wait(lambda: driver.n_answers == 0)
        served.llm.check_pages()
