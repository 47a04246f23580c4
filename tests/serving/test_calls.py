"""Calls that a request forces, as the packages ``openai`` and ``anthropic`` see them.

The model writes Python and knows of no calls, so that whatever is right comes from the grammar.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
pytest.importorskip("openai")
pytest.importorskip("anthropic")
pytest.importorskip("jsonschema")
import anthropic
import jsonschema
import openai
from starlette.testclient import TestClient

import engine
from engine.grammar.messages import SLOW
from engine.grammar.trial import TRIAL
from engine.serving.app import app
from engine.serving.conversation import prompt_of
from engine.serving.openai.chat import Said
from engine.serving.served import Spec
from engine.speculative.params import SpeculationParams
from engine.text.template.builtin import TEMPLATES
from engine.text.template.chat import ChatTemplate
from engine.tools import choice
from engine.tools.calls.tagged import MAYBE, NONE, OPEN
from engine.tools.formats.events import CallBegin, CallEnd, Content, Event, Reasoning, merged
from tests.text.template import test_harmony
from tests.tools.formats.test_select import GEMMA4, LLAMA3, QWEN3, QWEN35, R1
from tests.vocabularies import CONTROL, bpe_metadata, made

pytestmark = pytest.mark.together("serving")

SOURCES = {
    "qwen3": QWEN3,
    "qwen3_coder": QWEN35,
    "gemma4": GEMMA4,
    "llama3": LLAMA3,
    "deepseek4": TEMPLATES["deepseek4"],
    "gpt_oss": test_harmony.SOURCE,
    "think": R1,
    "plain": "",
}
"""Templates that show the format, by its name."""

ENDS = {"think": "{{ '<think>\\n' }}"}
"""What a prompt ends with."""

CALLING = [name for name in SOURCES if name not in ("think", "plain")]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
HELLO: Any = [{"role": "user", "content": "def add(a, b):"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"enum": ["C", "F", None]},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = None, **more: Any) -> Any:
    """A function in OpenAI's form."""
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}, **more}}


