"""Lists of prompts, parameters and schemas of the Python interface, and answers in an event loop."""

import asyncio
import io
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import rich.console

import bitmirror
import engine
from engine import ContextError, SamplingParams, UsageError
from engine.errors import EngineError, named_by_flags
from engine.text.shown import Shown

PROMPTS = ["def add(a, b):\n    ", "class Stack:\n", "import os\n", "for i in range("]
SEEDED: Any = {"max_tokens": 12, "seed": 5}
CHAT: Any = {"chat_template": "chatml", **SEEDED}
CONVERSATIONS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
SCHEMA: Any = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[engine.LLM]:
    with engine.load(n_ctx=256, parallel=2) as opened:
        yield opened


# --- lists ---------------------------------------------------------------------------------------------------------


def bits(answer: engine.Generation) -> tuple[object, ...]:
    return answer.ids, answer.text, answer.finish_reason, answer.logprobs


def test_answers_of_a_list_are_those_of_each_alone(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [llm.complete(prompt, logprobs=2, **SEEDED) for prompt in PROMPTS]
    llm.reset()
    most = 0
    take = llm.core.scheduler.take

    def counted() -> None:
        nonlocal most
        most = max(most, llm.core.n_active)
        take()

    monkeypatch.setattr(llm.core.scheduler, "take", counted)
    together = llm.complete(PROMPTS, logprobs=2, **SEEDED)
    assert list(map(bits, together)) == list(map(bits, alone))
    assert most == 2  # parallel
    ids = [llm.tokenize(prompt) for prompt in PROMPTS]
    assert [answer.ids for answer in llm.complete(ids, **SEEDED)] == [answer.ids for answer in alone]
    begun = llm.generate(tuple(PROMPTS), **SEEDED)
    assert not any(answer.done for answer in begun)
    assert ["".join(answer) for answer in begun] == [answer.text for answer in alone]
    (one,) = llm.complete(PROMPTS[:1], **SEEDED)
    assert one.ids == alone[0].ids


def test_answers_without_text_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are advanced by tokens: one whose tokens have no text does not keep the others waiting."""
    rows: list[int] = []
    with engine.load(n_ctx=256, parallel=2, device="cpu") as llm:
        alone = [llm.complete(prompt, **SEEDED) for prompt in PROMPTS[:2]]
        step = llm.model.step

        def counted(parts: Any) -> Any:
            rows.append(len(parts))
            return step(parts)

        monkeypatch.setattr(llm.model, "step", counted)
        monkeypatch.setattr(Shown, "feed", lambda self, token: [])
        answers = llm.complete(PROMPTS[:2], **SEEDED)
    assert [answer.ids for answer in answers] == [answer.ids for answer in alone]
    assert rows.count(2) >= SEEDED["max_tokens"] - 3 and [answer.text for answer in answers] == ["", ""]


def test_conversations_of_a_list_are_those_of_each_alone(llm: engine.LLM) -> None:
    alone = [llm.chat(one, **CHAT).ids for one in CONVERSATIONS]
    assert [answer.ids for answer in llm.chat(CONVERSATIONS, **CHAT)] == alone
    begun = llm.chat(CONVERSATIONS, stream=True, **CHAT)
    assert not any(answer.done for answer in begun)
    for answer in begun:
        list(answer)
    assert [answer.ids for answer in begun] == alone


def test_a_wrong_prompt_of_a_list_is_named(llm: engine.LLM) -> None:
    with pytest.raises(ContextError, match="^prompt 1: the prompt has"):
        llm.complete([PROMPTS[0], "x = 1\n" * 200])
    wrong: Any = [CONVERSATIONS[0], [{"role": "user"}]]
    with pytest.raises(UsageError, match="^conversation 1: message 0 needs a role"):
        llm.chat(wrong, **CHAT)


def test_an_error_ends_all_answers_of_a_list(llm: engine.LLM) -> None:
    def fail(ids: Any, logits: Any) -> None:
        if len(ids) > 20:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.complete(PROMPTS, logits_processors=[fail], max_tokens=30)
    assert llm.core.n_active == 0


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(
    llm: engine.LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    written = io.StringIO()
    make = rich.console.Console
    monkeypatch.setattr(rich.console, "Console", lambda **_: make(file=written, force_terminal=terminal))
    llm.complete(PROMPTS[:2], progress=True, **SEEDED)
    assert ("2/2" in written.getvalue()) is terminal
    assert capsys.readouterr() == ("", "")


# --- parameters ----------------------------------------------------------------------------------------------------


def test_parameters_are_those_of_the_keywords(llm: engine.LLM) -> None:
    keywords: Any = {
        "temperature": 0.6,
        "top_k": 5,
        "repeat_penalty": 1.3,
        "logit_bias": {7: 2.0},
        "stop": "z",
        **SEEDED,
    }
    expected = llm.complete(PROMPTS[0], **keywords).ids
    params = SamplingParams(**keywords)
    assert llm.complete(PROMPTS[0], sampling_params=params).ids == expected
    assert "".join(llm.generate(PROMPTS[0], sampling_params=params)) == llm.detokenize(expected)
    assert llm.chat(CONVERSATIONS[0], chat_template="chatml", sampling_params=params).seed == 5
    assert llm.complete(PROMPTS[0], sampling_params=params, max_tokens=3).ids == expected[:3]
    # Also a keyword that has its default.
    without = llm.complete(PROMPTS[0], **{**keywords, "repeat_penalty": None}).ids
    assert llm.complete(PROMPTS[0], sampling_params=params, repeat_penalty=None).ids == without != expected


def test_parameters_leave_what_the_file_recommends(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "sampling", {"temperature": 0.0})
    assert (
        llm.complete(PROMPTS[0], sampling_params=SamplingParams(max_tokens=8)).ids
        == llm.complete(PROMPTS[0], temperature=0, max_tokens=8).ids
    )


@pytest.mark.parametrize(
    "given", [{"top_p": -1}, {"temperature": "hot"}, {"max_tokens": -2}, {"stop": 5}, {"logprobs": 1.5}, {"seed": -2}]
)
def test_parameters_out_of_range(given: Any) -> None:
    with pytest.raises(UsageError, match=f"^{next(iter(given))} must be"):
        SamplingParams(**given)


# --- schemas -------------------------------------------------------------------------------------------------------


class Count:
    """A class with a schema, as pydantic makes them, that is not pydantic's."""

    def __init__(self, n: int) -> None:
        self.n = n

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}

    @classmethod
    def model_validate_json(cls, text: str) -> "Count":
        return cls(**json.loads(text))


