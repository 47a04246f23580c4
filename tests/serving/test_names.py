"""The name of a model in a request: several models are told apart, and the only one of a server answers to every name."""

from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from engine.serving.app import app
from engine.serving.errors import Refusal
from engine.serving.limits import Limits
from engine.serving.models import Models
from engine.serving.served import Spec

MESSAGES = [{"role": "user", "content": "Hello"}]


def never() -> Any:
    raise AssertionError("no model is opened")


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, "model_not_found"),
        ("/chat/completions", {"messages": MESSAGES}, "model_not_found"),
        ("/v1/completions", {"prompt": "a"}, "model_not_found"),
        ("/v1/responses", {"input": "a"}, "model_not_found"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}, "not_found_error"),
        ("/completion", {"prompt": "a"}, "not_found_error"),
        ("/api/chat", {"messages": MESSAGES}, ""),
        ("/api/generate", {"prompt": "a"}, ""),
        ("/api/show", {}, ""),
    ],
)
def test_one_of_several_models_must_be_named(path: str, body: dict[str, Any], kind: str) -> None:
    """In the words of each interface."""
    client = TestClient(app([Spec("a", never), Spec("b", never)], preload=False), "http://localhost")
    answer = client.post(path, json=body | {"model": "none"})
    assert answer.status_code == 404
    assert "there is no model 'none'; this server has a, b." in answer.text
    assert not kind or kind in (answer.json()["error"].get("code"), answer.json()["error"]["type"])


def test_the_only_model_answers_to_every_name() -> None:
    models = Models([Spec("a", never, aliases=["b"])], Limits(), 1)
    for name in (None, "", "a", "b", "a:latest", "gpt-4o"):
        assert models.find(name).spec.name == "a"
    for name in ("b", "a:latest"):
        assert models.find(name, exact=True).spec.name == "a"
    with pytest.raises(Refusal, match="there is no model 'gpt-4o'"):
        models.find("gpt-4o", exact=True)
