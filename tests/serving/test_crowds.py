"""A server in a process of its own with few descriptors, clients that read nothing, and two signals."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("uvicorn")
resource = pytest.importorskip("resource", reason="this system has no limits of descriptors")

DESCRIPTORS = 160
PATIENCE = 60.0


class Process:
    """``bitmirror serve`` with the bundled model; ``lines``: what it has written to stderr."""

    def __init__(self, *flags: str) -> None:
        words = [sys.executable, "-m", "engine.serve", "-m", "pycoder", "--device", "cpu", "--port", "0", *flags]
        self.process = subprocess.Popen(
            words,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        found = self.wait_for(r"listening on http://127\.0\.0\.1:(\d+)")
        self.address = "127.0.0.1", int(found[1])
        self.url = f"http://127.0.0.1:{found[1]}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def wait_for(self, pattern: str) -> re.Match[str]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for line in tuple(self.lines):
                if found := re.search(pattern, line):
                    return found
            assert self.process.poll() is None or self._reader.is_alive(), "".join(self.lines)
            time.sleep(0.02)
        raise AssertionError(f"no line with {pattern}: {self.lines}")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


@pytest.fixture
def server() -> Iterator[Process]:
    process = Process("--reader-seconds", "1", "--drain-seconds", "60")
    try:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{process.url}/health", timeout=PATIENCE).status_code == 200:
                    break
            time.sleep(0.05)
        yield process
    finally:
        process.end()


def test_more_connections_than_descriptors(server: Process) -> None:
    """The oldest idle connections are closed, requests are answered, and the log stays short."""
    with contextlib.ExitStack() as stack:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for i in range(3 * DESCRIPTORS):
            connection = stack.enter_context(socket.socket())
            connection.connect(server.address)
            # Nothing, a part of a header, or of a body.
            connection.sendall(b"" if i % 3 == 0 else head if i % 3 == 1 else head + b"Content-Length: 9\r\n\r\n{")
        for _ in range(3):
            assert httpx.get(f"{server.url}/health", timeout=PATIENCE).json()["status"] == "ok"
            body = {"prompt": "def f(x):", "max_tokens": 4}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
            assert answer.status_code == 200
    assert any("connections are open and no more fit (ulimit -n)" in line for line in server.lines)
    assert not any("Traceback" in line for line in server.lines), "".join(server.lines)
    # A request whose body never came is a line of its own, like every other request.
    requests = [line for line in server.lines if " 499 " in line]
    assert len(requests) <= DESCRIPTORS and len(server.lines) - len(requests) < 40


@pytest.mark.thorough
def test_the_server_ends_although_a_client_does_not_read() -> None:
    """When the time is over, with no traceback."""
    server = Process("--drain-seconds", "1")
    body = json.dumps({"content": "x = 1\n" * 100_000, "with_pieces": True}).encode()
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with contextlib.ExitStack() as stack:
        stack.callback(server.end)
        connection = stack.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.recv(100)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
    assert not any("Traceback" in line for line in server.lines), "".join(server.lines)


def test_an_answer_that_nobody_reads(server: Process) -> None:
    """It is not a stream, and its connection is closed like that of one."""
    body = json.dumps({"content": "x = 1\n" * 100_000, "with_pieces": True}).encode()
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        connection.sendall(head.encode() + body)
        server.wait_for("a client that read nothing for 1 seconds was disconnected")
        data = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(1 << 20):
                data += part
    assert data.startswith(b"HTTP/1.1 200 ") and not data.endswith(b"]}")
    assert not any("Traceback" in line for line in server.lines), "".join(server.lines)


def test_a_second_signal_ends_the_server_at_once(server: Process) -> None:
    """With one line for it, whatever is being answered."""
    body = {"prompt": "def f(x):", "max_tokens": 7000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        pieces = answer.iter_text()  # a reference: an iterator that is collected closes the connection
        next(pieces)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining: 1 answers")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 128 + signal.SIGTERM
    server.end()
    assert "ended by a second signal" in server.lines[-1]
    assert not any("Traceback" in line for line in server.lines), "".join(server.lines)
    assert os.path.exists(f"/proc/{server.process.pid}") is False
