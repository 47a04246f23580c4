"""OpenAI's Responses of a server, as OpenAI's own client sees them."""

import json
import sys
from typing import Any, Literal

import pytest

from engine import LLM
from tests.serving.conftest import WAIT_SECONDS

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")  # the client is built on it
pytest.importorskip("pydantic")  # the client depends on it
from pydantic import BaseModel  # noqa: E402

pytestmark = pytest.mark.together("serving")

HELLO = "def add(a, b):"
CHAT: Any = [{"role": "user", "content": HELLO}]


@pytest.fixture(scope="module")
def client(server: str) -> Any:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def create(client: Any, **more: Any) -> Any:
    body = {"seed": 5, **more.pop("extra_body", {})}
    return client.responses.create(**{"model": "", "input": HELLO, "max_output_tokens": 8, "extra_body": body, **more})


def chat(client: Any, messages: Any = CHAT, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "", "messages": messages, "max_tokens": 8, "seed": 5, **more})


# --- answers -------------------------------------------------------------------------------------------------------


def test_the_answer_is_that_of_chat_and_of_the_model(client: Any, llm: LLM) -> None:
    answer = create(client, temperature=0.7, top_p=0.9)
    other = chat(client, temperature=0.7, top_p=0.9)
    expected = llm.chat(
        CHAT, max_tokens=8, temperature=0.7, top_p=0.9, top_k=0, min_p=0, seed=5, chat_template="chatml"
    )
    assert answer.output_text == other.choices[0].message.content == expected.text
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(expected.prompt_ids), 8)
    assert answer.usage.total_tokens == other.usage.total_tokens
    assert 0 <= answer.usage.input_tokens_details.cached_tokens < answer.usage.input_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.object, answer.model, answer.error) == ("response", other.model, None)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.7, 0.9, 8)


def test_a_response_has_the_fields_of_the_clients_types(client: Any) -> None:
    answer = create(client, tools=TOOLS, metadata={"a": "b"}, store=True, user="me", include=LOGPROBS)
    # The client itself believes every field; pydantic does not.
    strict = openai.types.responses.Response.model_validate_json(json.dumps(answer.to_dict()), strict=True)
    assert (strict.metadata, strict.user, strict.store) == ({"a": "b"}, "me", False)
    assert strict.tools[0].to_dict() == TOOLS[0]
    assert (strict.tool_choice, strict.parallel_tool_calls, strict.truncation) == ("auto", True, "disabled")
    assert (strict.background, strict.previous_response_id, strict.instructions) == (False, None, None)


TOOLS: Any = [
    {
        "type": "function",
        "name": "weather",
        "description": "Tells it",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    }
]
LOGPROBS: Any = ["message.output_text.logprobs"]


def test_the_end_of_an_answer(client: Any) -> None:
    answer = create(client, text={"format": {"type": "regex", "pattern": "yes|no"}})
    assert answer.output_text in ("yes", "no")
    assert (answer.status, answer.incomplete_details, answer.output[0].status) == ("completed", None, "completed")
    assert answer.completed_at >= answer.created_at
    assert answer.text.format.type == "regex"


def test_an_answer_of_no_token_has_an_empty_message(client: Any, llm: LLM) -> None:
    answer = create(client, extra_body={"logit_bias": {str(min(llm.tokenizer.eog_ids)): 100}})
    assert (answer.status, answer.output_text, answer.output[0].type) == ("completed", "", "message")
    assert create(client, max_output_tokens=0).output == []


def test_log_probabilities_are_those_of_chat(client: Any) -> None:
    answer = create(client, include=LOGPROBS, top_logprobs=2)
    other = chat(client, logprobs=True, top_logprobs=2)
    found = [token.to_dict() for token in answer.output[0].content[0].logprobs]
    assert found == [token.to_dict() for token in other.choices[0].logprobs.content]
    assert answer.top_logprobs == 2
    with create_stream(client, include=LOGPROBS, top_logprobs=2) as stream:
        events = list(stream)
    streamed = [token.to_dict() for each in events if each.type.endswith("text.delta") for token in each.logprobs]
    assert (
        streamed
        == found
        == [token.to_dict() for each in events if each.type.endswith("text.done") for token in each.logprobs]
    )


