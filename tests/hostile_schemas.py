"""Schemas of tools as hostile clients send them, and what the formats of calls make of them."""

import random
from functools import cache
from typing import Any

from engine.errors import TemplateError
from engine.text.template.builtin import TEMPLATES
from engine.text.template.chat import ChatTemplate
from engine.tools.calls.function import Function, Unenforceable
from engine.tools.calls.schemas import pruned
from engine.tools.calls.select import calls_source
from engine.tools.calls.tagged import MAYBE, NONE, OPEN
from engine.tools.formats.tools import Tools, json_of
from tests.text.template import test_harmony
from tests.tools.calls.walks import MODELS, Model

KEYWORDS = (
    *(
        "type",
        "enum",
        "const",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "prefixItems",
        "anyOf",
        "oneOf",
    ),
    *("allOf", "$ref", "$defs", "definitions", "format", "pattern", "minLength", "maxLength", "minItems", "maxItems"),
    *(
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "multipleOf",
        "not",
        "patternProperties",
        "description",
        "title",
        "default",
    ),
    *("nullable", "x-guidance", "\u202e", ""),
)
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object", "", "String", "any")
TEXTS = (
    "",
    "p",
    "a b",
    "\ud800",
    "\x1b[31m\n",
    '<|"|>',
    "</parameter>",
    "x" * 2000,
    "#",
    "^a+$",
    "(",
    "[",
    "date",
    "uri",
)
REFERENCES = (
    "#",
    "#/",
    "#/properties/p",
    "#/properties/q",
    "#/$defs/a",
    "#/$defs/b",
    "#/properties/p/anyOf/0",
    "other.json",
)
NUMBERS = (0, -1, 1, 5, 0.5, -0.0, 1e308, float("inf"), -float("inf"), 2**31, 2**63, 10**40, 3.0)


def anything(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randrange(8 if depth < 4 else 6)
    if kind < 6:
        return (None, rng.random() < 0.5, rng.choice(NUMBERS), rng.choice(TEXTS), rng.choice(TYPES), [])[kind]
    if kind == 6:
        return [anything(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice((*KEYWORDS, *TEXTS)): anything(rng, depth + 1) for _ in range(rng.randrange(4))}


def schema(rng: random.Random, depth: int = 0) -> Any:
    """A schema, parts of which may be anything."""
    if rng.random() < 0.06:
        return anything(rng, depth)
    if depth > 5:
        return {"type": rng.choice(TYPES)}
    found: dict[str, Any] = {"type": rng.choice(TYPES[:7])} if rng.random() < 0.5 else {}
    for keyword in rng.sample(KEYWORDS, rng.choice((0, 1, 1, 2, 3))):
        found[keyword] = anything(rng) if rng.random() < 0.15 else _value(rng, keyword, depth)
    return found


def _value(rng: random.Random, keyword: str, depth: int) -> Any:
    if keyword == "type":
        return rng.choice((5, None, [], [[]], [{}], True, {}, list(TYPES), ["string", "null"], ["integer", 5], *TYPES))
    if keyword in ("properties", "$defs", "definitions", "patternProperties"):
        return {name: schema(rng, depth + 1) for name in rng.sample(("p", "q", "a", "b", *TEXTS), rng.randrange(4))}
    if keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        return [schema(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 2, 3)))]
    if keyword in ("items", "additionalProperties", "not"):
        return rng.choice((True, False)) if rng.random() < 0.2 else schema(rng, depth + 1)
    if keyword == "$ref":
        return rng.choice(REFERENCES)
    if keyword == "enum":
        return [anything(rng, 3) for _ in range(rng.choice((0, 1, 3, 50)))]
    if keyword == "required":
        return [rng.choice(("p", "q", 5, None, [], {})) if rng.random() < 0.3 else "p" for _ in range(rng.randrange(4))]
    if keyword in ("format", "pattern", "description", "title"):
        return rng.choice(TEXTS)
    return rng.choice(NUMBERS)


