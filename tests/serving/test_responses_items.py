"""Items: what becomes of those of a conversation, and which ones an answer becomes."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from engine.serving.answer import Delta
from engine.serving.conversation import prompt_of
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.serving.responses.conversation import read_messages
from engine.serving.responses.items import Items
from engine.serving.responses.sealed import opened, sealed
from engine.text.template.chat import ChatTemplate
from engine.tools.formats.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from tests.serving.responses_events import check
from tests.tiers import examples
from tests.vocabularies import bpe_metadata, made

# --- conversations -------------------------------------------------------------------------------------------------

THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Short."}]}
TEXT = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
CALL = {"type": "function_call", "id": "fc_1", "name": "weather", "status": "completed"}


def read(text: str) -> Any:
    return {"type": "input_text", "text": text}


def said(text: str) -> Any:
    return TEXT | {"content": [{"type": "output_text", "text": text, "annotations": []}]}


def test_items_become_the_messages_of_a_chat() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [read("How "), read("is it?")]},
        THOUGHT | {"content": [{"type": "reasoning_text", "text": "I must look."}]},
        said("I look."),
        CALL | {"call_id": "c1", "arguments": '{"city": "Bern"}'},
        said("Twice."),
        THOUGHT | {"content": [{"type": "reasoning_text", "text": "Where"}, {"type": "reasoning_text", "text": "?"}]},
        CALL | {"call_id": "c2", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c2", "output": [read("rain")]},
        {"type": "function_call_output", "name": "goal", "namespace": "agent", "output": "Find out."},
        THOUGHT | {"encrypted_content": sealed("Both, é."), "content": []},
        said("Mixed."),
        said("Really."),
        THOUGHT | {"encrypted_content": "gAAAA-of-another-service"},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "Welcome."},
    ]  # fmt: skip
    assert read_messages(Fields({"instructions": "You help.", "input": items}), Limits()) == [
        {"role": "system", "content": "You help."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
        {
            "role": "assistant",
            "content": "I look.\nTwice.",
            "reasoning_content": "I must look.\nWhere?",
            "tool_calls": [
                {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Bern"}}},
                {"type": "function", "id": "c2", "function": {"name": "weather", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny", "name": "weather"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain", "name": "weather"},
        {"role": "user", "content": "goal: Find out."},
        {"role": "assistant", "content": "Mixed.", "reasoning_content": "Both, é."},
        {"role": "assistant", "content": "Really."},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": "Welcome."},
    ]


STRICT = """{%- for m in messages -%}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("A system message is the first.") }}{% endif -%}
{{ m.role }}:{{ m.content }};
{%- endfor -%}"""


@pytest.mark.parametrize("instructions", ["You help.", None])
def test_system_messages_that_a_template_refuses(instructions: str | None) -> None:
    tokenizer = made(bpe_metadata(["a b"]))
    llm: Any = SimpleNamespace(chat_template=ChatTemplate.from_source(STRICT, tokenizer), tokenizer=tokenizer)
    items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    items = [*items, {"role": "developer", "content": "Now."}]
    messages = read_messages(Fields({"instructions": instructions, "input": items}), Limits())
    prompt = prompt_of(llm, messages)
    first = "You help.\n\nBe brief." if instructions else "Be brief."
    assert tokenizer.decode(prompt.ids) == f"system:{first};user:Hi.;user:Now.;"


@pytest.mark.parametrize("content", ["", "bitmirror:", "bitmirror:a", "bitmirror:é", "bitmirror:/w==", "another"])
def test_what_was_not_sealed_here_is_no_thought(content: str) -> None:
    assert opened(content) == ""


# --- items -----------------------------------------------------------------------------------------------------------

PIECES = st.lists(st.sampled_from(["a", " ", "\n", "é", '{"', "👍"]), min_size=1, max_size=3)


@examples(60)
@example([("reasoning", ["a"])], "stop")
@given(
    st.lists(st.tuples(st.sampled_from(["message", "reasoning", "function_call"]), PIECES), max_size=6),
    st.sampled_from(["stop", "length"]),
)
def test_items_of_any_answer(parts: list[tuple[str, list[str]]], reason: str) -> None:
    events: list[Event] = []
    expected: list[tuple[str, Any]] = []
    n_calls = 0
    for kind, pieces in parts:
        if kind == "function_call":
            text = json.dumps({"a": "".join(pieces)})
            events += [CallBegin(n_calls, "f"), *(CallArguments(n_calls, c) for c in text), CallEnd(n_calls)]
            expected.append((kind, text))
            n_calls += 1
            continue
        events += [Content(piece) if kind == "message" else Reasoning(piece) for piece in pieces]
        before = expected.pop()[1] if expected and expected[-1][0] == kind else ""
        expected.append((kind, before + "".join(pieces)))
    if reason == "stop" and not [kind for kind, _ in expected if kind != "reasoning"]:
        expected.append(("message", ""))
    answer: Any = SimpleNamespace(call_id="call_{}".format)
    output: list[dict[str, Any]] = []
    items = Items(answer, "1", output, lambda tokens: [], False)
    written = [message for event in events for message in items.delta(Delta([event], [], []))]
    written += items.delta(Delta([], [], [], reason))
    found = [
        (each["type"], each["arguments"] if each["type"] == "function_call" else each["content"][0]["text"])
        for each in output
    ]
    assert found == expected
    # As the client has them.
    check([json.loads(json.dumps(each), object_hook=lambda found: SimpleNamespace(**found)) for each in written])


def test_log_probabilities_of_a_text_are_those_of_its_tokens() -> None:
    def token(text: bytes) -> Any:
        return {"bytes": list(text)}

    output: list[dict[str, Any]] = []
    answer: Any = SimpleNamespace(call_id="call_{}".format)
    described: Any = list
    items = Items(answer, "1", output, described, False)
    half, rest = "👍".encode()[:2], "👍".encode()[2:]
    deltas: Any = [
        *[([Reasoning("I")], b"I"), ([], b"</think>"), ([], b"\n"), ([], half), ([Content("👍")], rest)],
        *[([Content(" a")], b" a\n"), ([Content("\nb")], b"b"), ([], b"\n"), ([Content("\nc")], b"c")],
        *[([], b"<tool_call>"), ([], b"{")],
        *[([CallBegin(0, "f"), CallArguments(0, "{")], b"{"), ([CallArguments(0, "}"), CallEnd(0)], b"}")],
        *[([], b"</tool_call>"), ([Content("d")], b"d")],
    ]
    written = [each for events, text in deltas for each in items.delta(Delta(events, [0], [token(text)]))]
    items.delta(Delta([], [], [], "stop"))
    parts = [item["content"][0] for item in output if item["type"] == "message"]
    assert [part["text"] for part in parts] == ["👍 a\nb\nc", "d"]
    expected = [[half, rest, b" a\n", b"b", b"\n", b"c"], [b"d"]]
    assert [part["logprobs"] for part in parts] == [[token(text) for text in texts] for texts in expected]
    pieces = [each["logprobs"] for each in written if each["type"] == "response.output_text.delta"]
    assert sum(pieces, []) == sum((part["logprobs"] for part in parts), [])
    begun = [each["part"] for each in written if each["type"] == "response.content_part.added"]
    assert [part.get("logprobs") for part in begun] == [None, [], []]
