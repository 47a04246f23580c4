"""Answers that follow a schema, over HTTP: the same with drafts and without, alone and at the same time."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine.speculative.params import SpeculationParams

pytest.importorskip("starlette")
pytest.importorskip("httpx")
pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")
import jsonschema
from starlette.testclient import TestClient

from engine.grammar.grammar import Grammar
from engine.grammar.tokens import Tokens
from engine.serving.app import app
from engine.serving.limits import Limits
from engine.serving.served import Spec
from tests.serving.bundled import bundled

pytestmark = pytest.mark.together("serving")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "sub"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
HELLO = {"messages": [{"role": "user", "content": "def add(a, b):"}], "max_tokens": 40}


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "drafts"])
def client(request: pytest.FixtureRequest) -> Iterator[TestClient]:
    speculation = SpeculationParams(lookup=True) if request.param else SpeculationParams()
    limits = Limits(schema_bytes=2000)
    with TestClient(
        app([Spec("pycoder", bundled, speculation=speculation)], limits=limits), "http://localhost"
    ) as made:
        yield made


TEXTS: dict[int, str] = {}
"""The answer of each seed, which both servers must give."""


def test_answers_follow_the_schema(client: TestClient) -> None:
    def text(seed: int) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "call", "schema": SCHEMA, "strict": True}}
        answer = client.post("/v1/chat/completions", json=HELLO | {"seed": seed, "response_format": form}).json()
        assert answer["choices"][0]["finish_reason"] == "stop", answer
        return str(answer["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(4) as pool:
        for seed, found in enumerate(pool.map(text, range(6))):
            jsonschema.validate(json.loads(found), SCHEMA)
            assert TEXTS.setdefault(seed, found) == found


def test_an_object_and_an_expression(client: TestClient) -> None:
    form: dict[str, Any] = {"type": "regex", "pattern": "(yes|no)!"}
    answer = client.post("/v1/chat/completions", json=HELLO | {"response_format": form}).json()
    assert answer["choices"][0]["message"]["content"] in ("yes!", "no!")


def test_others_are_answered_while_a_grammar_is_compiled(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, answered = threading.Event(), threading.Event()
    compiled = Tokens.matcher

    def matcher(tokens: Tokens, grammar: Grammar) -> Any:
        compiling.set()
        assert answered.wait(30), "another request waits"
        return compiled(tokens, grammar)

    monkeypatch.setattr(Tokens, "matcher", matcher)
    form = {"type": "regex", "pattern": "(yes|no)!"}
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.post, "/v1/chat/completions", json=HELLO | {"response_format": form, "n": 2})
        assert compiling.wait(30)
        assert client.post("/v1/chat/completions", json=HELLO | {"max_tokens": 1}).status_code == 200
        answered.set()
        choices = slow.result().json()["choices"]
    assert [choice["message"]["content"] in ("yes!", "no!") for choice in choices] == [True, True]


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json"}, "response_format.type"),
        ({}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "zebra"}}}, "response_format.json_schema.schema"),
        ({"type": "regex", "pattern": "("}, "response_format.pattern"),
        ({"type": "regex", "pattern": "a" * 3000}, "response_format.pattern"),
        ({"type": "regex", "pattern": "a\ud83d"}, "response_format.pattern"),
        ({"type": "grammar", "grammar": "start: (((("}, "response_format.grammar"),
    ],
)
def test_a_refusal_names_the_field(client: TestClient, form: dict[str, Any], param: str) -> None:
    body = json.dumps(HELLO | {"response_format": form})
    answer = client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param, answer.text