TOOLS: Any = [tool("weather", SCHEMA), tool("now")]
SCHEMAS = {"weather": SCHEMA, "now": {"maxProperties": 0}}
ANTHROPIC_TOOLS: Any = [
    {"name": "weather", "input_schema": SCHEMA},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
ASK: Any = {"messages": HELLO, "max_tokens": 300}


def template(llm: engine.LLM, format: str, end: str = "") -> ChatTemplate:
    """A template that shows a format; end: what its prompts end with."""
    shown = "{% if false %}{{ tools }}{% raw %}" + SOURCES[format] + "{% endraw %}{% endif %}"
    return ChatTemplate.from_source(shown + TEMPLATE + (end or ENDS.get(format, "")), llm.tokenizer)


class Server:
    """A server with two models that are the same: ``plain``, and ``drafts``, which drafts."""

    def __init__(self) -> None:
        self._opened: list[engine.LLM] = []
        self._format = "plain"
        specs = [Spec("plain", self._open), Spec("drafts", self._open, speculation=SpeculationParams(lookup=True))]
        self.client = TestClient(app(specs), "http://localhost")
        key: Any = {"api_key": "none", "http_client": self.client, "max_retries": 0}
        self.chat: Any = openai.OpenAI(base_url="http://localhost/v1", **key).chat.completions
        self.messages: Any = anthropic.Anthropic(base_url="http://localhost", **key).messages

    def _open(self) -> engine.LLM:
        llm = engine.load(device="cpu", n_ctx=1024, parallel=2)
        llm.chat_template = template(llm, self._format)
        self._opened.append(llm)
        return llm

    @property
    def llm(self) -> engine.LLM:
        """A model that is open."""
        return self._opened[0]

    def writes(self, format: str) -> None:
        """The models write a format from now on."""
        self._format = format
        for llm in self._opened:
            llm.chat_template = template(llm, format)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    opened = Server()
    with opened.client:
        yield opened


@pytest.mark.parametrize("format", CALLING)
def test_a_call_that_is_required(server: Server, format: str) -> None:
    server.writes(format)
    ask = {"model": "plain", "tools": TOOLS, "seed": 0, "reasoning_effort": "none"} | ASK
    choice = server.chat.create(**ask, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == ""
    (call,) = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("format", CALLING)
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_python_gets_the_answer_that_clients_get(server: Server, format: str, choice: str) -> None:
    """``LLM.chat`` takes the same functions, and its answer has the same text, thoughts, calls and ids of calls."""
    server.writes(format)
    ask: Any = {"tools": TOOLS, "tool_choice": choice, "seed": 3, "max_tokens": 48, "parallel_tool_calls": False}
    given = server.chat.create(**ask, model="plain", messages=HELLO).choices[0]
    answer = server.llm.chat(HELLO, **ask)
    assert answer.finish_reason == given.finish_reason
    message = given.message
    assert (answer.content, answer.reasoning) == (message.content or "", getattr(message, "reasoning_content", ""))
    calls = [(c.id, c.function.name, json.loads(c.function.arguments)) for c in given.message.tool_calls or ()]
    assert [(c.id, c.name, c.arguments) for c in answer.tool_calls] == calls
    if calls:
        # The next turn, with the call and its result.
        result: Any = {"role": "tool", "tool_call_id": calls[0][0], "content": "7"}
        ask |= {"tool_choice": "auto", "max_tokens": 8}
        sent: Any = given.message.model_dump(exclude_none=True)
        again = server.chat.create(**ask, model="plain", messages=[*HELLO, sent, result]).choices[0].message
        assert server.llm.chat([*HELLO, answer.message, result], **ask).content == again.content


@pytest.mark.parametrize("format", ["qwen3", "qwen3_coder"])
def test_a_call_that_max_tokens_cuts_off(server: Server, format: str) -> None:
    server.writes(format)
    ask = {"model": "plain", "tools": TOOLS[:1], "seed": 0, "reasoning_effort": "none"} | ASK | {"max_tokens": 36}
    ask |= {"tool_choice": "required"}
    choice = server.chat.create(**ask).choices[0]
    assert choice.finish_reason == "length" and choice.message.content == ""
    (call,) = choice.message.tool_calls
    with pytest.raises(ValueError, match="."):
        json.loads(call.function.arguments)
    deltas = [chunk.choices[0].delta for chunk in server.chat.create(**ask, stream=True)]
    assert not any(delta.content for delta in deltas)
    parts = [part.function.arguments for delta in deltas for part in delta.tool_calls or ()]
    assert "".join(parts) == call.function.arguments


OK: Any = {"type": "object", "properties": {"ok": {"enum": [True]}}, "required": ["ok"], "additionalProperties": False}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": OK}}


def test_structured_text_and_a_choice(server: Server) -> None:
    server.writes("qwen3")
    ask = {"model": "plain", "tools": TOOLS, "seed": 0, "reasoning_effort": "none", "response_format": FORM} | ASK
    forced = server.chat.create(**ask, tool_choice="required", parallel_tool_calls=False).choices[0]
    assert forced.finish_reason == "tool_calls" and forced.message.content == ""
    text = server.chat.create(**ask, tool_choice="none").choices[0]
    assert text.finish_reason == "stop" and json.loads(text.message.content) == {"ok": True}


@pytest.mark.parametrize("format", ["qwen3", "qwen3_coder", "gemma4", "deepseek4"])
def test_structured_text_or_a_call(server: Server, format: str) -> None:
    """Which of them comes is up to the model; here a bias against braces at the beginning of a token decides."""
    server.writes(format)
    ask = {"model": "plain", "tools": TOOLS[1:], "reasoning_effort": "none", "response_format": FORM, "seed": 0} | ASK
    braces = [id for id in range(server.llm.tokenizer.n_vocab) if server.llm.tokenizer.decode([id]).startswith("{")]
    for bias, reason in ((20, "stop"), (-90, "tool_calls")):
        biases = {str(id): bias for id in braces}
        choice = server.chat.create(**ask, logit_bias=biases, parallel_tool_calls=False).choices[0]
        assert choice.finish_reason == reason
        if reason == "stop":
            assert json.loads(choice.message.content) == {"ok": True} and not choice.message.tool_calls
        else:
            assert choice.message.tool_calls[0].function.name == "now" and not choice.message.content


NESTED: Any = {
    "lark": {"grammar": 'start: deep\ndeep: "{" deep "}" | "{ok}"'},
    "gbnf": {"guided_grammar": 'root ::= "{" root "}" | "{ok}"'},
    "vllm": {"structured_outputs": {"grammar": 'start: "{" rest\nrest: start "}" | "ok}"'}},
    "choice": {"guided_choice": ["{ok}", "{{ok}}"]},
    "ignore": {"response_format": {"type": "grammar", "grammar": 'start: "{" start? "}"\n%ignore / ?ok/'}},
}
"""Grammars with rules of their own, of texts that are braces around ``ok``."""


@pytest.mark.parametrize("how", NESTED)
def test_a_text_of_a_grammar_or_a_call(server: Server, how: str) -> None:
    server.writes("qwen3")
    tokenizer = server.llm.tokenizer
    braces = [id for id in range(tokenizer.n_vocab) if tokenizer.decode([id]).startswith("{")]
    closing = {str(id): 40 for id in range(tokenizer.n_vocab) if tokenizer.decode([id]).startswith("}")}
    ask: Any = {"messages": HELLO, "max_tokens": 60, "tools": TOOLS[1:], "seed": 0, "parallel_tool_calls": False}
    for bias in (20, -90):
        biases = {str(id): bias for id in braces} | closing
        body = ask | NESTED[how] | {"logit_bias": biases, "temperature": 0}
        answer = server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        if bias > 0:
            assert re.fullmatch(r"[{} ok]+", answer["content"]) and "tool_calls" not in answer
        else:
            assert answer["tool_calls"][0]["function"]["name"] == "now" and answer["content"] == ""


def test_structured_text_or_a_call_of_ollama(server: Server) -> None:
    server.writes("qwen3")
    tokenizer = server.llm.tokenizer
    braces = [id for id in range(tokenizer.n_vocab) if tokenizer.decode([id]).startswith("{")]
    ask: Any = {"messages": HELLO, "tools": TOOLS[1:], "format": OK, "stream": False}
    for bias in (20, -90):
        options = {"num_predict": 300, "seed": 0, "logit_bias": {str(id): bias for id in braces}}
        answer = server.client.post("/api/chat", json=ask | {"options": options}).json()["message"]
        if bias > 0:
            assert json.loads(answer["content"]) == {"ok": True} and "tool_calls" not in answer
        else:
            assert answer["tool_calls"][0]["function"]["name"] == "now" and answer["content"] == ""


def test_structured_text_or_a_call_of_anthropic(server: Server) -> None:
    server.writes("qwen3")
    output = {"format": {"type": "json_schema", "schema": OK}}
    ask = {"model": "plain", "extra_body": {"output_config": output, "seed": 0}} | ASK
    (alone,) = server.messages.create(**ask).content
    assert json.loads(alone.text) == {"ok": True}
    (none,) = server.messages.create(**ask, tools=ANTHROPIC_TOOLS, tool_choice={"type": "none"}).content
    assert json.loads(none.text) == {"ok": True}
    auto = {"type": "auto", "disable_parallel_tool_use": True}
    (either,) = server.messages.create(**ask, tools=ANTHROPIC_TOOLS[1:], tool_choice=auto).content
    assert either.type == "tool_use" or json.loads(either.text) == {"ok": True}
    (forced,) = server.messages.create(
        **ask, tools=ANTHROPIC_TOOLS[1:], tool_choice={"type": "any", "disable_parallel_tool_use": True}
    ).content
    assert (forced.type, forced.name) == ("tool_use", "now")


HOSTILE = (
    '{"type": 5}', '{"minLength": 1e999, "type": "string"}', '{"type": "string", "format": []}', '{"enum": ["\\ud800"]}',
    '{"anyOf": [{"$ref": "#/properties/p"}, {"$ref": "#/properties/p"}]}', '{"minimum": 1e999, "type": "number"}', "[null]",
)  # fmt: skip
"""Schemas of a parameter that are none."""


@pytest.mark.parametrize("format", CALLING)
def test_hostile_schemas_are_refused_by_one_sentence(server: Server, format: str) -> None:
    server.writes(format)
    head = {"content-type": "application/json"}
    ask = {"model": "plain", "messages": HELLO, "max_tokens": 1, "tool_choice": "required", "reasoning_effort": "none"}
    for schema in HOSTILE:
        for strict in (True, False):
            tools = json.dumps([tool("f", {"type": "object", "properties": {"p": "SCHEMA"}}, strict=strict)])
            body = f'{json.dumps(ask)[:-1]}, "tools": {tools.replace(chr(34) + "SCHEMA" + chr(34), schema)}}}'
            answer = server.client.post("/v1/chat/completions", content=body, headers=head)
            assert answer.status_code in (200, 400), (schema, strict, answer.text)
            if answer.status_code == 400:
                message = answer.json()["error"]["message"]
                assert message.isprintable() and len(message) < 500 and answer.json()["error"]["param"] == "tools"


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("format", ["qwen3_coder", "gpt_oss"])
def test_a_call_that_openai_names(server: Server, format: str) -> None:
    server.writes(format)
    ask = {"model": "plain", "tools": TOOLS, "tool_choice": NAMED, "seed": 4, "reasoning_effort": "none"} | ASK
    whole = server.chat.create(**ask).choices[0]
    assert whole.finish_reason == "stop"
    (call,) = whole.message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    with server.chat.stream(**ask) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "stop"
    (streamed,) = final.message.tool_calls
    assert (streamed.id, streamed.function.arguments) == (call.id, call.function.arguments)


def test_calls_of_different_turns_have_different_ids(server: Server) -> None:
    """The seed is fixed; the same request has the same ids."""
    server.writes("qwen3")
    ask = {"model": "plain", "tools": TOOLS, "tool_choice": NAMED, "reasoning_effort": "none"} | ASK
    first, again = (server.chat.create(**ask, seed=5, n=2).choices for _ in range(2))
    ids = [call.id for choice in first for call in choice.message.tool_calls]
    assert ids == [call.id for choice in again for call in choice.message.tool_calls]
    said = first[0].message
    told = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "sunny"}
    second = server.chat.create(**ask | {"messages": [*HELLO, said, told]}, seed=5).choices[0].message
    ids.append(second.tool_calls[0].id)
    assert len(set(ids)) == 3

    ask = {"model": "plain", "tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "weather"}} | ASK
    one, same = (server.messages.create(**ask, extra_body={"seed": 5}).content for _ in range(2))
    assert one[0].id == same[0].id
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": one[0].id, "content": "sunny"}]}
    ask["messages"] = [*HELLO, {"role": "assistant", "content": one}, result]
    assert server.messages.create(**ask, extra_body={"seed": 5}).content[0].id != one[0].id


@pytest.mark.parametrize("format", ["qwen3", "gemma4"])
@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}]
)
def test_a_call_that_anthropic_forces(server: Server, format: str, choice: Any) -> None:
    server.writes(format)
    ask = {"model": "plain", "tools": ANTHROPIC_TOOLS, "tool_choice": choice, "extra_body": {"seed": 3}} | ASK
    whole = server.messages.create(**ask)
    assert whole.stop_reason == "tool_use"
    (call,) = whole.content
    assert call.name in ("weather", "now") and choice.get("name", call.name) == call.name
    jsonschema.validate(call.input, SCHEMAS[call.name])
    with server.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert [(block.name, block.input) for block in final.content] == [(call.name, call.input)]


