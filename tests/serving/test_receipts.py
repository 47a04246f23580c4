"""Receipts and scores over HTTP."""

import asyncio
import copy
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engine import LLM
from engine.receipts.form import chain_of, problem_of
from engine.serving.answer import Answer, Ask
from engine.serving.driver import Listener, News
from engine.serving.permitted import Permitted
from engine.tools.formats.plain import plain

httpx = pytest.importorskip("httpx")

pytestmark = pytest.mark.together("serving")

CODE = "def add(a, b):\n    return a + b\n"
CHAT = {"messages": [{"role": "user", "content": CODE}]}


@pytest.fixture(scope="module")
def ask(server: str) -> Any:
    """Send a body to a route; returns the status and the object of the answer."""
    with httpx.Client(base_url=server, timeout=300) as client:

        def send(route: str, body: dict[str, Any]) -> tuple[int, Any]:
            found = client.post(f"/v1/{route}", json=body)
            return found.status_code, found.json()

        yield send


def last_of(server: str, route: str, body: dict[str, Any]) -> Any:
    """The receipt in a stream."""
    with httpx.stream("POST", f"{server}/v1/{route}", json=body | {"stream": True}, timeout=300) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    found = [choice["receipt"] for line in lines for choice in json.loads(line)["choices"] if "receipt" in choice]
    assert len(found) == 1
    return found[0]


CASES: dict[str, dict[str, Any]] = {
    "plain": {"seed": 3},
    "stop": {"seed": 3, "stop": ["\n", ")"], "temperature": 0},
    "stop tokens": {"temperature": 0, "stop_token_ids": [*range(200, 1500)]},
    "penalties": {"seed": 4, "repeat_penalty": 1.3, "dry_multiplier": 0.5, "logit_bias": {"20": -100}},
    "schema": {
        "seed": 4,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["ab", "cd"]}}},
    },
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_answers_have_receipts(ask: Any, llm: LLM, route: str, options: dict[str, Any]) -> None:
    body = ({"prompt": CODE} if route == "completions" else CHAT) | {"max_tokens": 16, "receipt": True} | options
    status, answer = ask(route, body)
    assert status == 200
    receipt = answer["choices"][0]["receipt"]
    assert receipt["fingerprint"] == answer["system_fingerprint"]
    assert len(receipt["tokens"]) == answer["usage"]["completion_tokens"]
    assert receipt["finish_reason"] == answer["choices"][0]["finish_reason"]
    found = llm.verify(receipt)
    assert found.problem == ""
    status, answer = ask("verify", {"receipt": receipt})
    assert (status, answer["same"], answer["problem"]) == (200, True, "")


@pytest.mark.parametrize("options", [CASES["plain"], CASES["stop tokens"]], ids=["plain", "stop tokens"])
def test_responses_and_messages_have_the_receipts_of_chats(server: str, ask: Any, options: dict[str, Any]) -> None:
    more = options | {"seed": 3, "receipt": True}
    expected = ask("chat/completions", CHAT | more | {"max_tokens": 16})[1]["choices"][0]["receipt"]
    bodies = {
        "responses": {"input": CODE, "max_output_tokens": 16} | more,
        "messages": CHAT | {"max_tokens": 16} | more,
    }
    for route, body in bodies.items():
        status, answer = ask(route, body)
        assert status == 200
        assert answer["receipt"] == expected
        assert len(expected["tokens"]) == answer["usage"]["output_tokens"]
        with httpx.stream("POST", f"{server}/v1/{route}", json=body | {"stream": True}, timeout=300) as stream:
            lines = [
                json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data: {")
            ]
        events = {line["type"]: line for line in lines}
        ended = events["message_delta"] if route == "messages" else lines[-1]["response"]
        assert ended["receipt"] == expected


def test_what_was_computed_after_the_end_does_not_count(llm: LLM) -> None:
    """A token that the request names ends an answer, and the model has ended it, too, before this is noticed."""

    class Ahead:
        """A driver whose tokens are all there at once."""

        def submit(self, listener: Listener) -> None:
            listener.receive(News(listener, [70, 71], True, None))

    ask = Ask(llm.tokenize(CODE), plain, permitted=Permitted(ends=frozenset([71])))
    generation = llm.generate(CODE, max_tokens=2, seed=1)
    generation.finish_reason = "stop"

    async def read() -> Answer:
        answer = Answer(llm, Ahead(), ask, 0, generation, 9)  # type: ignore[arg-type]
        async for _ in answer:
            pass
        return answer

    answer = asyncio.run(read())
    assert (answer.finish_reason, answer.n_completion) == ("stop", 2)
    ask.permitted = Permitted()
    answer = asyncio.run(read())
    assert (answer.finish_reason, answer.n_completion) == ("stop", 3)  # with the one of the model, which has no text


def test_company_and_streams_do_not_show(server: str, ask: Any) -> None:
    bodies = [{"prompt": CODE, "max_tokens": 24, "seed": i, "receipt": True} for i in range(6)]
    alone = [ask("completions", body)[1]["choices"][0]["receipt"] for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        streamed = pool.map(lambda body: last_of(server, "completions", body), bodies)
        replayed = pool.map(lambda receipt: httpx.post(f"{server}/v1/verify", json={"receipt": receipt}).json(), alone)
        assert list(streamed) == alone
        assert all(each["same"] for each in replayed)


def test_what_was_changed_is_found(ask: Any) -> None:
    receipt = ask("completions", {"prompt": CODE, "max_tokens": 8, "seed": 1, "ignore_eos": True, "receipt": True})[1][
        "choices"
    ][0]["receipt"]
    changed = copy.deepcopy(receipt)
    changed["tokens"][3] ^= 1
    assert ask("verify", {"receipt": changed})[1]["problem"] == problem_of(changed) != ""
    changed["chain"] = chain_of(changed)
    status, answer = ask("verify", {"receipt": changed})
    assert (status, answer["same"], answer["token"]) == (200, False, 3)


def test_what_has_no_receipt_is_refused(ask: Any) -> None:
    for route, body, word in [
        ("completions", {"prompt": "x", "receipt": True, "min_tokens": 2}, "min_tokens"),
        ("messages", CHAT | {"max_tokens": 2, "min_tokens": 2, "receipt": True}, "min_tokens"),
        ("verify", {"receipt": 3}, "must be an object"),
        ("verify", {}, "receipt"),
    ]:
        status, answer = ask(route, body)
        assert status == 400
        assert word in answer["error"]["message"]
    assert ask("verify", {"receipt": {}})[1]["problem"].endswith("this is no receipt.")


def test_texts_are_scored(ask: Any, llm: LLM) -> None:
    texts = [CODE, "import numpy as np\n" * 5, "x"]
    status, answer = ask("score", {"input": texts, "top_logprobs": 2})
    assert status == 200
    for text, found in zip(texts, answer["data"], strict=True):
        expected = llm.score(text, logprobs=2)
        assert found["tokens"] == llm.tokenize(text)
        assert found["token_logprobs"] == [None, *(entry.logprob for entry in expected)]
        assert [[each["logprob"] for each in top] for top in found["top_logprobs"][1:]] == [
            [each.logprob for each in entry.top] for entry in expected
        ]
    echoed = ask("completions", {"prompt": CODE, "echo": True, "logprobs": 0, "max_tokens": 0})[1]
    assert answer["data"][0]["token_logprobs"] == echoed["choices"][0]["logprobs"]["token_logprobs"]
    assert ask("score", {"text_1": "a", "text_2": "b"})[0] == 400
    assert ask("score", {"input": "a", "stream": True})[0] == 400
