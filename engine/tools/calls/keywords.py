"""What the values of the keywords of a JSON schema must be."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from engine.checks import described
from engine.tools.calls.function import Unenforceable


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


_SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (lambda value: _is_text(value) or _are_texts(value), "the name of a type or a list of names"),
    **dict.fromkeys(("properties", "$defs", "definitions"), (_is_object, "an object")),
    **dict.fromkeys(("enum", "anyOf", "oneOf", "allOf", "prefixItems"), (_is_list, "a list")),
    "required": (_are_texts, "a list of names"),
    **dict.fromkeys(("format", "pattern", "$ref"), (_is_text, "a text")),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), (is_number, "a whole number")),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), (is_number, "a number")),
    "multipleOf": (is_number, "a number"),
}
"""What the values of keywords must be."""


def check_shapes(schema: Mapping[str, Any]) -> None:
    """Raise Unenforceable if a keyword of a schema has a value of a wrong type."""
    for keyword, value in schema.items():
        if value is None or keyword not in _SHAPES:
            continue
        suits, wanted = _SHAPES[keyword]
        if not suits(value):
            raise Unenforceable(f"has a schema whose {keyword} must be {wanted}, not {described(value)}")
