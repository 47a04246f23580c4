"""Answers with schemas of every kind: each parses, is valid, and is the same with drafts."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llguidance", reason="grammars need the extra serve")
pytest.importorskip("jsonschema", reason="the extra dev has it")

import engine
from tests.conftest import shared_path
from tests.schemas import check, from_folder

NAME = {"type": "string", "minLength": 1, "maxLength": 9}


def closed(**properties: Any) -> dict[str, Any]:
    """An object with all of these properties and no others."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS: dict[str, Any] = {
    "bounds of integers": closed(a={"type": "integer", "minimum": -3, "exclusiveMaximum": 1205}, b={"type": "integer"}),
    "bounds of numbers": closed(
        a={"type": "number", "exclusiveMinimum": 0.5, "maximum": 1.75}, b={"maximum": -1e3, "type": "number"}
    ),
    "multiples": {
        "type": "array",
        "items": {"type": "integer", "multipleOf": 5, "minimum": 10, "maximum": 90},
        "maxItems": 4,
    },
    "lengths": closed(a={"type": "string", "minLength": 3, "maxLength": 4}, b=NAME),
    "patterns": closed(
        id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"}, hex={"pattern": "^#([0-9a-f]{6})$", "type": "string"}
    ),
    "formats": closed(**{name: {"type": "string", "format": name} for name in ("date", "uuid", "ipv4")}),
    "several types": {"type": ["null", "boolean", "array"], "maxItems": 1},
    "any of some": {
        "type": "array",
        "items": {"anyOf": [{"const": 1}, {"type": "null"}, closed(x=NAME)]},
        "minItems": 3,
        "maxItems": 3,
    },
    "one of some": {"oneOf": [closed(kind={"const": "a"}, n={"type": "integer"}), closed(kind={"const": "b"}, s=NAME)]},
    "all of some": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}, {"multipleOf": 2}]},
    "constants": {"enum": ["a b", 'quo"te', 12.5, None, {"x": [1, {"y": "é"}]}, [], "line\nbreak", "\u0001", "日本"]},
    "tuples": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, NAME, {"type": "integer"}],
        "items": False,
        "minItems": 3,
    },
    "rest of a tuple": {
        "type": "array",
        "prefixItems": [{"const": "head"}],
        "items": {"type": "boolean"},
        "maxItems": 4,
    },
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}, "c": NAME, "d": {"type": "integer"}},
        "required": ["c"],
        "additionalProperties": False,
    },
    "other properties": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "properties by pattern": {
        "type": "object",
        "patternProperties": {"^x-[a-z]{1,3}$": {"type": "integer"}, "^y-": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "a recursive list": {
        "$defs": {"node": {"anyOf": [{"type": "null"}, closed(value=NAME, next={"$ref": "#/$defs/node"})]}},
        "$ref": "#/$defs/node",
    },
    "a tree": {
        "$defs": {
            "node": closed(name=NAME, children={"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2})
        },
        "$ref": "#/$defs/node",
    },
    "two that refer to each other": {
        "$defs": {
            "a": {"type": "array", "items": {"$ref": "#/$defs/b"}, "maxItems": 1},
            "b": {"anyOf": [{"type": "boolean"}, closed(a={"$ref": "#/$defs/a"})]},
        },
        "$ref": "#/$defs/a",
    },
    "references beside others": {
        "$defs": {"size": {"type": "integer", "minimum": 1}},
        **closed(width={"$ref": "#/$defs/size", "maximum": 99}, height={"$ref": "#/$defs/size"}),
    },
    "names to be escaped": closed(
        **{'a "quoted" name': {"const": 1}, "tab\t": {"const": 2}, "ünï": {"const": 3}, "": NAME}
    ),
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"flag": {"type": "boolean"}},
        **closed(
            flag={"$ref": "#/definitions/flag"},
            pair={"type": "array", "items": [NAME, {"const": 0}], "minItems": 2, "maxItems": 2},
        ),
    },
    "a call of a function": closed(
        name={"const": "get_weather"},
        arguments=closed(
            city=NAME, unit={"enum": ["celsius", "fahrenheit"]}, days={"type": "integer", "minimum": 1, "maximum": 7}
        ),
    ),
    "annotations": {
        "title": "t",
        "description": "d",
        "examples": [1],
        "default": 3,
        "deprecated": True,
        **closed(a=NAME),
    },
    "anything": {"maxItems": 2, "type": "array", "items": {}},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[engine.LLM]:
    with engine.load(device="cpu", n_ctx=512, n_threads=1) as found:
        yield found


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_valid(llm: engine.LLM, name: str) -> None:
    for seed in range(1, 6):
        found = check(llm, SCHEMAS[name], seed, max_tokens=120)
        if found.outcome != "unfinished":
            break
    assert found.outcome == "valid", found


@pytest.mark.thorough
def test_a_public_collection(llm: engine.LLM) -> None:
    """A hundred files of ``maskbench/data`` of https://github.com/guidance-ai/jsonschemabench."""
    schemas = list(from_folder(shared_path("schemas")))
    counts: Counter[str] = Counter()
    for i in np.random.default_rng(1).permutation(len(schemas))[:100].tolist():
        name, schema = schemas[i]
        result = check(llm, schema, i)
        assert result.outcome not in ("invalid", "differs", "failed"), (name, result)
        counts[result.outcome] += 1
    assert counts["valid"] > counts.total() / 2, counts
