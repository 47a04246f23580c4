"""Schemas of parameters whose strings are not written as JSON: taken apart into strings and other values."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any, NamedTuple

from engine.checks import shown
from engine.tools.calls.function import Unenforceable
from engine.tools.calls.keywords import check_shapes, is_number

Schema = Mapping[str, Any]

KINDS = ("string", "number", "boolean", "null", "array", "object")
"""The types of values; an integer is a number."""

ANNOTATIONS = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema"),
    "x-guidance",
)
"""Keywords that say nothing about what a value may be."""

APPLICATORS = (
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "contains", "uniqueItems"),
    *("unevaluatedProperties", "unevaluatedItems", "propertyNames", "patternProperties", "minProperties"),
    "maxProperties",
)
"""Keywords that change what a value may be, and that no grammar follows."""

Spend = Callable[[], None]
"""Is called for each part of a schema that is looked at.  Raises Unenforceable if there are too many: references make a small
schema stand for any number of parts."""


_HEX = "[0-9a-fA-F]{1,4}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_DATE = "[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12][0-9]|3[01])"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_HOURS = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_SHORT_IPV6 = "|".join(f"(?:{_HEX}:){{1,{7 - n}}}(?::{_HEX}){{1,{n}}}" for n in range(1, 7))

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:[0-9]+W|{_DAYS}(?:{_HOURS})?|{_HOURS})",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(?:\.[A-Za-z0-9_+-]{{1,31}})?@{_LABEL}(?:\.{_LABEL})+",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": f"(?:{_HEX}:){{7}}{_HEX}|(?:{_HEX}:){{1,7}}:|{_SHORT_IPV6}|:(?::{_HEX}){{1,7}}|::",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#@!$&'()*+,;=%\[\]-]+",
}
"""Regular expressions of the formats of strings.  Not every text that they match is in use, such as a 30th of February."""

_ROOT = "arguments"
"""The name of the definition of a whole schema within a part of it."""


class Member(NamedTuple):
    """A parameter of a function."""

    name: str
    schema: Schema
    required: bool


class Divided(NamedTuple):
    """What a schema permits: strings of any of ``strings``, and values of any of ``others``."""

    strings: list[Schema]
    others: list[Schema]


def members(schema: Schema, root: Schema, strict: bool) -> tuple[list[Member], Schema | None]:
    """The members of an object in their order, and the schema of further ones, None if there cannot be any.

    Raises Unenforceable if the schema is strict and combines schemas.
    """
    check(schema, strict)
    for keyword in ("allOf", "anyOf", "oneOf"):
        if strict and keyword in schema:
            raise Unenforceable(f"has a schema with {keyword} where properties are listed, which cannot be enforced")
    properties, required = schema.get("properties"), schema.get("required")
    listed, needed = properties or {}, dict.fromkeys(required or ())
    found = [Member(name, as_schema(each), name in needed) for name, each in listed.items() if each is not False]
    found += [Member(name, {}, True) for name in needed if name not in listed]
    more = schema.get("additionalProperties", True)
    return found, None if more is False or "properties" in schema else resolved(as_schema(more), root)


def pruned(schema: Any) -> Any:
    """A schema without what describes values to readers only."""
    if not isinstance(schema, Mapping):
        return [pruned(each) for each in schema] if isinstance(schema, list) else schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ("enum", "const", "required"):
            found[name] = value
        elif name in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, Mapping):
            found[name] = {key: pruned(each) for key, each in value.items()}
        elif name not in ANNOTATIONS:
            found[name] = pruned(value)
    return found


def as_schema(value: Any) -> Schema:
    """A schema that is ``true``, or nothing that is one, as an object."""
    return value if isinstance(value, Mapping) else {}


def check(schema: Schema, strict: bool) -> None:
    """Raise Unenforceable if a keyword has a value that it cannot have, or if a strict schema has one that cannot be
    followed."""
    check_shapes(schema)
    for keyword in APPLICATORS:
        if strict and keyword in schema:
            raise Unenforceable(f"has a schema with {keyword}, which cannot be enforced")


def with_definitions(schema: Schema, root: Schema) -> dict[str, Any]:
    """A part of the schema ``root`` as one that stands alone."""
    if '"$ref"' not in json.dumps(schema):
        return dict(schema)
    return {**_moved(schema), "$defs": {_ROOT: _moved(root)}}


def _moved(value: Any) -> Any:
    """A schema, or a part of one, whose references lead to the definition of the whole."""
    if isinstance(value, Mapping):
        return {name: _moved(each) if name != "$ref" else _moved_reference(each) for name, each in value.items()}
    return [_moved(each) for each in value] if isinstance(value, list) else value


def _moved_reference(reference: Any) -> Any:
    if isinstance(reference, str) and reference.startswith("#"):
        return f"#/$defs/{_ROOT}{reference[1:]}"
    return reference


def resolved(schema: Schema, root: Schema) -> Schema:
    """A schema without a reference at its top."""
    for _ in range(32):
        check_shapes(schema)
        reference = schema.get("$ref")
        if reference is None:
            return schema
        found: Any = root
        for key in reference.removeprefix("#").split("/")[1:]:
            found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping) or not reference.startswith("#"):
            raise Unenforceable(f"has a schema with the reference '{shown(reference)}', which leads nowhere")
        schema = {**found, **{name: value for name, value in schema.items() if name != "$ref"}}
    raise Unenforceable("has a schema with references that run in a circle")


def divided(schema: Schema, root: Schema, strict: bool, spend: Spend) -> Divided:
    """Strings and other values of a schema.  Raises Unenforceable if it is strict and they cannot be told apart."""
    spend()
    schema = resolved(schema, root)
    check(schema, strict)
    for keyword in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(keyword)
        if not isinstance(branches, list) or not branches:
            continue
        outer = {name: value for name, value in schema.items() if name != keyword}
        branches = [resolved(as_schema(branch), root) for branch in branches]
        if keyword == "allOf":
            return divided(_merged([outer, *branches], strict), root, strict, spend)
        parts = [divided(_merged([outer, branch], strict), root, strict, spend) for branch in branches]
        strings, others = (
            [each for part in parts for each in part.strings],
            [each for part in parts for each in part.others],
        )
        if keyword == "oneOf" and strict:
            for one, other in chain(combinations(strings, 2), combinations(others, 2)):
                if not _apart(one, other, root, spend):
                    raise Unenforceable("has a schema with oneOf whose cases may overlap, which cannot be enforced")
        return Divided(strings, others)
    kinds = kinds_of(schema)
    if (values := choices(schema)) is not None:
        values = [value for value in values if kind_of(value) in kinds]
        texts, rest = [v for v in values if isinstance(v, str)], [v for v in values if not isinstance(v, str)]
        return Divided([{**schema, "enum": texts}] if texts else [], [{"enum": rest}] if rest else [])
    rest = [kind for kind in kinds if kind != "string"]
    given = schema.get("type") or ()
    if "integer" in given and "number" not in given:
        rest = ["integer" if kind == "number" else kind for kind in rest]
    return Divided([schema] if "string" in kinds else [], [{**schema, "type": rest}] if rest else [])


def _apart(one: Schema, other: Schema, root: Schema, spend: Spend) -> bool:
    """Whether it is plain that no value satisfies both schemas, which have no reference at their top."""
    spend()
    if not set(kinds_of(one)) & set(kinds_of(other)):
        return True
    values, others = choices(one), choices(other)
    if values is not None and others is not None:
        plain = {value for value in others if not isinstance(value, (list, Mapping))}
        rest = [value for value in others if isinstance(value, (list, Mapping))]
        return not any(value in (rest if isinstance(value, (list, Mapping)) else plain) for value in values)
    for name in set(one.get("required") or ()) & set(other.get("required") or ()):
        first, second = (resolved(as_schema((each.get("properties") or {}).get(name)), root) for each in (one, other))
        told = choices(first) is not None and choices(second) is not None
        if told and _apart(first, second, root, spend) and set(kinds_of(one)) == set(kinds_of(other)) == {"object"}:
            return True
    return False


def choices(schema: Schema) -> list[Any] | None:
    """The values that a schema lists; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def kinds_of(schema: Schema) -> list[str]:
    """The types that the keyword ``type`` of a schema permits, of :data:`KINDS`."""
    given = schema.get("type") or KINDS
    given = [given] if isinstance(given, str) else given
    return [kind for kind in KINDS if kind in given or (kind == "number" and "integer" in given)]