def create_stream(client: Any, **more: Any) -> Any:
    return client.responses.stream(
        **{"model": "", "input": HELLO, "max_output_tokens": 8, "extra_body": {"seed": 5}, **more}
    )


# --- streams -------------------------------------------------------------------------------------------------------


def test_a_stream_says_the_same(client: Any) -> None:
    whole = create(client)
    with create_stream(client) as stream:
        events = list(stream)
    assert [each.sequence_number for each in events] == list(range(len(events)))
    kinds = [each.type.removeprefix("response.") for each in events]
    deltas = [each for each in events if each.type == "response.output_text.delta"]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert len(deltas) > 4 and {each.content_index for each in deltas} == {0}
    last = events[-1].response
    assert "".join(each.delta for each in deltas) == deltas[-1].snapshot == last.output_text == whole.output_text
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert {each.response.id for each in events if hasattr(each, "response")} == {last.id}
    assert bare(last) == bare(whole)


def bare(response: Any) -> Any:
    """A response without what differs between two responses to the same request."""
    found = response.to_dict()
    for name in ("id", "created_at", "completed_at", "timings"):
        del found[name]
    del found["usage"]["input_tokens_details"]
    for item in found["output"]:
        del item["id"]
    return found


def test_the_frames_of_a_stream(server: str) -> None:
    body = {"input": HELLO, "max_output_tokens": 2, "stream": True}
    response = httpx.post(f"{server}/v1/responses", json=body, timeout=WAIT_SECONDS)
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = [frame.split("\n") for frame in response.text.removesuffix("\n\n").split("\n\n")]
    for name, data in frames:
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


class Call(BaseModel):
    name: Literal["add", "sub"]
    n: int


def test_an_answer_is_parsed(client: Any) -> None:
    asked = {"model": "", "input": HELLO, "text_format": Call, "max_output_tokens": 64, "extra_body": {"seed": 2}}
    whole = client.responses.parse(**asked).output_parsed
    assert isinstance(whole, Call)
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == whole
    schema = {"type": "json_schema", "json_schema": {"name": "call", "schema": strict_schema()}}
    other = chat(client, seed=2, max_tokens=64, response_format=schema)
    assert Call.model_validate_json(other.choices[0].message.content) == whole


def strict_schema() -> Any:
    return openai.lib._pydantic.to_strict_json_schema(Call)


# --- conversations -------------------------------------------------------------------------------------------------


def test_a_conversation_is_that_of_chat(client: Any) -> None:
    first = create(client, instructions="You write Python.")
    items = [{"role": "user", "content": [{"type": "input_text", "text": HELLO}]}, *first.output]
    second = create(client, instructions="You write Python.", input=[*items, {"role": "user", "content": "Again."}])
    messages = [{"role": "system", "content": "You write Python."}, *CHAT]
    messages += [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": "Again."}]
    other = chat(client, messages)
    assert second.output_text == other.choices[0].message.content
    assert second.usage.input_tokens == other.usage.prompt_tokens


def test_tokens_are_counted(client: Any) -> None:
    for given in ({}, {"instructions": "You write Python.", "text": {"format": {"type": "json_object"}}}):
        counted = client.responses.input_tokens.count(model="", input=HELLO, **given)
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == create(client, **given).usage.input_tokens


def test_fields_without_a_meaning_are_ignored(client: Any) -> None:
    given: Any = {"truncation": "auto", "background": False, "service_tier": "flex", "parallel_tool_calls": True}
    given |= {
        "prompt_cache_key": "x",
        "safety_identifier": "y",
        "max_tool_calls": 3,
        "store": False,
        "tool_choice": "none",
    }
    given |= {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}, "tools": TOOLS}
    given |= {"include": ["reasoning.encrypted_content"], "previous_response_id": None}
    answer = create(client, **given)
    assert answer.output_text == create(client).output_text
    assert (answer.reasoning.effort, answer.text.verbosity, answer.tool_choice) == ("low", "low", "none")
    assert (answer.prompt_cache_key, answer.safety_identifier, answer.truncation) == ("x", "y", "disabled")