def test_an_answer_follows_a_schema(llm: engine.LLM) -> None:
    pytest.importorskip("llguidance")
    expected = llm.complete("x", grammar=engine.Grammar.json_schema(SCHEMA), seed=1)
    with pytest.raises(UsageError, match=r"nothing to parse: give a schema \(schema=...\)"):
        _ = expected.parsed
    answer = llm.complete("x", schema=SCHEMA, seed=1)
    assert answer.ids == expected.ids and answer.parsed == json.loads(expected.text)
    both = llm.complete(["x", "y"], schema=Count, seed=1)
    assert [type(each.parsed) for each in both] == [Count, Count] and both[0].parsed.n == answer.parsed["n"]
    assert pickle.loads(pickle.dumps(both[0])).parsed.n == answer.parsed["n"]
    said = llm.chat(CONVERSATIONS[0], schema=Count, chat_template="chatml", seed=1)
    assert isinstance(said.parsed, Count)
    short = llm.complete("x", schema=SCHEMA, seed=1, max_tokens=2)
    with pytest.raises(UsageError, match=r"not complete JSON: it reached its limit, so .* \(max_tokens=...\)\.$"):
        _ = short.parsed


def test_schemas_of_pydantic(llm: engine.LLM) -> None:
    pytest.importorskip("llguidance")
    pydantic = pytest.importorskip("pydantic")
    inner = pydantic.create_model("Inner", ok=(bool, ...))
    outer = pydantic.create_model("Outer", items=(list[inner], pydantic.Field(max_length=2)))  # type: ignore[valid-type]
    answer = llm.complete("x", schema=outer, seed=2, max_tokens=100)
    assert isinstance(answer.parsed, outer)
    assert json.loads(answer.text) == answer.parsed.model_dump()  # the fields of the classes, and no others


def test_wrong_schemas(llm: engine.LLM) -> None:
    pytest.importorskip("llguidance")
    wrong: Any = 5
    for use in (lambda **o: llm.complete("x", **o), lambda **o: llm.chat(CONVERSATIONS[0], **CHAT, **o)):
        with pytest.raises(UsageError, match="^schema must be a JSON schema"):
            use(schema=wrong)
        with pytest.raises(UsageError, match="^schema and grammar both"):
            use(schema=SCHEMA, grammar=engine.Grammar.json_schema({}))


# --- functions -----------------------------------------------------------------------------------------------------

