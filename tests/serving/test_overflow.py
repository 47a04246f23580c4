"""A model whose arithmetic overflows, over HTTP: the sentence of the error, on every route that answers, and no traceback."""

import json
import logging
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from engine.hub.resolve import resolve
from engine.serving.app import app
from engine.serving.served import Spec
from tests.ggufs import damaged
from tests.serving.bundled import bundled
from tests.tiers import few

pytestmark = pytest.mark.together("serving")

SAID = "the file is damaged or its arithmetic overflowed"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("models") / "bad.gguf"
    damaged(resolve(None), path, "blk.1.attn_norm.weight", 3, 1e20)
    with TestClient(app([Spec("bad", lambda: bundled(path=path))]), "http://localhost") as opened:
        yield opened


@pytest.mark.parametrize(
    ("path", "body"),
    few(
        [
            ("/v1/chat/completions", {"messages": HELLO}),
            ("/v1/completions", {"prompt": "Hello"}),
            ("/v1/completions", {"prompt": "Hello", "echo": True, "logprobs": 2, "max_tokens": 0}),
            ("/v1/completions", {"prompt": "Hello", "stream": True}),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 4}),
            ("/v1/responses", {"input": "Hello"}),
            ("/completion", {"prompt": "Hello"}),
            ("/api/generate", {"prompt": "Hello", "stream": False}),
        ],
        4,
    ),
)
def test_it_is_said(client: TestClient, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]) -> None:
    with caplog.at_level(logging.ERROR):
        answer = client.post(path, json={"model": "bad"} | body)
    assert answer.status_code == (200 if body.get("stream") else 500)
    assert SAID in answer.text and "Traceback" not in answer.text
    if not body.get("stream"):
        json.loads(answer.text)
    assert SAID in caplog.text and "Traceback" not in caplog.text
