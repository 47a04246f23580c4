"""Traces over HTTP."""

from typing import Any

import pytest

from engine import LLM

httpx = pytest.importorskip("httpx")

pytestmark = pytest.mark.together("serving")

TEXT = "def add(a, b):\n    return"
CHAT = {"messages": [{"role": "user", "content": TEXT}]}


def ask(server: str, route: str, body: dict[str, Any]) -> tuple[int, Any]:
    found = httpx.post(f"{server}/v1/{route}", json=body, timeout=300)
    return found.status_code, found.json()


def test_a_text_is_traced(server: str, llm: LLM) -> None:
    ids = llm.tokenize(TEXT)
    for body in ({"input": TEXT}, {"input": ids}):
        status, found = ask(server, "trace", body | {"top_logprobs": 3, "token": -2, "drafts": 1})
        assert status == 200
        assert found.pop("model") == "pycoder" and found.pop("system_fingerprint").startswith("fp_")
        assert found == llm.trace(ids, token=-2, top=3, drafts=1).as_json(3)


def test_a_token_of_an_answer_is_traced(server: str) -> None:
    """What the last layer says after the tokens before one is what the answer reports of that one."""
    options = {"max_tokens": 6, "seed": 4, "logprobs": True, "top_logprobs": 4}
    answer = ask(server, "chat/completions", CHAT | options)[1]["choices"][0]
    tokens = answer["logprobs"]["content"]
    for at in (0, len(tokens) - 1):
        before = [token["id"] for token in tokens[:at]]
        status, found = ask(server, "trace", CHAT | options | {"answer": before})
        assert status == 200
        said = [(each["id"], each["logprob"]) for each in found["layers"][-1]["lens"]]
        assert said == [(each["id"], each["logprob"]) for each in tokens[at]["top_logprobs"]]
        assert [token["id"] for token in found["tokens"]][len(found["tokens"]) - at :] == before


def test_bad_requests_name_the_field(server: str) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "input"),
        ({"input": ["a", "b"]}, "input"),
        (CHAT | {"input": "a"}, "input"),
        ({"input": "a", "token": 9}, "token"),
        ({"input": "a", "answer": [-1]}, "answer"),
        ({"input": "a", "answer": "b"}, "answer"),
        ({"input": "a", "top_logprobs": 0}, "top_logprobs"),
        ({"input": "a", "drafts": 99}, "drafts"),
        ({"input": "a", "n_predict": 2, "echo": True}, "echo"),
    ]
    for body, word in wrong:
        status, found = ask(server, "trace", body)
        assert status == 400 and word in found["error"]["message"], body
