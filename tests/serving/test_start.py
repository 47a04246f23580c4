"""The first minutes of a server: what it answers while its first model is opened, and what it says then."""

import logging
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
import httpx

from engine import serve
from engine.errors import ModelError
from engine.serving import streams
from engine.serving.app import app
from engine.serving.connections import Connections
from engine.serving.errors import Refusal
from engine.serving.limits import Limits
from engine.serving.process import Server, config_of, listening
from engine.serving.served import Spec
from tests.serving.bundled import bundled

pytestmark = pytest.mark.together("serving")

PATIENCE = 60.0


class Opening:
    """Opens the bundled model when it may; error: what is raised instead."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may = threading.Event()
        self._error = error

    def __call__(self) -> Any:
        assert self.may.wait(PATIENCE)
        if self._error is not None:
            raise self._error
        return bundled(parallel=2)


@contextmanager
def started(
    opening: Opening, certificate: tuple[str, str] | None = None
) -> Iterator[tuple[Server, str, threading.Thread]]:
    """A server as ``bitmirror serve`` starts it, its address, and its thread."""
    limits, connections = Limits(), Connections()
    application = app([Spec("pycoder", opening)], limits=limits, preload=False)
    with listening("127.0.0.1", 0) as listener:
        config = config_of(application, limits, "127.0.0.1", 0, connections, certificate)
        server = Server(config, application.state, connections, 5.0)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield (
                server,
                f"{'http' if certificate is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}",
                thread,
            )
        finally:
            opening.may.set()
            server.should_exit = True
            thread.join(PATIENCE)


def test_a_server_answers_while_its_model_is_opened(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Its state at once, a completion when the model is open; only then does it say that it listens."""
    caplog.set_level(logging.INFO, "bitmirror")
    opening = Opening()
    with started(opening) as (_, url, _thread), ThreadPoolExecutor(1) as pool:
        health = httpx.get(f"{url}/health", timeout=PATIENCE)
        # The very body of llama-server, for which its clients look.
        body = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
        assert (health.status_code, health.json()) == (503, body)
        assert int(health.headers["retry-after"]) > 0
        assert httpx.get(f"{url}/metrics", timeout=PATIENCE).status_code == 200
        (model,) = httpx.get(f"{url}/v1/models", timeout=PATIENCE).json()["data"]
        assert model["status"]["value"] == "loading"
        asked = {"prompt": "def f(x):", "max_tokens": 2}
        waiting = pool.submit(httpx.post, f"{url}/v1/completions", json=asked, timeout=PATIENCE)
        assert "listening on" not in capfd.readouterr().err
        assert not waiting.done()
        opening.may.set()
        assert waiting.result(PATIENCE).json()["usage"]["completion_tokens"] == 2
        assert httpx.get(f"{url}/health", timeout=PATIENCE).json() == {"status": "ok"}
        said = ""
        deadline = time.monotonic() + PATIENCE
        while f"listening on {url}\n" not in said and time.monotonic() < deadline:
            said += capfd.readouterr().err
            time.sleep(0.01)
        assert f"listening on {url}\n" in said
    assert "pycoder is open on the CPU with " in caplog.text
    assert ": 2 slots of 256 tokens; " in caplog.text
    assert f"OpenAI's interface is at {url}/v1, " in caplog.text


def test_a_model_that_cannot_be_opened_ends_the_server() -> None:
    """A request that waits for it is answered, and nothing is opened again."""
    opening = Opening(ModelError("the file is damaged"))
    with started(opening) as (server, url, thread), ThreadPoolExecutor(1) as pool:
        assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 503
        waiting = pool.submit(httpx.post, f"{url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE)
        while not server.server_state.tasks:
            time.sleep(0.01)
        opening.may.set()
        assert waiting.result(PATIENCE).status_code == 503
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert isinstance(server.problem, Refusal)
        assert server.problem.message == "the model pycoder cannot be opened: the file is damaged"


WAITING: dict[str, tuple[dict[str, Any], bytes]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, b" "),
    "/v1/completions": ({"prompt": "x", "max_tokens": 1, "stream": True}, b": ping"),
    "/v1/messages": ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}, b"event: ping"),
    "/v1/messages/count_tokens": ({"messages": [{"role": "user", "content": "x"}]}, b" "),
    "/v1/responses": ({"input": "x", "max_output_tokens": 1, "stream": True}, b": ping"),
    "/v1/responses/input_tokens": ({"input": "x"}, b" "),
    "/api/generate": ({"prompt": "x", "options": {"num_predict": 1}}, b" "),
    "/api/chat": ({"model": "pycoder"}, b" "),
    "/models/load": ({"model": "pycoder"}, b" "),
}
"""Requests that wait for a model, and what each of them gets meanwhile."""