def kind_of(value: Any) -> str:
    """The type of a value, of :data:`KINDS`."""
    for kind, name in ((str, "string"), (bool, "boolean"), ((int, float), "number"), (list, "array")):
        if isinstance(value, kind):  # type: ignore[arg-type]
            return name
    return "null" if value is None else "object"


def _merged(schemas: Sequence[Schema], strict: bool) -> dict[str, Any]:
    """Schemas that all count, as one.  Raises Unenforceable if they are strict and say different things."""
    found: dict[str, Any] = {}
    for schema in schemas:
        for name, value in schema.items():
            if strict and name in found and found[name] != value and name not in ANNOTATIONS:
                raise Unenforceable(
                    f"has a schema that combines different values of {shown(name)}, which cannot be enforced"
                )
            found[name] = value
    return found


# --- strings -------------------------------------------------------------------------------------------------------


def patterns(schema: Schema, strict: bool) -> list[str]:
    """The regular expressions that a string of a schema must match.  Raises Unenforceable if it is strict and has a format
    that is not known."""
    found = []
    least, most = count(schema, "minLength"), count(schema, "maxLength")
    if least is not None or most is not None:
        found.append(f"(?s:.{{{least or 0},{'' if most is None else most}}})")
    if (pattern := schema.get("pattern")) is not None:
        found.append("|".join(f"(?:{each})" for each in map(_searched, _alternatives(pattern))))
    if (name := schema.get("format")) is not None:
        if name in FORMATS:
            found.append(FORMATS[name])
        elif strict:
            raise Unenforceable(f"has a schema with the format '{shown(name)}', which cannot be enforced")
    return found


def count(schema: Schema, keyword: str) -> int | None:
    """The number of items or characters that a keyword gives; None if it is missing.  Raises Unenforceable."""
    value = schema.get(keyword)
    if value is None:
        return None
    if not is_number(value) or value != int(value) or value < 0:
        raise Unenforceable(f"has a schema whose {keyword} is no whole number")
    return int(value)


def _searched(pattern: str) -> str:
    """The expression of all texts in which ``pattern``, which is no choice, is found."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
    inner = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"


def _alternatives(pattern: str) -> Iterator[str]:
    """The parts of a pattern between the bars that are in no group."""
    depth, begin, in_class, escaped = 0, 0, False, False
    for i, character in enumerate(pattern):
        if escaped or character == "\\":
            escaped = not escaped
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            yield pattern[begin:i]
            begin = i + 1
    yield pattern[begin:]