def chain(n: int, keyword: str) -> dict[str, Any]:
    """A schema whose n definitions each name the next one twice: written out, it has 2^n parts."""
    twice = [[{"$ref": f"#/$defs/d{i + 1}"}] * 2 for i in range(n)]
    defs: dict[str, Any] = {f"d{i}": {keyword: each} for i, each in enumerate(twice)}
    return {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/d0"}},
        "$defs": {**defs, f"d{n}": {"type": "string"}},
    }


def _nested(n: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for i in range(n):
        found = {"type": "array", "items": found} if i % 2 else {"type": "object", "properties": {"p": found}}
    return found


BOMBS: dict[str, Any] = {
    **{f"2^40 parts by {keyword}": chain(40, keyword) for keyword in ("anyOf", "oneOf", "allOf")},
    "anyOf of itself": {"properties": {"p": {"anyOf": [{"$ref": "#/properties/p"}, {"$ref": "#/properties/p"}]}}},
    "allOf of itself": {"properties": {"p": {"allOf": [{"$ref": "#/properties/p"}, {"$ref": "#/properties/p"}]}}},
    "a reference to itself": {"properties": {"p": {"$ref": "#/properties/p"}}},
    "the whole schema": {"properties": {"p": {"$ref": "#"}}},
    "3000 cases of oneOf": {
        "properties": {"p": {"oneOf": [{"type": "string", "enum": [f"{i}"]} for i in range(3000)]}}
    },
    "a huge enum": {"properties": {"p": {"enum": [f"v{i}" for i in range(5000)]}}},
    "30 levels": {"properties": {"p": _nested(30)}},
    "type 5": {"properties": {"p": {"type": 5}}},
    "1000 references in a row": {
        "properties": {f"p{i}": {"items": {"$ref": f"#/properties/p{i + 1}"}, "type": "array"} for i in range(1000)}
    },
}
"""Schemas that cost more than their size."""


def function(rng: random.Random) -> Function:
    """A function with such a schema for its parameters."""
    if rng.random() < 0.1:
        given = anything(rng)
    else:
        given = (
            schema(rng)
            if rng.random() < 0.3
            else {"type": "object", "properties": {"p": schema(rng), "q": schema(rng)}}
        )
    given = given if isinstance(given, dict) else {"type": "object", "properties": {"p": given}}
    return Function(rng.choice(("f", "f", "f", "a.b-c", "weather")), pruned(given), rng.random() < 0.5)


def tried(rng: random.Random, given: Function | None = None, model: Model | None = None) -> str:
    """Make the grammar of a function in one format and look up its parameters' types, as for an answer.

    Returns "source", or the sentence with which the function is refused.  Any other exception is a fault.
    """
    model = model or rng.choice(MODELS)
    one = given or function(rng)
    tools = Tools([{"type": "function", "function": {"name": one.name, "parameters": one.given}}])
    for name in (*tools.parameters(one.name), "p", "none"):
        json_of("5", tools.types(one.name, name))
    try:
        calls_source(
            model.format,
            [one],
            token=model.token,
            ends=model.tokenizer.eog_ids,
            special=(),
            forced=rng.random() < 0.5,
            several=rng.random() < 0.5,
            thought=rng.choice((OPEN, MAYBE, NONE)),
        )
    except Unenforceable as error:
        return f"the function {error}"
    return "source"


@cache
def _templates() -> list[ChatTemplate]:
    tokenizer = MODELS[0].tokenizer
    return [ChatTemplate.from_source(source, tokenizer) for source in (TEMPLATES["deepseek4"], test_harmony.SOURCE)]


def rendered(rng: random.Random) -> str:
    """Describe a function to a model by its chat template: "text", or the sentence of the error."""
    one = function(rng)
    tools = [{"type": "function", "function": {"name": one.name, "description": "", "parameters": dict(one.given)}}]
    try:
        rng.choice(_templates()).encode([{"role": "user", "content": "Hello"}], tools=tools)
    except TemplateError as error:
        return str(error)
    return "text"
