"""Anthropic's interface, as Anthropic's own client sees it."""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
anthropic = pytest.importorskip("anthropic")
httpx = pytest.importorskip("httpx2")  # the client is built on it

from engine.serving.anthropic.blocks import Blocks, joined  # noqa: E402
from engine.serving.anthropic.conversation import read_messages, read_prompt, read_tools  # noqa: E402
from engine.serving.anthropic.shapes import ending_of, error_event  # noqa: E402
from engine.serving.errors import Refusal  # noqa: E402
from engine.serving.fields import Fields  # noqa: E402
from engine.serving.formats.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning  # noqa: E402
from engine.serving.limits import Limits  # noqa: E402
from engine.serving.streams import sse  # noqa: E402
from engine.text.template.chat import ChatTemplate  # noqa: E402
from tests.tiers import examples  # noqa: E402
from tests.vocabularies import bpe_metadata, made  # noqa: E402

pytestmark = pytest.mark.xdist_group("serving")

HELLO = [{"role": "user", "content": "def add(a, b):"}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    words = ["--port", "0", "--device", "cpu", "-c", "512", "-np", "4", "--chat-template", "chatml", "--no-warmup"]
    command = [sys.executable, "-m", "engine.serve", *words]
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
        process.communicate(timeout=30)


def wait_for(url: str) -> None:
    """The server opens its model before it accepts connections."""
    for _ in range(600):
        try:
            httpx.get(url, timeout=30)
            return
        except httpx.ConnectError:
            time.sleep(0.05)
    pytest.fail("the server accepts no connection")


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: Any, messages: Any = HELLO, **more: Any) -> Any:
    body = {**GREEDY, **more.pop("extra_body", {})}
    return client.messages.create(**{"model": "", "max_tokens": 8, "messages": messages, "extra_body": body, **more})


def total(usage: Any) -> int:
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


# --- against a server ----------------------------------------------------------------------------------------------


def test_whole(client: Any, url: str) -> None:
    system = "You write Python."
    answer = ask(client, system=system)
    messages = [{"role": "system", "content": system}, *HELLO]
    other = httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, "max_tokens": 8, **GREEDY}).json()
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
    response = httpx.post(f"{url}/v1/messages?beta=true", json=body, headers={"anthropic-beta": "anything-2030-01-01"})
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


WEATHER = {"name": "weather", "description": "Tells it", "input_schema": {"type": "object", "properties": {}}}
CONVERSATION = [
    {"role": "user", "content": [{"type": "text", "text": "How is it?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I must look.", "signature": "x"},
            {"type": "redacted_thinking", "data": "y"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "Say it."},
            {"type": "text", "text": "Briefly."},
        ],
    },
    {"role": "system", "content": "100 tokens are left."},
]
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b3;"}
SYSTEM = [
    BILLING,
    {"type": "text", "text": "You are", "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": "kind."},
]


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
        ({"tool_choice": {"type": "any"}}, "invalid_request_error", "tool_choice.type must be"),
        ({"tools": [{"name": "f"}]}, "invalid_request_error", r"tools\[0\].input_schema is missing"),
        ({"thinking": {"type": "maybe"}}, "invalid_request_error", "thinking.type must be"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "invalid_request_error", "prompt is too long: "),
        ({"model": "claude"}, "not_found_error", "there is no model 'claude'"),
    ],
)
def test_errors(client: Any, more: Any, kind: str, words: str) -> None:
    with pytest.raises(anthropic.APIStatusError, match=words) as caught:
        ask(client, **{"messages": HELLO, **more})
    error = caught.value
    assert error.body["type"] == "error" and error.body["error"]["type"] == kind
    assert error.body["request_id"] == error.request_id
    assert error.status_code == (404 if kind == "not_found_error" else 400)


# --- messages ------------------------------------------------------------------------------------------------------