def test_drafts_change_no_call(server: Server) -> None:
    server.writes("qwen3_coder")
    for seed in range(3):
        ask = {"tools": TOOLS, "tool_choice": "required", "seed": seed, "reasoning_effort": "none"} | ASK
        plain, drafts = (server.chat.create(**ask | {"max_tokens": 60}, model=name) for name in ("plain", "drafts"))
        assert plain.choices[0].message == drafts.choices[0].message
        assert plain.usage.completion_tokens == drafts.usage.completion_tokens


def test_a_strict_function_is_followed_although_no_call_is_forced(server: Server) -> None:
    """Everything begins with a brace, which begins a call of Llama 3."""
    server.writes("llama3")
    brace = server.client.post("/tokenize", json={"content": "{", "add_special": False}).json()["tokens"][-1]
    ask = {"model": "plain", "seed": 0, "logit_bias": {str(brace): 30}} | ASK
    loose = server.chat.create(**ask | {"max_tokens": 20}, tools=[tool("weather", SCHEMA)]).choices[0].message
    assert loose.content.startswith("{") and not loose.tool_calls
    strict = server.chat.create(**ask, tools=[tool("weather", SCHEMA, strict=True)], parallel_tool_calls=False).choices[
        0
    ]
    assert strict.finish_reason == "tool_calls" and strict.message.content == ""
    jsonschema.validate(json.loads(strict.message.tool_calls[0].function.arguments), SCHEMA)


