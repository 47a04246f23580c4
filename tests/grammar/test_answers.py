"""Answers with a grammar: they follow it, and are the same with drafts, in a batch, and after preemption."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import engine
from engine import Grammar, SpeculationParams
from engine.decode.request import Request
from engine.errors import UsageError
from engine.speculative.draft_model import DraftModel
from tests.batching import Ask, alone, differing, together

pytest.importorskip("llguidance", reason="grammars need the extra serve")

PROMPT = "people = "
PLAIN = SpeculationParams(enabled=False)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 7, None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}

SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 2},
    {"anyOf": [{"type": "boolean"}, {"const": {"a": [1, 2.5]}}, {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}]},
    {"type": "string", "format": "date"},
    {
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/tree"}, "weight": {"type": "number", "minimum": 0, "maximum": 1}},
        "required": ["tree"],
        "additionalProperties": False,
    },
]
GRAMMARS = [Grammar.json_schema(schema) for schema in SCHEMAS]

LINES = Grammar.lark('start: line{3}\nline: NAME " = " (INT | NAME) "\\n"\nNAME: /[a-z_]{1,8}/\nINT: /[0-9]{1,4}/')


@pytest.fixture(scope="module")
def llm() -> Iterator[engine.LLM]:
    with engine.load(device="cpu", n_ctx=256, n_threads=1, parallel=2) as found:
        yield found


@pytest.fixture(scope="module")
def small() -> Iterator[engine.LLM]:
    with engine.load("pycoder-draft", device="cpu", n_ctx=256, n_threads=1, parallel=2) as found:
        yield found


@pytest.fixture(scope="module")
def mtp() -> Iterator[engine.LLM]:
    with engine.load("pycoder-moe-mtp", device="cpu", n_ctx=256, n_threads=1) as found:
        yield found


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft from the first step on."""
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)


@pytest.fixture
def drafting(llm: engine.LLM, small: engine.LLM, eager: None, monkeypatch: pytest.MonkeyPatch) -> engine.LLM:
    monkeypatch.setattr(llm, "draft", DraftModel(small, llm))
    return llm


WAYS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 3}]


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("n", range(len(SCHEMAS)))
def test_answers_are_valid(llm: engine.LLM, n: int, options: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="the extra dev has it")
    answer = llm.complete(PROMPT, grammar=GRAMMARS[n], max_tokens=160, speculation=PLAIN, **options)
    assert answer.finish_reason == "stop", answer.text
    value = json.loads(answer.text)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.validate(value, SCHEMAS[n], jsonschema.Draft202012Validator, format_checker=checker)
    assert not llm.tokenizer.eog_ids & set(answer.ids)


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("params", [{}, {"lookup": True}, {"sequential": True}, {"draft_p_min": 0.2}])
def test_drafts_of_a_model_do_not_show(drafting: engine.LLM, params: dict[str, Any], options: dict[str, Any]) -> None:
    for grammar in (GRAMMARS[0], LINES):
        given: dict[str, Any] = {"max_tokens": 60, "grammar": grammar} | options
        expected = drafting.complete(PROMPT, speculation=PLAIN, **given)
        found = drafting.complete(PROMPT, speculation=SpeculationParams(**params), **given)
        assert (found.ids, found.finish_reason) == (expected.ids, expected.finish_reason)
        statistics = found.speculation
        assert statistics is not None and statistics.accepted > 2
        # The draft model's choices follow the grammar, too: else it would fail at every blank and bracket.
        if params == {}:
            assert statistics.acceptance > 0.4


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", WAYS)
@pytest.mark.parametrize("accept", ["exact", "ratio", "p-min"])
def test_drafts_of_the_own_layer(mtp: engine.LLM, eager: None, options: dict[str, Any], accept: str) -> None:
    given: dict[str, Any] = {"max_tokens": 120, "grammar": GRAMMARS[1]} | options
    expected = mtp.complete(PROMPT, speculation=PLAIN, **given)
    found = mtp.complete(PROMPT, speculation=SpeculationParams(accept=accept, accept_p_min=0), **given)
    assert found.speculation is not None and found.speculation.accepted > 5
    assert len(json.loads(found.text)) == 2 and found.finish_reason == "stop"
    if accept == "exact" or options["temperature"] == 0:
        assert found.ids == expected.ids


def test_lookup_repeats_only_what_is_permitted(llm: engine.LLM, eager: None) -> None:
    """The prompt repeats what the grammar forbids; drafts that it forbids are not even read."""
    prompt = '{"a": [1, 2, 3, 4]}\n' * 3 + '{"a": ['
    given: dict[str, Any] = {"grammar": Grammar.regex(r"1, 2, [5-7], 4\]\}"), "temperature": 0}
    expected = llm.complete(prompt, speculation=PLAIN, **given)
    found = llm.complete(prompt, speculation=SpeculationParams(lookup=True), **given)
    assert found.ids == expected.ids and re.fullmatch(r"1, 2, [5-7], 4\]\}", found.text)
    assert found.speculation is not None and found.speculation.drafted == found.speculation.accepted > 0