TOOL: Any = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": 5}, "tools must be a sequence"),
        ({"tools": [5]}, "tool 0 must be a mapping"),
        ({"tools": [TOOL, {"function": {}}]}, "tool 1 must be a mapping"),
        ({"tools": [{"name": "f", "parameters": 3}]}, "the parameters of tool 0"),
        ({"tools": [{"name": "f", "description": 3}]}, "the description of tool 0"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice must be auto, none, required"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "f"}}}, "tool_choice names 'f', which is not"),
        ({"tool_choice": "required"}, "tool_choice forces a call"),
    ],
)
def test_wrong_functions(llm: engine.LLM, given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said}.*\\.$"):
        llm.chat(CONVERSATIONS[0], **CHAT, **given)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": 5}, "the content of message 0"),
        ({"role": "user", "content": [{"type": "image"}]}, "the content of message 0"),
        ({"role": "assistant", "tool_calls": 5}, "the tool_calls of message 0"),
        ({"role": "assistant", "tool_calls": [{}]}, "a call in message 0"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "the arguments of a call",
        ),
    ],
)
def test_wrong_messages(llm: engine.LLM, message: Any, said: str) -> None:
    with pytest.raises(UsageError, match=f"^{said}"):
        llm.chat([message], **CHAT)


def test_a_text_may_come_in_parts(llm: engine.LLM) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    whole: Any = [{"role": "user", "content": "ab"}]
    assert llm.chat(parts, **CHAT).prompt_ids == llm.chat(whole, **CHAT).prompt_ids


# --- in an event loop ----------------------------------------------------------------------------------------------


def test_answers_in_an_event_loop(llm: engine.LLM) -> None:
    expected = [llm.chat(one, **CHAT) for one in CONVERSATIONS[:2]]

    async def pieces() -> tuple[str, engine.Generation]:
        stream = llm.stream_chat(CONVERSATIONS[0], **CHAT)
        return "".join([piece async for piece in stream]), stream.answer

    async def both() -> Any:
        return await asyncio.gather(pieces(), llm.stream_chat(CONVERSATIONS[1], **CHAT))

    (text, first), second = asyncio.run(both())
    assert text == first.text
    assert [bits(first), bits(second)] == list(map(bits, expected))


def test_an_answer_in_an_event_loop_ends_early(llm: engine.LLM) -> None:
    async def leave() -> engine.Generation:
        stream = llm.stream("class A:\n", max_tokens=100, ignore_eos=True)
        async for _ in stream:
            break
        await stream.aclose()
        return stream.answer

    async def cancel() -> engine.Generation:
        stream = llm.stream("class A:\n", max_tokens=200, ignore_eos=True)

        async def whole() -> engine.Generation:
            return await stream

        task = asyncio.create_task(whole())
        while not stream.answer.ids:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return stream.answer

    for early in (leave(), cancel()):
        answer = asyncio.run(early)
        assert answer.finish_reason is None and 0 < len(answer.ids) < 200


# --- how arguments are named ---------------------------------------------------------------------------------------


def test_errors_name_arguments_or_flags(llm: engine.LLM, capsys: pytest.CaptureFixture[str]) -> None:
    long = "x = 1\n" * 200
    with pytest.raises(ContextError, match=r"a larger context \(n_ctx=\.\.\.\)\.$"):
        llm.complete(long)
    from engine.run import main

    assert main(["-p", long, "-c", "64"]) == 2
    assert capsys.readouterr().err.strip().endswith("choose a larger context (-c).")
    sentence = 'leave out (mtp=False), use device="cpu" or ds4_rounding=True or cache_type=...; n_ctx=5.'
    assert str(EngineError(sentence)) == sentence
    with named_by_flags():
        told = str(EngineError(sentence))
    assert told == "leave out (--no-mtp), use --device cpu or --ds4-rounding or --cache-type; n_ctx=5."


def test_every_flag_of_an_argument_exists() -> None:
    from engine.cli import embed, flags, serve_flags
    from engine.errors import FLAGS

    actions = [action for each in (flags, embed, serve_flags) for action in each.parser()._actions]
    known = {flag for action in actions for flag in action.option_strings}
    assert {flag for name, flag in FLAGS.items() if name not in ("parallel", "mtp")} | {"--no-mtp"} <= known


def test_a_class_that_is_not_called_says_what_is() -> None:
    make: Any = bitmirror.LLM
    with pytest.raises(UsageError, match=r"^a model is opened by load\(\).*write load\(\.\.\.\) instead"):
        make("pycoder", n_ctx=64)
