"""A server in a process of its own, with the model that is built in."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import engine

FLAGS = ("--device", "cpu", "-c", "512", "-np", "4", "--chat-template", "chatml")

WAIT_SECONDS = 60
"""The most time until a server answers; kernels may have to be compiled."""


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a server, such as ``http://127.0.0.1:8080``."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    command = [sys.executable, "-m", "engine.serve", "--port", "0", *FLAGS]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.fullmatch(r"listening on (http://127\.0\.0\.1:\d+)\n", line)
        assert found, f"the server says {line + process.stderr.read()!r}"
        address = found[1]
        # Nobody reads what it logs, which must not fill the pipe.
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                assert httpx.get(f"{address}/v1/models").status_code == 200
                break
            except httpx.TransportError:
                assert process.poll() is None, "the server has ended"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        assert process.wait(20) == 0
        drain.wait(20)


@pytest.fixture(scope="session")
def llm() -> Iterator[engine.LLM]:
    """The model of the server, in this process."""
    with engine.load(device="cpu", n_ctx=512) as opened:
        yield opened