def test_messages_become_those_of_openai() -> None:
    call = {"type": "function", "id": "t1", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
    assert read_messages(Fields({"system": SYSTEM, "messages": CONVERSATION}), Limits()) == [
        {"role": "system", "content": "You are\nkind."},
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "I must look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "sunny", "name": "weather"},
        {"role": "user", "content": "Say it.\nBriefly."},
        {"role": "system", "content": "100 tokens are left."},
    ]


def test_tools_become_those_of_openai() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    body: dict[str, Any] = {"tools": [search, WEATHER | {"type": "custom"}]}
    function = {"name": "weather", "description": "Tells it", "parameters": WEATHER["input_schema"]}
    assert read_tools(Fields(body), Limits()) == [{"type": "function", "function": function}]
    assert read_tools(Fields(body | {"tool_choice": {"type": "none"}}), Limits()) == []


TEMPLATE = """{%- for m in messages -%}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("System message must be at the beginning.") }}{% endif -%}
{{ m.role }}:{{ m.content }};
{%- endfor -%}
{{ "think" if enable_thinking else "no" }}"""


def rendered(body: dict[str, Any]) -> str:
    tokenizer = made(bpe_metadata(["a b"]))
    llm: Any = SimpleNamespace(chat_template=ChatTemplate.from_source(TEMPLATE, tokenizer), tokenizer=tokenizer)
    prompt = asyncio.run(read_prompt(Fields(body), llm, Limits()))
    return tokenizer.decode(prompt.ids)


def test_system_message_that_the_template_refuses_stays_in_its_place() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    assert rendered({"system": "s", "messages": messages}) == "system:s;user:a;user:b;user:c;no"


@pytest.mark.parametrize(
    ("thinking", "expected"), [("enabled", "think"), ("adaptive", "think"), ("disabled", "no"), (None, "no")]
)
def test_thinking(thinking: str | None, expected: str) -> None:
    more = {} if thinking is None else {"thinking": {"type": thinking, "budget_tokens": 1024}}
    assert rendered({"messages": [{"role": "user", "content": "a"}], **more}) == f"user:a;{expected}"


# --- blocks --------------------------------------------------------------------------------------------------------

EVENTS: list[Event] = [
    *(Reasoning("I "), Reasoning("must look."), Content("I "), Content("look.")),
    *(CallBegin(0, "weather"), CallArguments(0, '{"city":'), CallArguments(0, '"Bern"}'), CallEnd(0)),
    *(CallBegin(1, "now"), CallArguments(1, "{}"), CallEnd(1), Reasoning("Done.")),
]


def received(frames: str) -> Any:
    """What the client makes of a stream."""
    response = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=frames.encode())
    http_client = anthropic.DefaultHttpxClient(transport=httpx.MockTransport(lambda request: response))
    client = anthropic.Anthropic(base_url="http://localhost", api_key="none", max_retries=0, http_client=http_client)
    with client.messages.stream(model="", max_tokens=1, messages=HELLO) as stream:
        return stream.get_final_message()


START = sse(
    {
        "type": "message_start",
        "message": {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "",
            "content": [],
            "usage": {"input_tokens": 1, "output_tokens": 1},
        },
    },
    "message_start",
)


def test_blocks_as_the_client_reads_them() -> None:
    blocks = Blocks("toolu_")
    written = [message for event in EVENTS for message in blocks.feed([event])] + blocks.end()
    end = sse({"type": "message_stop"}, "message_stop")
    message = received(START + "".join(sse(each, each["type"]) for each in written) + end)
    thought, text, first, second, last = message.content
    assert (thought.type, thought.thinking) == ("thinking", "I must look.") and thought.signature
    assert (text.type, text.text) == ("text", "I look.")
    assert (first.type, first.name, first.input) == ("tool_use", "weather", {"city": "Bern"})
    assert (second.type, second.name, second.input) == ("tool_use", "now", {})
    assert (last.type, last.thinking) == ("thinking", "Done.") and last.signature not in ("", thought.signature)
    assert first.id != second.id
    whole = joined(written)
    for block, own in zip(message.content, whole, strict=True):
        assert {name: block.to_dict()[name] for name in own} == own
    # The client sends them back with its next request.
    fields = Fields({"messages": [{"role": "assistant", "content": whole}, {"role": "user", "content": "a"}]})
    answer = read_messages(fields, Limits())[0]
    assert answer["reasoning_content"] == "I must look.Done." and answer["content"] == "I look."
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [{"city": "Bern"}, {}]


def test_error_in_a_stream() -> None:
    with pytest.raises(anthropic.APIStatusError, match="the server ends") as caught:
        received(START + error_event(Refusal("the server ends.", 503), "r1"))
    assert caught.value.body["error"]["type"] == "overloaded_error"


PIECES = st.lists(st.sampled_from(["a", " ", "\n", "é", '{"', "👍"]), min_size=1, max_size=3)


@examples(60)
@given(st.lists(st.tuples(st.sampled_from(["text", "thinking", "tool_use"]), PIECES), max_size=6))
def test_blocks_of_any_answer(parts: list[tuple[str, list[str]]]) -> None:
    events: list[Event] = []
    expected: list[tuple[str, Any]] = []
    n_calls = 0
    for kind, pieces in parts:
        if kind == "tool_use":
            text = json.dumps({"a": "".join(pieces)})
            events += [CallBegin(n_calls, "f"), *(CallArguments(n_calls, c) for c in text), CallEnd(n_calls)]
            expected.append((kind, json.loads(text)))
            n_calls += 1
            continue
        events += [Content(piece) if kind == "text" else Reasoning(piece) for piece in pieces]
        before = expected.pop()[1] if expected and expected[-1][0] == kind else ""
        expected.append((kind, before + "".join(pieces)))
    blocks = Blocks("toolu_")
    written = blocks.feed(events) + blocks.end()
    found = joined(written)
    assert [(each["type"], each["input" if each["type"] == "tool_use" else each["type"]]) for each in found] == expected
    # A block ends before the next one begins.
    spans = [(each["type"], each["index"]) for each in written if not each["type"].endswith("delta")]
    both = ("content_block_start", "content_block_stop")
    assert spans == [(kind, index) for index in range(len(expected)) for kind in both]


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("stop", "", "end_turn"),
        ("stop", "END", "stop_sequence"),
        ("length", "", "max_tokens"),
        ("tool_calls", "", "tool_use"),
        ("tool_calls", "END", "tool_use"),
    ],
)
def test_stop_reasons(reason: str, stop: str, expected: str) -> None:
    answer: Any = SimpleNamespace(finish_reason=reason, stop_text=stop)
    assert ending_of(answer) == {
        "stop_reason": expected,
        "stop_sequence": stop if expected == "stop_sequence" else None,
    }
