"""Random answers that a grammar permits are calls that follow their schemas, whatever the schema and the format."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

from engine.grammar.grammar import Grammar
from engine.grammar.matcher import UNSETTLED, Matcher
from engine.tools.calls.function import Function
from engine.tools.calls.schemas import FORMATS
from engine.tools.calls.tagged import MAYBE, OPEN
from tests.tiers import examples
from tests.tools.calls.walks import MODELS, Model, validate, walk

pytestmark = pytest.mark.together("serving")

WORDS = st.text("ab<>/{}[]\"' \n1-t", max_size=6)
PATTERNS = ("^[a-c]{1,3}$", "a|^b", "^a|b$", "x{2}", "^(on|off)$", "[0-9]/[0-9]", r"^\$[|]\|$")
SCALARS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(
        lambda n, m: {"type": "string", "minLength": n, "maxLength": n + m}, st.integers(0, 4), st.integers(0, 4)
    ),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, st.sampled_from(PATTERNS)),
    st.builds(
        lambda name: {"type": "string", "format": name},
        st.sampled_from(sorted(FORMATS)),
    ),
    st.builds(
        lambda n, m: {"type": "integer", "minimum": n, "maximum": n + m}, st.integers(-20, 20), st.integers(0, 99)
    ),
    st.builds(
        lambda kinds: {"type": kinds},
        st.lists(
            st.sampled_from(["string", "integer", "number", "boolean", "null"]), min_size=1, max_size=3, unique=True
        ),
    ),
    st.builds(lambda values: {"enum": values}, st.lists(WORDS | st.integers() | st.none() | st.booleans(), min_size=1)),
    st.builds(lambda value: {"const": value}, WORDS | st.integers(-5, 50)),
    st.sampled_from([{}, {"type": "number", "minimum": 0, "maximum": 1}, {"$ref": "#/$defs/s"}, {"$ref": "#/$defs/n"}]),
)


def objects(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of objects."""

    def made(properties: dict[str, Any], needed: int) -> dict[str, Any]:
        required = [name for i, name in enumerate(properties) if needed >> i & 1]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    names = st.sampled_from(["a", "b", "city", "x_1", "A-b", "size.x"])
    return st.builds(made, st.dictionaries(names, values, max_size=3), st.integers(0, 7))


def arrays(values: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of arrays."""
    items = st.builds(
        lambda items, n, m: {"type": "array", "items": items, "minItems": n, "maxItems": n + m},
        *(values, st.integers(0, 2), st.integers(0, 2)),
    )
    places = st.builds(
        lambda first, items, n: {"type": "array", "prefixItems": first, "items": items, "minItems": n},
        *(st.lists(values, min_size=1, max_size=2), st.just(False) | values, st.integers(0, 1)),
    )
    return items | places


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        arrays(inner)
        | objects(inner)
        | st.builds(lambda any_of: {"anyOf": any_of}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=4,
)
NODE = {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/n"}}
DEFINITIONS = {
    "s": {"type": "string", "maxLength": 3},
    "n": {"type": "object", "properties": NODE, "required": ["v"], "additionalProperties": False},
}


@given(st.sampled_from(MODELS), objects(SCHEMAS), st.integers(0, 99), st.booleans())
@examples(150)
def test_forced_calls(model: Model, schema: Any, seed: int, several: bool) -> None:
    functions = [Function("f", schema | {"$defs": DEFINITIONS}, strict=True), Function("f_2", {})]
    ids = walk(model, model.grammar(functions, several=several), seed)
    if ids is None:
        return  # it calls on and on, or nests
    answer = model.read(ids, functions)
    assert answer.calls and (several or len(answer.calls) == 1)
    assert answer.content == answer.reasoning == ""
    validate(answer, functions)


SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 9}, "n": {"type": ["integer", "null"]}},
    "required": ["text"],
}
FUNCTIONS = [Function("f", SCHEMA, strict=True), Function("g", {})]


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("thought", [OPEN, MAYBE])
def test_a_thought_before_calls(model: Model, thought: str) -> None:
    """A thought is any text; it is closed where it ends."""
    grammar = model.grammar(FUNCTIONS, several=False, thought=thought)

    def weight(text: str) -> float:
        return 0.01 if text in ("<|call|>", "<|start|>") else 1

    found = [ids for seed in range(2) if (ids := walk(model, grammar, seed, 250, weight)) is not None]
    for ids in found:
        answer = model.read(ids, FUNCTIONS, thought)
        assert len(answer.calls) == 1 and answer.content == ""
        validate(answer, FUNCTIONS)
    if model.tags:
        assert found
        assert_drafts_are_masked(model, grammar, found[0])


def assert_drafts_are_masked(model: Model, grammar: Grammar, ids: Sequence[int]) -> None:
    """Drafts have the masks of their own positions, wherever they cross the end of a thought, a tag or a value."""
    one, drafting = (Matcher(grammar, model.tokenizer, 0) for _ in range(2))
    expected = [one.mask(ids[:i]) for i in range(len(ids) + 1)]
    for i in range(len(ids)):
        drafts = ids[i : i + UNSETTLED - 1]
        for mask, own in zip(drafting.masks(ids[:i], drafts), expected[i : i + len(drafts) + 1], strict=True):
            assert np.array_equal(mask, own)


@pytest.mark.parametrize("model", [model for model in MODELS if model.tags], ids=str)
def test_calls_among_text_follow_their_schemas(model: Model) -> None:
    """What begins a call is so likely that text has many."""
    marks = (
        "<tool_call>",
        "<|tool_call>",
        *("<|tool_call|>", "[TOOL_CALLS]", "<minimax:tool_call>", "<seed:tool_call>", "<｜tool▁calls▁begin｜>"),
        *("<|tool_calls_section_begin|>", "<tool_calls>", "<|tools_prefix|>"),
        "｜DSML｜",
        "<|channel|>",
        "{",
        '{"',
        " " if model.format == "gpt_oss" else "",
    )
    for several in (True, False):
        grammar = model.grammar(FUNCTIONS, forced=False, several=several)
        found: list[Any] = []
        for seed in range(40):
            if found and seed >= 6:
                break  # some walks call on and on
            ids = walk(model, grammar, seed, 200, lambda text: 40 if text in marks else 1)
            if ids is not None:
                answer = model.read(ids, FUNCTIONS)
                validate(answer, FUNCTIONS)
                assert several or len(answer.calls) <= 1
                found += answer.calls
        assert found
