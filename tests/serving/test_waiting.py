"""Answers that take long: what is sent meanwhile, and how those that do not end are logged."""

import json
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
pytest.importorskip("httpx")
import httpx

from engine.serving import streams
from engine.serving.app import app
from engine.serving.served import Spec
from tests.serving.bundled import bundled
from tests.serving.live import live

pytestmark = pytest.mark.together("serving")

MESSAGES: Any = {"messages": [{"role": "user", "content": "def add(a, b):"}]}
SHORT: Any = {"temperature": 0, "max_tokens": 16}
OPTIONS: Any = {"temperature": 0, "num_predict": 16}

INTERFACES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "/v1/chat/completions": (MESSAGES | SHORT, lambda whole: whole["choices"][0]["message"]),
    "/v1/completions": ({"prompt": "x = "} | SHORT, lambda whole: whole["choices"][0]["text"]),
    "/v1/responses": (
        {"input": "x = ", "temperature": 0, "max_output_tokens": 16},
        lambda whole: whole["output"][0]["content"],
    ),
    "/v1/messages": (MESSAGES | SHORT, lambda whole: whole["content"]),
    "/completion": ({"prompt": "x = ", "temperature": 0, "n_predict": 16}, lambda whole: whole["content"]),
    "/api/chat": (MESSAGES | {"options": OPTIONS, "stream": False}, lambda whole: whole["message"]),
    "/api/generate": ({"prompt": "x = ", "options": OPTIONS, "stream": False}, lambda whole: whole["response"]),
}
"""A request to each interface, and what of its answer depends on the request only."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(app([Spec("pycoder", partial(bundled, n_ctx=2048))])) as (host, port):
        yield f"http://{host}:{port}"


@pytest.mark.parametrize("path", INTERFACES)
def test_blanks_come_before_an_answer_that_takes_long(path: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, said = INTERFACES[path]
    before = httpx.post(url + path, json=body, timeout=60)
    monkeypatch.setattr(streams, "PING_SECONDS", 1e-6)
    late = httpx.post(url + path, json=body, timeout=60)
    assert before.text[:1] == "{" and "content-length" in before.headers
    assert late.text[:1] == " " and late.status_code == 200 and late.headers["content-type"] == "application/json"
    assert said(late.json()) == said(before.json())


@pytest.mark.thorough
def test_clients_read_such_an_answer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    ollama = pytest.importorskip("ollama")
    monkeypatch.setattr(streams, "PING_SECONDS", 1e-6)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-") as client:
        text = client.chat.completions.create(model="", **MESSAGES, **SHORT).choices[0].message.content
    with anthropic.Anthropic(base_url=url, api_key="-", max_retries=0) as client:
        assert (
            client.messages.create(model="", **MESSAGES, max_tokens=16, extra_body={"temperature": 0}).content[0].text
            == text
        )
    assert ollama.Client(url).chat("pycoder", **MESSAGES, options=OPTIONS).message.content == text


@pytest.mark.parametrize(
    ("path", "shape"),
    [("/v1/chat/completions", {"message", "type", "param", "code"}), ("/api/chat", None)],
)
def test_an_error_after_blanks_is_the_object_of_an_error(
    path: str, shape: set[str] | None, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streams, "PING_SECONDS", 1e-6)

    async def failing(*args: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("engine.serving.exchange.aside", failing)
    with caplog.at_level(logging.INFO):
        answer = httpx.post(url + path, json=INTERFACES[path][0], timeout=60)
        line = logged(caplog, path)
    error = json.loads(answer.text)["error"]
    assert answer.text.startswith(" ") and answer.status_code == 200
    assert "because of a defect" in (error if shape is None else error["message"])
    assert shape is None or set(error) == shape
    assert f"POST {path} 500 " in line


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_abandoned_is_logged_as_such(
    stream: bool, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streams, "PING_SECONDS", 1e-6)
    body = {"prompt": "x = ", "max_tokens": 2000, "ignore_eos": True, "stream": stream}
    with caplog.at_level(logging.INFO):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            assert answer.status_code == 200 and next(answer.iter_raw())
        assert "POST /v1/completions 499 " in logged(caplog, "/v1/completions")


def logged(caplog: pytest.LogCaptureFixture, path: str) -> str:
    """The line of the log of a request, which is written when it has ended."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for record in caplog.records:
            if record.name == "bitmirror.serving.access" and f" {path} " in record.getMessage():
                return record.getMessage()
        time.sleep(0.005)
    raise AssertionError(f"no line about {path}")