@pytest.mark.parametrize("stream", ["false", "true"])
def test_what_json_cannot_repeat(server: str, stream: str) -> None:
    tools = r'[{"type": "function", "name": "f", "parameters": {"default": 1e999, "enum": [-1e999, 0.5]}}]'
    body = rf'{{"input": "a\uD83D", "metadata": {{"a\ud83d": "\ud83d"}}, "user": "\ud83d\ude00", "tools": {tools}, '
    body += rf'"max_output_tokens": 1, "stream": {stream}}}'
    answer = httpx.post(
        f"{server}/v1/responses", content=body, headers={"content-type": "application/json"}, timeout=WAIT_SECONDS
    )
    assert answer.status_code == 200
    found = json.loads(answer.text.strip().rpartition("data: ")[2])
    found = found.get("response", found)
    assert (found["metadata"], found["user"], found["status"]) == ({"a?": "?"}, "😀", "incomplete")
    most = sys.float_info.max
    assert found["tools"][0]["parameters"] == {"default": most, "enum": [-most, 0.5]}


def test_tools_of_a_service_are_left_out(client: Any) -> None:
    """Codex describes tools of OpenAI's beside its functions; a refusal would keep it from working."""
    service: Any = [{"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "image_generation"}]
    answer, other = (create(client, tools=tools) for tools in ([*service, *TOOLS], TOOLS))
    assert answer.output_text == other.output_text and answer.usage.input_tokens == other.usage.input_tokens


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"input": []}, "input", "give a text or at least one item"),
        ({"extra_body": {"input": None}}, "input", "is missing"),
        ({"extra_body": {"input": 3}}, "input", "must be a text or a list of items, not 3"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "must be one of"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "text only"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "'web_search_call'.*leave the item out"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "stores no items: send the item itself"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "is missing"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]},
            "input[0].arguments",
            "JSON text of an object",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", "is missing"),
        ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id", "is missing"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is missing"),
        ({"tool_choice": "maybe"}, "tool_choice", "must be"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores nothing: send the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "stores nothing: send the whole conversation"),
        ({"prompt": {"id": "p"}}, "prompt", "stores nothing: send its text"),
        ({"background": True}, "background", "use stream"),
        ({"include": ["logprobs"]}, "include[0]", "must be one of message.output_text.logprobs"),
        ({"top_logprobs": 2}, "top_logprobs", "needs include"),
        ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs", "0 to 20"),
        ({"metadata": {"a": 1}}, "metadata.a", "must be a text"),
        ({"truncation": "middle"}, "truncation", "must be auto or disabled"),
        ({"max_output_tokens": -1}, "max_output_tokens", "0 or more"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "is missing"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "must be a text"),
        ({"extra_body": {"max_tokens": 3}}, "max_tokens", "calls it max_output_tokens"),
        ({"extra_body": {"response_format": {"type": "text"}}}, "response_format", "calls it text.format"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_field(client: Any, more: Any, param: str, words: str) -> None:
    for ask in (create, create_stream):
        with pytest.raises(openai.BadRequestError, match=words) as refused, ask(client, **more):
            pass
        assert refused.value.param == param and refused.value.body["message"].startswith(param)


def test_a_prompt_that_is_too_long_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="context") as refused:
        create(client, input="word " * 2000, truncation="auto")
    assert refused.value.code == "context_length_exceeded"


def test_no_response_is_stored(client: Any) -> None:
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="stores no responses"):
            ask("resp_1")
    with pytest.raises(openai.NotFoundError, match="stores no responses"):
        client.responses.input_items.list("resp_1")
