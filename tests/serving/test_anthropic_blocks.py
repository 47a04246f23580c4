"""What Anthropic's interface makes of messages, and of answers with thoughts and calls."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")
anthropic = pytest.importorskip("anthropic")
httpx = pytest.importorskip("httpx2")  # the client is built on it

from engine.serving.anthropic.blocks import Blocks, joined  # noqa: E402
from engine.serving.anthropic.conversation import read_messages, read_prompt, read_tool_choice  # noqa: E402
from engine.serving.anthropic.shapes import ending_of, error_event  # noqa: E402
from engine.serving.errors import Refusal  # noqa: E402
from engine.serving.fields import Fields  # noqa: E402
from engine.serving.limits import Limits  # noqa: E402
from engine.serving.streams import sse  # noqa: E402
from engine.text.template.chat import ChatTemplate  # noqa: E402
from engine.tools.choice import ToolChoice  # noqa: E402
from engine.tools.formats.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning  # noqa: E402
from tests.serving.anthropic_requests import CONVERSATION, HELLO, SYSTEM, WEATHER  # noqa: E402
from tests.tiers import examples  # noqa: E402
from tests.vocabularies import bpe_metadata, made  # noqa: E402

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
    choice = read_tool_choice(Fields(body), Limits())
    assert choice.tools == [{"type": "function", "function": function}] and not choice.ruled
    assert read_tool_choice(Fields(body | {"tool_choice": {"type": "none"}}), Limits()).tools == []


def test_what_anthropic_says_about_calls() -> None:
    tools = [WEATHER | {"strict": True}, WEATHER | {"name": "now"}]

    def read(**choice: Any) -> ToolChoice:
        return read_tool_choice(Fields({"tools": tools, "tool_choice": choice}), Limits())

    assert read(type="auto") == ToolChoice(read(type="any").tools, ["weather", "now"], strict=["weather"])
    assert read(type="auto").ruled and not read(type="none").ruled
    one = read(type="any", disable_parallel_tool_use=True)
    assert one.forced and not one.several and not one.named and read(type="any").several
    named = read(type="tool", name="now")
    assert (named.names, named.forced, named.named, named.several) == (["now"], True, True, False)
    assert [tool["function"]["name"] for tool in named.tools] == ["weather", "now"]
    for choice in ({"type": "tool"}, {"type": "tool", "name": "later"}, {}, {"type": "required"}):
        with pytest.raises(Refusal, match="tool_choice"):
            read(**choice)


TEMPLATE = """{%- for m in messages -%}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("System message must be at the beginning.") }}{% endif -%}
{{ m.role }}:{{ m.content }};
{%- endfor -%}
{{ "think" if enable_thinking else "no" }}"""


def rendered(body: dict[str, Any]) -> str:
    tokenizer = made(bpe_metadata(["a b"]))
    llm: Any = SimpleNamespace(chat_template=ChatTemplate.from_source(TEMPLATE, tokenizer), tokenizer=tokenizer)
    fields = Fields(body)
    prompt = asyncio.run(read_prompt(fields, llm, Limits(), read_tool_choice(fields, Limits())))
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
    blocks = Blocks("toolu_{}".format)
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", {}),
        ('{"a": "x', {}),
        ('{"a": "x"', {"a": "x"}),
        ('{"a": "x", "b": [1, {"c"', {"a": "x"}),
        ('{"a": {"b": 1}, "c": 12', {"a": {"b": 1}, "c": 12}),
    ],
)
def test_the_input_of_a_call_that_is_cut_off_has_its_whole_members(text: str, expected: Any) -> None:
    blocks = Blocks("toolu_{}".format)
    written = blocks.feed([CallBegin(0, "f"), CallArguments(0, text)]) + blocks.end()
    assert "".join(each["delta"]["partial_json"] for each in written if each["type"].endswith("delta")) == text
    (block,) = joined(written)
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "f", expected)


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
    blocks = Blocks("toolu_{}".format)
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