def test_requests_that_wait_for_a_model_get_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blanks or pings before an answer; status 503 where an answer cannot begin before the model is open."""
    monkeypatch.setattr(streams, "PING_SECONDS", 0.01)
    monkeypatch.setattr("engine.serving.llama_server.tokens.PATIENCE_SECONDS", 0.01)
    opening = Opening()
    with started(opening) as (_, url, _thread), ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE))
        answers: dict[str, Iterator[bytes]] = {}
        for path, (body, first) in WAITING.items():
            answer = stack.enter_context(client.stream("POST", path, json=body))
            answers[path] = answer.iter_raw()
            assert answer.status_code == 200 and next(answers[path]).startswith(first), path
        refused = client.post("/tokenize", json={"content": "x"})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["message"] == "the model pycoder is being opened; send the request again later."
        # A client that leaves ends nothing.
        with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as left:
            assert next(left.iter_raw())
        opening.may.set()
        for path, chunks in answers.items():
            text = b"".join(chunks).decode()
            assert "error" not in text.replace('"error":null', "") and text.strip(), (path, text)
        assert client.post("/tokenize", json={"content": "x"}).status_code == 200


def test_streams_tell_that_a_model_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PING_SECONDS", 0.01)
    opening = Opening(ModelError("the file is damaged"))
    with started(opening) as (_, url, _thread), ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE))
        answers: dict[str, Iterator[bytes]] = {}
        for path, (body, _first) in WAITING.items():
            answers[path] = stack.enter_context(client.stream("POST", path, json=body)).iter_raw()
            assert next(answers[path])
        opening.may.set()
        for path, chunks in answers.items():
            text = b"".join(chunks).decode()
            assert "error" in text and "the model pycoder cannot be opened: the file is damaged" in text, (path, text)


def test_a_signal_gives_up_the_opening(caplog: pytest.LogCaptureFixture) -> None:
    """Requests that wait are answered at once."""
    caplog.set_level(logging.INFO, "bitmirror")
    opening = Opening()
    with started(opening) as (server, url, thread), ThreadPoolExecutor(1) as pool:
        assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 503
        waiting = pool.submit(httpx.post, f"{url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE)
        while not server.server_state.tasks:
            time.sleep(0.01)
        server.handle_exit(signal.SIGINT, None)
        answer = waiting.result(PATIENCE)
        assert answer.status_code == 503 and "the server is shutting down" in answer.text
        thread.join(PATIENCE)
        assert not thread.is_alive() and not opening.may.is_set()
        assert (server.status, server.problem) == (130, None)
    assert "the server ends before pycoder is open" in caplog.text and "draining" not in caplog.text


SERVE = """
import sys, time
from engine import serve
serve.Opener.__call__ = lambda self: time.sleep(600)
sys.exit(serve.main(["-m", "pycoder", "--port", "0", "--device", "cpu"]))
"""


@pytest.mark.skipif(os.name != "posix", reason="there are no such signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_that_opens_a_model(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert "loading pycoder" in process.stderr.readline()
            process.send_signal(number)
            rest = process.communicate(timeout=PATIENCE)[1]
        finally:
            process.kill()
    assert process.returncode == 128 + number
    (line,) = rest.splitlines()
    assert line.endswith("the server ends before pycoder is open")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate of 127.0.0.1, made with openssl, and its key."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("there is no openssl here")
    folder = tmp_path_factory.mktemp("certificate")
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run([program, *words.split(), *more], check=True, capture_output=True)
    return files


def test_https(certificate: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """A client that trusts the certificate is answered, one that speaks HTTP is not."""
    caplog.set_level(logging.INFO, "bitmirror")
    trusted = ssl.create_default_context(cafile=certificate[0])
    with started(Opening(), certificate) as (_, url, _thread):
        assert httpx.get(f"{url}/health", verify=trusted, timeout=PATIENCE).status_code == 503
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health", timeout=PATIENCE)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url.replace('https', 'http')}/health", timeout=PATIENCE)
    assert f"{url}/health answers" in caplog.text


def test_a_certificate_that_cannot_be_used(
    certificate: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.pem"
    other.write_text("nothing", encoding="utf-8")
    for file, key in ((certificate[1], certificate[1]), (str(other), certificate[1]), (str(tmp_path / "absent"), "x")):
        words = ["-m", "pycoder", "--port", "0", "--device", "cpu", "--ssl-cert-file", file, "--ssl-key-file", key]
        assert serve.main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: the certificate cannot be used (")
