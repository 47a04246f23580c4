"""A server in a process of its own, with the model that is built in."""

import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine

FLAGS = ("-m", "pycoder", "--device", "cpu", "-c", "512", "-np", "4", "--chat-template", "chatml")

WAIT_SECONDS = 300
"""The most time until a server answers; kernels may have to be compiled."""


@pytest.fixture(scope="session")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A server that has been started but may not answer yet, and the file that it logs to."""
    pytest.importorskip("uvicorn")
    path = tmp_path_factory.mktemp("server") / "log"
    with path.open("wb") as log:
        started = subprocess.Popen([sys.executable, "-m", "engine.serve", "--port", "0", *FLAGS], stderr=log)
    yield started, path
    started.terminate()
    assert started.wait(20) == 0, path.read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def llm(process: object) -> Iterator[engine.LLM]:
    """The model of the server, opened in this process while the server starts."""
    with engine.load(device="cpu", n_ctx=512) as opened:
        yield opened


@pytest.fixture(scope="session")
def server(process: tuple[subprocess.Popen[bytes], Path], llm: engine.LLM) -> str:
    """The address of a server that answers, such as ``http://127.0.0.1:8080``."""
    httpx = pytest.importorskip("httpx")
    started, path = process
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        log = path.read_text(encoding="utf-8")
        assert started.poll() is None, f"the server has ended: {log}"
        assert time.monotonic() < deadline, f"the server does not answer: {log}"
        if found := re.search(r"^listening on (http://127\.0\.0\.1:\d+)\n", log, re.MULTILINE):
            try:
                assert httpx.get(f"{found[1]}/v1/models", timeout=WAIT_SECONDS).status_code == 200
                return found[1]
            except httpx.TransportError:
                pass
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Take back what a server that a test has started in this process sets: pytest's handlers outlive the test."""
    handlers = [(each, each.formatter, list(each.filters)) for each in logging.getLogger().handlers]
    level = logging.getLogger("bitmirror").level
    yield
    logging.getLogger("bitmirror").setLevel(level)
    for handler, formatter, filters in handlers:
        handler.formatter, handler.filters = formatter, filters