def test_batching_and_preemption_do_not_show(drafting: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with different grammars and with none, with too few slots for all."""
    wanted: list[Ask] = []
    preempted: list[Request] = []
    preempt = drafting.core.scheduler.preemption.preempt

    def noted(request: Request) -> None:
        preempted.append(request)
        preempt(request)

    monkeypatch.setattr(drafting.core.scheduler.preemption, "preempt", noted)
    prompt = drafting.tokenize(PROMPT)
    for i in range(8):
        options: dict[str, Any] = {"max_tokens": 24, "seed": i, "temperature": (0.0, 1.0)[i % 2]}
        options |= {"grammar": (None, LINES, *GRAMMARS[:3])[i % 5], "logprobs": 2 * (i % 3 == 0)}
        options["speculation"] = (PLAIN, SpeculationParams(lookup=True), SpeculationParams())[i % 3]
        wanted.append(Ask(prompt + list(range(100, 100 + 9 * i)), options, pieces=5 if i == 7 else None))
    expected = [alone(drafting, ask) for ask in wanted]
    preempted.clear()
    assert differing(expected, together(drafting, wanted, seed=1)) == []
    assert any(request.sampler.matcher is not None and request.fetched for request in preempted)


def test_an_answer_goes_on_after_an_interruption(llm: engine.LLM) -> None:
    given: dict[str, Any] = {"grammar": GRAMMARS[1], "seed": 5, "speculation": PLAIN}
    expected = llm.complete(PROMPT, **given)
    answer = llm.generate(PROMPT, **given)
    for n, _ in enumerate(answer):
        if n in (0, 7, 8):
            llm.core.interrupt()
    assert answer.ids == expected.ids


def test_the_first_token_follows_the_grammar_too(llm: engine.LLM) -> None:
    assert llm.complete(PROMPT, grammar=Grammar.regex("[xyz]"), seed=1, logprobs=1).text in set("xyz")
    answer = llm.complete(PROMPT, grammar=Grammar.regex("[xyz]{9}"), max_tokens=1, seed=1)
    assert answer.finish_reason == "length" and re.fullmatch("[xyz]+", answer.text)


@pytest.mark.parametrize("speculation", [PLAIN, SpeculationParams(lookup=True)])
def test_ignore_eos_ends_only_what_is_complete(llm: engine.LLM, speculation: SpeculationParams) -> None:
    given: dict[str, Any] = {"ignore_eos": True, "seed": 1, "max_tokens": 30, "speculation": speculation}
    answer = llm.complete(PROMPT, grammar=Grammar.regex("(ab ?){1,8}"), **given)
    assert answer.finish_reason == "stop" and re.fullmatch("(ab ?){8}", answer.text)
    assert llm.complete(PROMPT, grammar=Grammar.regex("(ab ?)+"), **given).finish_reason == "length"


def test_healing_has_no_effect(llm: engine.LLM) -> None:
    given: dict[str, Any] = {"grammar": Grammar.regex("[a-z\n ]+"), "seed": 2, "max_tokens": 6}
    healed, plain = (llm.complete("def f():", heal=heal, **given) for heal in (True, False))
    assert healed.ids == plain.ids and healed.prompt_ids == llm.tokenize("def f():")


def test_special_tokens_can_be_part_of_an_answer(llm: engine.LLM) -> None:
    answer = llm.complete(PROMPT, grammar=Grammar.lark('start: "a" <|im_start|> "b"'), seed=1)
    assert answer.text == "ab" and answer.ids[1] == llm.tokenizer.token_id("<|im_start|>")


@pytest.mark.parametrize("speculation", [PLAIN, SpeculationParams()])
def test_a_limit_ends_the_answer_with_a_sentence(drafting: engine.LLM, speculation: SpeculationParams) -> None:
    """In the middle of the answer, at the same token with drafts; other answers go on."""
    large = Grammar.regex("y{9}" + "".join(f"({c}.*)?" for c in "abcdefghijklm") * 9)
    other = drafting.generate("x = ", max_tokens=20, temperature=0, speculation=PLAIN)
    next(other)
    answer = drafting.generate(PROMPT, grammar=large, temperature=0, speculation=speculation)
    message = "^the regular expression cannot be followed any further: it is too large or too ambiguous; "
    with pytest.raises(UsageError, match=message):
        list(answer)
    assert answer.done and answer.finish_reason is None and answer.text == "y" * 9
    rest = "".join(other)
    assert rest and drafting.complete("x = ", max_tokens=20, temperature=0, speculation=PLAIN).text.endswith(rest)


def test_a_ban_of_all_that_is_permitted_ends_the_answer(llm: engine.LLM) -> None:
    def no_x(ids: Sequence[int], logits: np.ndarray) -> None:
        logits[[id for id in range(logits.size) if b"x" in llm.tokenizer.token_bytes(id)]] = -np.inf

    answer = llm.generate(PROMPT, grammar=Grammar.regex("abx"), logits_processors=[no_x], seed=1)
    with pytest.raises(UsageError, match="a logits processor bans every token that the grammar permits"):
        list(answer)
    assert answer.text == "ab"


def test_what_is_not_a_grammar_is_refused(llm: engine.LLM) -> None:
    with pytest.raises(UsageError, match="grammar must be a Grammar, such as .*, not dict"):
        llm.generate(PROMPT, grammar={"type": "object"})  # type: ignore[call-overload]


def test_every_way_to_ask(llm: engine.LLM) -> None:
    import asyncio

    grammar = Grammar.json_schema({"enum": ["yes", "no"]})

    async def streamed() -> str:
        return "".join([piece async for piece in llm.stream(PROMPT, grammar=grammar, seed=1)])

    messages = [{"role": "user", "content": "x"}]
    chatted = llm.chat(messages, chat_template="chatml", grammar=grammar, seed=1).text
    assert {asyncio.run(streamed()), chatted} <= {'"yes"', '"no"'}
