"""Anthropic's interface of a server, as Anthropic's own client sees it."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.anthropic_requests import CONVERSATION, HELLO, SYSTEM, WEATHER
from tests.serving.conftest import WAIT_SECONDS

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
anthropic = pytest.importorskip("anthropic")
httpx = pytest.importorskip("httpx2")  # the client is built on it

pytestmark = pytest.mark.together("serving")

GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    words = ["--port", "0", "--device", "cpu", "-c", "512", "-np", "4", "--chat-template", "chatml", "--no-warmup"]
    command = [sys.executable, "-m", "engine.serve", "-m", "pycoder", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "the server ended"
            found = re.search(r"listening on (http://127\.0\.0\.1:\d+)", line)
        wait_for(found[1])
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=WAIT_SECONDS)


def wait_for(url: str) -> None:
    """The server opens its model, which may compile kernels, before it accepts connections."""
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            httpx.get(url, timeout=WAIT_SECONDS)
            return
        except httpx.ConnectError:
            assert time.monotonic() < end, "the server accepts no connection"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: Any, messages: Any = HELLO, **more: Any) -> Any:
    body = {**GREEDY, **more.pop("extra_body", {})}
    return client.messages.create(**{"model": "", "max_tokens": 8, "messages": messages, "extra_body": body, **more})


def total(usage: Any) -> int:
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def test_whole(client: Any, url: str) -> None:
    system = "You write Python."
    answer = ask(client, system=system)
    messages = [{"role": "system", "content": system}, *HELLO]
    other = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 8, **GREEDY}, timeout=WAIT_SECONDS
    ).json()
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == other["choices"][0]["message"]["content"]
    assert answer.model == other["model"] and answer.role == "assistant" and answer.type == "message"
    assert answer.stop_reason == "max_tokens" and answer.stop_sequence is None
    assert answer.usage.output_tokens == 8 and total(answer.usage) == other["usage"]["prompt_tokens"]
    assert answer._request_id


def test_cached_tokens_are_counted_apart(client: Any) -> None:
    messages = [{"role": "user", "content": "class Stack: # a stack of numbers"}]
    first, second = ask(client, messages), ask(client, messages)
    assert total(first.usage) == total(second.usage)
    assert second.usage.cache_read_input_tokens > first.usage.cache_read_input_tokens
    assert second.usage.input_tokens >= 1
    assert first.content == second.content


def test_stream(client: Any) -> None:
    whole = ask(client)
    with client.messages.stream(model="", max_tokens=8, messages=HELLO, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1 and "".join(pieces) == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert total(final.usage) == total(whole.usage) and final.usage.output_tokens == whole.usage.output_tokens


def test_events_of_a_stream(url: str) -> None:
    body = {"max_tokens": 3, "stream": True, "messages": HELLO, **GREEDY}
    response = httpx.post(
        f"{url}/v1/messages?beta=true",
        json=body,
        headers={"anthropic-beta": "anything-2030-01-01"},
        timeout=WAIT_SECONDS,
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"] == response.headers["x-request-id"]
    frames = [frame.split("\n") for frame in response.text.strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in frames]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert names == [event["type"] for event in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert {event["index"] for event in events if "index" in event} == {0}
    assert events[-2]["usage"]["output_tokens"] == 3


def test_stop_sequence(client: Any) -> None:
    text = ask(client).content[0].text
    stop = text[len(text) // 2 :][:3]
    answer = ask(client, stop_sequences=["never said", stop])
    assert answer.content[0].text == text[: text.index(stop)]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


def test_beginning_of_the_answer(client: Any) -> None:
    text = ask(client).content[0].text
    answer = ask(client, [*HELLO, {"role": "assistant", "content": text[:4]}], max_tokens=1)
    assert total(answer.usage) > total(ask(client, max_tokens=1).usage)
    assert answer.usage.output_tokens == 1


def test_no_token(client: Any) -> None:
    answer = ask(client, max_tokens=0)
    assert answer.content == [] and answer.usage.output_tokens == 0 and answer.stop_reason == "max_tokens"


def test_count_tokens(client: Any) -> None:
    given: dict[str, Any] = {"system": SYSTEM, "tools": [WEATHER], "thinking": {"type": "adaptive"}}
    answer = ask(client, CONVERSATION, tool_choice={"type": "auto"}, metadata={"user_id": "me"}, **given)
    counted = client.messages.count_tokens(model="", messages=CONVERSATION, **given)
    assert counted.input_tokens == total(answer.usage)
    without = client.messages.count_tokens(model="", messages=CONVERSATION, **{**given, "system": SYSTEM[1:]})
    assert without.input_tokens == counted.input_tokens
    shorter = client.messages.count_tokens(model="", messages=CONVERSATION, **{**given, "system": SYSTEM[2:]})
    assert shorter.input_tokens < counted.input_tokens


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"extra_body": {"max_tokens": None}}, "invalid_request_error", "max_tokens is missing"),
        ({"max_tokens": -1}, "invalid_request_error", "max_tokens must be a whole number"),
        ({"extra_body": {"temperature": 1.5}}, "invalid_request_error", "temperature must be a number, 0 to 1"),
        ({"messages": []}, "invalid_request_error", "messages is empty"),
        ({"messages": [{"role": "tool", "content": ""}]}, "invalid_request_error", r"messages\[0\].role must be"),
        ({"messages": CONVERSATION[:2]}, "invalid_request_error", "ends with calls of tools"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "invalid_request_error",
            r"messages\[0\].content\[0\].type is 'image'",
        ),
        (
            {"tool_choice": {"type": "any"}},
            "invalid_request_error",
            "tool_choice forces a call, and there are no functions",
        ),
        ({"tools": [{"name": "f"}]}, "invalid_request_error", r"tools\[0\].input_schema is missing"),
        ({"thinking": {"type": "maybe"}}, "invalid_request_error", "thinking.type must be"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "invalid_request_error", "prompt is too long: "),
    ],
)
def test_errors(client: Any, more: Any, kind: str, words: str) -> None:
    with pytest.raises(anthropic.APIStatusError, match=words) as caught:
        ask(client, **{"messages": HELLO, **more})
    error = caught.value
    assert error.body["type"] == "error" and error.body["error"]["type"] == kind
    assert error.body["request_id"] == error.request_id
    assert error.status_code == 400
