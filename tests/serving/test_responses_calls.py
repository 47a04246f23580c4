"""Responses of a model that thinks and calls functions: the one that is built in, made to do so."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")  # the client is built on it

import engine  # noqa: E402
from engine.serving.answer import Ask  # noqa: E402
from engine.serving.app import app  # noqa: E402
from engine.serving.models import Models  # noqa: E402
from engine.serving.responses.sealed import opened  # noqa: E402
from engine.serving.served import Spec  # noqa: E402
from engine.text.template.chat import ChatTemplate  # noqa: E402
from engine.tools.formats.plain import plain  # noqa: E402
from tests.serving.bundled import bundled  # noqa: E402
from tests.serving.responses_events import check  # noqa: E402

pytestmark = pytest.mark.together("serving")

TEMPLATE = """{%- for m in messages -%}
{%- if m.content == "Hush." %}{{ raise_exception("Nobody says this.") }}{% endif -%}
{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}
{% endfor -%}
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{{ reasoning_effort }}, {{ enable_thinking }}
assistant: """

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}

FLAG = TOOL | {
    "parameters": {
        "type": "object",
        "properties": {"sunny": {"type": "boolean"}},
        "required": ["sunny"],
        "additionalProperties": False,
    }
}

SAYS = r"<think>\n[a-z]{1,9}\n</think>\n\n[A-Z][a-z]{1,9}\."
CALLED = r'\{"name": "weather", "arguments": \{"city": "[A-Z][a-z]{1,9}"\}\}'
CALLS = rf"{SAYS}(\n<tool_call>\n{CALLED}\n</tool_call>){{2}}"

ASKED: Any = {
    "model": "",
    "input": [{"role": "user", "content": "How is it?"}],
    "tools": [TOOL],
    "extra_body": {"seed": 3},
}


CHAT: Any = {
    "model": "",
    "messages": ASKED["input"],
    "tools": [{"type": "function", "function": TOOL}],
    "seed": 3,
    "max_tokens": 200,
}


class Script:
    """What the model says next, as a regular expression that the server does not know of, "": what it likes; and the prompt
    that it has read."""

    llm: engine.LLM
    models: Models
    prompt: str

    def __init__(self) -> None:
        self.pattern = ""

    def opened(self) -> engine.LLM:
        """The model."""
        llm = bundled(parallel=2, n_ctx=512)
        llm.chat_template = ChatTemplate.from_source(TEMPLATE, llm.tokenizer)
        generate = llm.generate

        def scripted(prompt: list[int], **options: Any) -> Any:
            self.prompt = llm.tokenizer.decode(prompt)
            if self.pattern:
                options["grammar"] = engine.Grammar.regex(self.pattern)
            return generate(prompt, **options)

        setattr(llm, "generate", scripted)  # noqa: B010
        self.llm = llm
        return llm


@pytest.fixture(scope="module")
def talk() -> Iterator[Callable[[Callable[[Any, Script], Awaitable[None]]], None]]:
    """Runs a test with a client of a server in this process."""
    script = Script()
    served = app([Spec("pycoder", script.opened)], preload=False)
    script.models = served.state.models
    transport = httpx.ASGITransport(served)

    async def run(test: Callable[[Any, Script], Awaitable[None]]) -> None:
        http_client = openai.DefaultAsyncHttpxClient(transport=transport)
        made = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http_client
        )
        async with made as client:
            await test(client, script)

    with asyncio.Runner() as runner:
        yield lambda test: runner.run(run(test))
        runner.run(served.state.models.close())


def test_thoughts_and_calls(talk: Any) -> None:
    async def test(client: Any, script: Script) -> None:
        script.pattern = CALLS
        answer = await client.responses.create(**ASKED)
        assert answer.status == "completed"
        thought, message, *calls = answer.output
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
        assert {item.status for item in answer.output} == {"completed"}
        assert len({item.id for item in answer.output}) == 4 and len({call.call_id for call in calls}) == 2
        assert answer.usage.output_tokens_details.reasoning_tokens > 0
        assert thought.summary == [] and thought.encrypted_content is None
        for call in calls:
            assert call.name == "weather" and list(json.loads(call.arguments)) == ["city"]

        # The same as a chat.
        other = await client.chat.completions.create(**CHAT)
        same = other.choices[0].message
        assert (thought.content[0].text, message.content[0].text) == (same.reasoning_content, same.content)
        assert [(c.call_id, c.name, c.arguments) for c in calls] == [
            (c.id, c.function.name, c.function.arguments) for c in same.tool_calls
        ]
        assert answer.usage.total_tokens == other.usage.total_tokens

        # The results of the calls.
        script.pattern = SAYS
        results = [{"type": "function_call_output", "call_id": c.call_id, "output": "sunny"} for c in calls]
        second = await client.responses.create(**ASKED | {"input": [*ASKED["input"], *answer.output, *results]})
        told = [{"role": "tool", "tool_call_id": c.call_id, "content": "sunny"} for c in calls]
        other = await client.chat.completions.create(**CHAT | {"messages": [*ASKED["input"], same, *told]})
        assert second.output_text == other.choices[0].message.content
        assert second.usage.input_tokens == other.usage.prompt_tokens > answer.usage.total_tokens - 20

    talk(test)


def test_a_stream_of_thoughts_and_calls(talk: Any) -> None:
    async def test(client: Any, script: Script) -> None:
        script.pattern = CALLS
        more: Any = {"include": ["reasoning.encrypted_content", "message.output_text.logprobs"]}
        whole = await client.responses.create(**ASKED, **more)
        async with client.responses.stream(**ASKED, **more) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [item.type for item in final.output] == [item.type for item in whole.output]
        for item, other in zip(final.output, whole.output, strict=True):
            found, expected = item.to_dict(), other.to_dict() | {"id": item.id}
            for part in found.get("content", []):
                part.pop("parsed", None)  # the accumulator adds it
            found.pop("parsed_arguments", None)
            assert found == expected
        assert final.output[2].parsed_arguments == json.loads(whole.output[2].arguments)
        assert opened(final.output[0].encrypted_content) == final.output[0].content[0].text
        text = final.output[1].content[0]
        assert b"".join(bytes(token.bytes) for token in text.logprobs).decode().strip() == text.text
        check(events)

    talk(test)


def test_a_call_that_is_cut_off_is_incomplete(talk: Any) -> None:
    async def test(client: Any, script: Script) -> None:
        script.pattern = rf'{SAYS}\n<tool_call>\n\{{"name": "weather", "arguments": \{{"city": "[a-z]{{60}}"\}}\}}'
        whole = await client.responses.create(**ASKED)
        assert [item.status for item in whole.output] == ["completed"] * 3
        answer = await client.responses.create(**ASKED | {"max_output_tokens": whole.usage.output_tokens - 6})
        assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
        *others, last = answer.output
        assert last.type == "function_call" and last.status == "incomplete"
        assert whole.output[2].arguments.startswith(last.arguments)
        assert not last.arguments.endswith("}")
        assert {item.status for item in others} == {"completed"}

    talk(test)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
    ],
)
def test_calls_that_are_forced(talk: Any, choice: Any) -> None:
    async def test(client: Any, script: Script) -> None:
        script.pattern = ""
        asked = ASKED | {"tool_choice": choice, "parallel_tool_calls": False, "tools": [FLAG]}
        answer = await client.responses.create(**asked, max_output_tokens=200)
        assert answer.tool_choice == choice if isinstance(choice, str) else answer.tool_choice.to_dict() == choice
        assert (answer.status, answer.parallel_tool_calls) == ("completed", False)
        (call,) = [item for item in answer.output if item.type != "reasoning"]
        assert (call.type, call.name, list(json.loads(call.arguments))) == ("function_call", "weather", ["sunny"])
        # The form is that of a text, and here is none.
        both = await client.responses.create(**asked, max_output_tokens=200, text={"format": {"type": "json_object"}})
        assert [item.type for item in both.output if item.type != "reasoning"] == ["function_call"]

    talk(test)


def test_an_answer_that_fails(talk: Any) -> None:
    async def test(client: Any, script: Script) -> None:
        # What must follow, the bias forbids.
        script.pattern = "yesq"
        asked = ASKED | {"extra_body": {"logit_bias": {str(script.llm.tokenizer.token_id("q")): -100}}}
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == "yes"
        assert [each.sequence_number for each in events] == list(range(len(events)))
        response = events[-1].response
        assert response.status == "failed" and response.id == events[0].response.id
        assert (response.error.code, response.error.type) == ("invalid_prompt", "invalid_request_error")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**asked)
        assert refused.value.body["message"] == response.error.message

    talk(test)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ", "),
        ({"reasoning": {"effort": "low"}}, "low, True"),
        ({"reasoning": {"effort": "none"}}, "none, False"),
        ({"text": {"format": {"type": "json_object"}}}, ", False"),
        ({"text": {"format": {"type": "text"}}}, ", "),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": 3}}, "reasoning": {"effort": "high"}}, "high, 3"),
    ],
)
def test_how_much_a_model_thinks(talk: Any, more: Any, expected: str) -> None:
    async def test(client: Any, script: Script) -> None:
        script.pattern = ""
        await client.responses.create(**ASKED | {"max_output_tokens": 1} | more)
        assert script.prompt.splitlines()[-2] == expected

    talk(test)


def test_a_conversation_that_the_template_refuses(talk: Any) -> None:
    async def test(client: Any, script: Script) -> None:
        with pytest.raises(openai.BadRequestError, match="Nobody says this") as refused:
            await client.responses.create(**ASKED | {"input": "Hush."})
        assert refused.value.param == "input"

    talk(test)


def test_log_probabilities_are_sent_token_by_token(talk: Any) -> None:
    async def test(client: Any, script: Script) -> None:
        script.pattern = ""
        async with script.models.use(None) as opened:
            for logprobs, most in ((None, 8), (0, 1)):
                options = {"max_tokens": 8, "ignore_eos": True}
                (answer,) = await opened.answers(Ask([1], plain, options, logprobs=logprobs))
                arrived: list[int] = []
                answer.on_tokens = lambda answer, n, now, arrived=arrived: arrived.append(n)  # type: ignore[misc]
                while sum(arrived) < 8:
                    await asyncio.sleep(0.001)
                assert max([len(delta.ids) async for delta in answer]) == most

    talk(test)