@pytest.mark.parametrize("format", ["qwen3", "qwen3_coder"])
def test_a_text_without_calls_is_the_same_with_strict_functions(server: Server, format: str) -> None:
    server.writes(format)
    ask = {"model": "plain", "seed": 1} | ASK | {"max_tokens": 40}
    loose, strict = (
        server.chat.create(**ask, tools=[tool("f", SCHEMA, strict=s)]).choices[0].message for s in (False, True)
    )
    assert loose.content == strict.content and not loose.tool_calls


def test_only_the_allowed_functions_are_called(server: Server) -> None:
    server.writes("qwen3")
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    ask = {"model": "plain", "tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}} | ASK
    choice = server.chat.create(**ask, parallel_tool_calls=False, reasoning_effort="none").choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]


def test_a_json_answer_that_names_a_function_is_no_call(server: Server) -> None:
    """If none may be called; the format has no tags."""
    server.writes("llama3")
    value = {"name": "now", "parameters": {}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": value}}}
    ask = {"model": "plain", "tools": TOOLS, "tool_choice": "none", "response_format": form}
    choice = server.chat.create(**ASK, **ask).choices[0]
    assert json.loads(choice.message.content) == value
    assert choice.finish_reason == "stop" and not choice.message.tool_calls


def test_an_answer_that_the_client_has_begun_is_no_thought(server: Server) -> None:
    server.writes("think")
    begun: Any = [*HELLO, {"role": "assistant", "content": "    return a"}]
    ask = {"model": "plain", "max_tokens": 8, "temperature": 0}
    assert server.chat.create(**ask, messages=HELLO).choices[0].message.reasoning_content
    message = server.chat.create(**ask, messages=begun, extra_body={"continue_final_message": True}).choices[0].message
    assert message.content and not hasattr(message, "reasoning_content")
    answer = server.messages.create(model="plain", max_tokens=8, messages=begun, extra_body={"temperature": 0})
    assert [(block.type, block.text) for block in answer.content] == [("text", message.content)]
    thought: Any = [*HELLO, {"role": "assistant", "content": "", "reasoning_content": "Hm"}]
    ask = {"model": "plain", "max_tokens": 4, "temperature": 0, "messages": thought}
    assert server.chat.create(**ask, extra_body={"continue_final_message": True}).choices[0].message.reasoning_content


def test_the_thought_before_a_beginning_is_closed() -> None:
    tokenizer = made(bpe_metadata([], {"<think>": CONTROL, "</think>": CONTROL}))
    llm: Any = SimpleNamespace(tokenizer=tokenizer)
    llm.chat_template = template(llm, "think")
    last = {"role": "assistant", "content": "a</think>b", "reasoning_content": "hm"}
    closed, opened = (prompt_of(llm, [*HELLO, last | more], continue_final=True) for more in ({}, {"content": ""}))
    assert tokenizer.decode(closed.ids, special=True).endswith("assistant: <think>\nhm\n</think>\n\na</think>b")
    assert sum(id == tokenizer.token_id("</think>") for id in closed.ids) == 1
    assert tokenizer.decode(opened.ids, special=True).endswith("assistant: <think>\nhm")
    assert (closed.thought, opened.thought) == (NONE, OPEN)


def test_answers_have_the_format_of_the_template_for_tools() -> None:
    """Where a file has a template for requests with tools, only such requests are written, and their answers read, by it."""
    tokenizer = made(bpe_metadata([], {"<tool_call>": CONTROL, "</tool_call>": CONTROL}))
    sources = {"": "plain", ".tool_use": "{% if tools %}{{ '<tool_call>{\"arguments\"' }}{% endif %}"}
    metadata = {f"tokenizer.chat_template{name}": source for name, source in sources.items()}
    found = ChatTemplate.from_gguf(SimpleNamespace(path=Path("x"), metadata=metadata), tokenizer)
    llm: Any = SimpleNamespace(tokenizer=tokenizer, chat_template=found)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    plain, called = prompt_of(llm, HELLO), prompt_of(llm, HELLO, tools)
    assert (plain.format, called.format) == ("plain", "qwen3")
    assert tokenizer.decode(plain.ids, special=True) == "plain"
    assert tokenizer.decode(called.ids, special=True) == '<tool_call>{"arguments"'


def test_a_beginning_is_in_the_channel_of_texts() -> None:
    harmony = test_harmony.TEMPLATE
    llm: Any = SimpleNamespace(tokenizer=test_harmony.TOK, chat_template=harmony)
    turns = test_harmony.turns("a", "Yes, <|end|>", "c")
    prompt = prompt_of(llm, turns[:2], continue_final=True)
    text = llm.tokenizer.decode(prompt.ids, special=True)
    assert text.endswith("Yes, <|end|>") and harmony.render(turns).startswith(text)
    assert prompt.ids == harmony.encode(turns)[: len(prompt.ids)]
    parser = prompt.parser()
    pieces = ["I", " do.", "<|end|>", "<|start|>", "assistant", "<|channel|>", "analysis", "<|message|>", "hm"]
    events = [event for piece in pieces for event in parser.feed(piece, piece in test_harmony.MARKS)]
    assert merged(events + parser.finish()) == [Content("I do."), Reasoning("hm")]


def test_what_a_grammar_holds_is_in_the_channel_of_texts() -> None:
    harmony, text = test_harmony.TEMPLATE, '{"a": 1}'
    llm: Any = SimpleNamespace(tokenizer=test_harmony.TOK, chat_template=harmony)
    turns = test_harmony.turns("a", text, "c")
    prompt = prompt_of(llm, turns[:1], ruled=True)
    answer = llm.tokenizer.encode(text)
    # The template writes an answer like this when the conversation goes on.
    assert [*prompt.ids, *answer] == harmony.encode(turns)[: len(prompt.ids) + len(answer)]
    parser = prompt.parser()
    assert merged(parser.feed(text) + parser.finish()) == [Content(text)]


def test_what_a_grammar_holds_is_in_no_thought() -> None:
    tokenizer = made(bpe_metadata([], {"<think>": CONTROL, "</think>": CONTROL}))
    llm: Any = SimpleNamespace(tokenizer=tokenizer)
    llm.chat_template = template(llm, "think")
    prompt = prompt_of(llm, HELLO, ruled=True)
    assert tokenizer.decode(prompt.ids, special=True).endswith("assistant: <think>\n\n</think>\n\n")
    assert prompt.thought == NONE


def test_a_call_is_not_forced_within_a_text_of_gpt_oss(server: Server) -> None:
    server.writes("gpt_oss")
    begun: Any = [*HELLO, {"role": "assistant", "content": "    return a"}]
    ask = {"model": "plain", "tools": TOOLS, "extra_body": {"continue_final_message": True}} | ASK
    ask |= {"messages": begun, "max_tokens": 4, "seed": 1}
    with pytest.raises(openai.BadRequestError, match="tool_choice cannot be enforced .* has begun"):
        server.chat.create(**ask, tool_choice="required")
    assert server.chat.create(**ask).choices[0].message.content


@pytest.mark.parametrize(
    ("format", "end", "values", "thought"),
    [
        ("qwen3", "", {}, MAYBE),
        ("qwen3", "", {"enable_thinking": False}, NONE),
        ("qwen3", "<think>\\n\\n</think>\\n\\n", {}, NONE),
        ("qwen3", "<think>\\n", {}, OPEN),
        ("gpt_oss", "", {}, MAYBE),
        ("llama3", "", {}, NONE),
    ],
)
def test_whether_an_answer_may_begin_with_a_thought(format: str, end: str, values: Any, thought: str) -> None:
    tokenizer = made(bpe_metadata([], {"<think>": CONTROL, "</think>": CONTROL}))
    llm: Any = SimpleNamespace(tokenizer=tokenizer)
    llm.chat_template = template(llm, format, "{{ '" + end + "' }}")
    assert prompt_of(llm, HELLO, values=values).thought == thought


def test_a_model_whose_template_knows_no_tools(server: Server) -> None:
    server.writes("plain")
    ask = {"model": "plain", "tools": TOOLS, "seed": 0} | ASK
    (call,) = server.chat.create(**ask, tool_choice="required", parallel_tool_calls=False).choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    without = server.chat.create(**ask | {"tool_choice": "none", "max_tokens": 1}).usage.prompt_tokens
    assert server.chat.create(**ask | {"max_tokens": 1}).usage.prompt_tokens > without + 100


def test_a_template_without_a_system_message_describes_tools_to_the_user() -> None:
    tokenizer = made(bpe_metadata([], {"<think>": CONTROL}))
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    llm: Any = SimpleNamespace(
        tokenizer=tokenizer, chat_template=ChatTemplate.from_source(refuses + TEMPLATE, tokenizer)
    )
    prompt = prompt_of(llm, HELLO, TOOLS)
    text = tokenizer.decode(prompt.ids)
    assert prompt.format == "generic" and text.startswith("user: # Tools")
    assert all(json.dumps(tool["function"]) in text for tool in TOOLS) and text.endswith("def add(a, b):\nassistant: ")


SMOLLM3 = """{{ '<|im_start|>system\\n' }}{% if xml_tools or python_tools %}{{ '### Tools\\n' }}{% endif %}\
{% for tool in xml_tools[:] %}{{ (tool | string) ~ '\\n' }}{% endfor %}{% if xml_tools %}\
{{ '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}{% endif %}{{ '\\n' }}\
{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}assistant: """
"""The lines of SmolLM3's template that concern functions; earlier calls are in none."""


def test_smollm3_is_told_about_functions_and_earlier_calls(server: Server) -> None:
    server.writes("plain")
    server.llm.chat_template = ChatTemplate.from_source(SMOLLM3, server.llm.tokenizer)
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
    messages = [*HELLO, {"role": "assistant", "content": "I look.", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "a", "content": "12:00"}]
    body = {"model": "plain", "messages": messages, "tools": TOOLS}
    text = server.client.post("/apply-template", json=body).json()["prompt"]
    assert all(str(tool["function"]["name"]) in text.split("def add")[0] for tool in TOOLS)
    said = 'assistant: I look.\n<tool_call>\n{"name": "now", "arguments": {"zone": "CET"}}\n</tool_call>\n'
    assert said + "user: <tool_response>\n12:00" in text
    prompt = prompt_of(server.llm, messages[:1], TOOLS)
    assert prompt.format == "qwen3" and "### Tools" in server.llm.tokenizer.decode(prompt.ids)
    for name in ("python_tools", "xml_tools"):
        for route in ("/v1/chat/completions", "/apply-template"):
            values = {"chat_template_kwargs": {name: ["def f(x): ..."]}}
            answer = server.client.post(route, json={"model": "plain", "messages": HELLO} | values)
            assert answer.status_code == 400 and f"has {name}: give the functions as tools" in answer.text


NOT = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("format", "more", "param", "words"),
    [
        ("qwen3", {"tool_choice": "always"}, "tool_choice", "must be none, auto, required or an object"),
        ("qwen3", {"tool_choice": "required", "tools": []}, "tool_choice", "give tools"),
        ("qwen3", {"tool_choice": {"type": "custom"}}, "tool_choice.type", "must be function or allowed_tools"),
        ("qwen3", {"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x', which is not one of the"),
        ("qwen3", {"tools": [tool("f", NOT, strict=True)]}, "tools", "the function 'f' cannot be enforced"),
        ("gemma4", {"tools": [tool("f", NOT, strict=True)]}, "tools", "the function 'f' has a schema with not"),
        ("qwen3", {"tool_choice": "required", "tools": [tool("f x")]}, "tools", "'f x' has a name with blanks"),
        ("qwen3", {"tools": [tool("f", {"type": "array"}, strict=True)]}, "tools", "parameters that are no object"),
        ("qwen3", {"tool_choice": "required", "tools": [tool("f", {"a": "x" * 70000})]}, "tools", "--schema-bytes"),
        ("qwen3", {"tools": [tool("f", SCHEMA, strict="yes")]}, "tools[0].function.strict", "must be true or false"),
        ("qwen3", {"n": 100}, "n", "1 to 8, not 100 (--most-n raises the limit of this server)"),
        ("qwen3", {"logprobs": True, "top_logprobs": 50}, "top_logprobs", "(--top-logprobs raises the limit"),
    ],
)
def test_refusals(server: Server, format: str, more: Any, param: str, words: str) -> None:
    server.writes(format)
    answer = server.client.post("/v1/chat/completions", json={"model": "plain", "tools": TOOLS} | ASK | more)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and words in error["message"], error


def test_functions_that_take_long_are_tried_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def problem(source: str, vocabulary: str = "") -> str:
        tried.append(source)
        return SLOW

    monkeypatch.setattr(TRIAL, "problem", problem)
    server.writes("qwen3")
    with pytest.raises(openai.BadRequestError, match="cannot be enforced together: .* takes too long to compile"):
        server.chat.create(**ASK, model="plain", tools=TOOLS, tool_choice="required")
    assert len(tried) == 1


def test_it_is_not_searched_for_ever_which_function_cannot_be_enforced(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 128 functions could take a second to try."""
    monkeypatch.setattr(choice, "SEARCH_SECONDS", -1.0)
    server.writes("gemma4")
    with pytest.raises(openai.BadRequestError, match="cannot be enforced together: .* takes too long to compile"):
        server.chat.create(**ASK, model="plain", tools=[tool("f", NOT, strict=True)])


def test_what_a_loose_schema_cannot_be_held_to_is_left_out(server: Server) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}, "required": ["a"]}
    for format in ("qwen3", "qwen3_coder"):
        server.writes(format)
        ask = {"model": "plain", "tools": [tool("f", parameters)], "tool_choice": "required", "seed": 0} | ASK
        message = server.chat.create(**ask | {"max_tokens": 60}, reasoning_effort="none").choices[0].message
        assert message.tool_calls[0].function.name == "f"


def test_text_after_a_call_begins_on_a_new_line() -> None:
    answer: Any = SimpleNamespace(call_id="call_{}".format)
    said, call = Said(answer), CallBegin(0, "now")
    events: list[Event] = [
        Reasoning("hm"),
        Content("I "),
        Content("look."),
        call,
        CallEnd(0),
        Content("It is"),
        Content(" 3."),
        call,
    ]
    parts = [said.fields(event) for event in (*events, Reasoning("so"), Content("Done."))]
    assert "".join(part.get("content", "") for part in parts) == "I look.\nIt is 3.\nDone."
    assert "".join(part.get("reasoning_content", "") for part in parts) == "hm\nso"
    assert Said(answer).fields(call) and Said(answer).fields(Content("a")) == {"content": "a"}
