"""The functions that a request offers, and the types of their parameters."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
"""A number of JSON."""

MAX_DIGITS = 1000
"""Longer numbers are no numbers: Python's ``json`` refuses integers of more than 4300 digits."""

_INTEGER = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.0*)?")


class Tools:
    """The functions of a request by their names.

    tools: the ``tools`` of a request in OpenAI's form, mappings with ``type`` "function" and ``function``, which has ``name``
    and perhaps ``parameters``, a JSON schema; those of another type are left out. None: the functions are not known, so every
    name may be one.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        self._schemas: dict[str, Any] | None = None
        if tools is not None:
            functions = [tool["function"] for tool in tools if tool.get("type") == "function"]
            self._schemas = {function["name"]: function.get("parameters") for function in functions}

    def has(self, name: str) -> bool:
        """Whether ``name`` can be called."""
        return bool(name) and (self._schemas is None or name in self._schemas)

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The schemas of the parameters of a function by their names; empty if they are not known."""
        schema = (self._schemas or {}).get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return properties if isinstance(properties, Mapping) else {}

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """The JSON types that a parameter may have, such as "integer"; empty if its schema says nothing about them.

        Alternatives (``anyOf``, ``oneOf``), lists of types, ``enum``, ``const`` and references within the schema count.
        """
        schema = self.parameters(name).get(parameter)
        return frozenset(_types(schema, (self._schemas or {}).get(name)))


def json_of(text: str, types: Collection[str]) -> str:
    """``text``, which a model wrote for a parameter of one of ``types``, as JSON.

    It becomes the first of null, boolean, integer, number, array and object that is one of ``types`` and that the text
    denotes, else a string, which every text denotes. As null, ``True`` and the like count also as Python writes them, since
    templates do. A text "null" for a parameter that can be neither null nor a string also becomes null.
    """
    word = text.strip()
    lower = word.lower()
    if lower in ("null", "none") and ("null" in types or (types and "string" not in types)):
        return "null"
    if "boolean" in types and lower in ("true", "false"):
        return lower
    if len(word) <= MAX_DIGITS:
        if "integer" in types and (match := _INTEGER.fullmatch(word)):
            return match[1]
        if "number" in types and NUMBER.fullmatch(word):
            return word
    if ("array" in types and word.startswith("[")) or ("object" in types and word.startswith("{")):
        return json_or_string(text)
    return json.dumps(text, ensure_ascii=False)


def json_or_string(text: str) -> str:
    """``text`` itself, without blanks around it, if it is JSON, else a JSON string of it."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _types(schema: Any, root: Any) -> Iterator[str]:
    """The types that a schema allows; every part of it is visited once, since references can run in circles."""
    waiting, seen = [schema], set()
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        kind = schema.get("type")
        if isinstance(kind, str):
            yield kind
        elif isinstance(kind, list):
            yield from (name for name in kind if isinstance(name, str))
        else:
            choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
            yield from map(_type_of, choices if isinstance(choices, list) else [])
            branches = [schema.get(key) for key in ("anyOf", "oneOf", "allOf")]
            waiting += [branch for each in branches if isinstance(each, list) for branch in each]
            waiting.append(_referenced(schema.get("$ref"), root))


def _type_of(value: Any) -> str:
    """The JSON type of a value."""
    for kind, name in ((str, "string"), (bool, "boolean"), (int, "integer"), (float, "number"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


def _referenced(reference: Any, root: Any) -> Any:
    """The schema that ``#/a/b`` refers to; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for key in reference[2:].split("/"):
        root = root.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root
