"""Calls whose parameters stand between tags, one after the other, in the order of the schema."""

from collections.abc import Callable

from engine.tools.calls.function import Function
from engine.tools.calls.rules import Rules
from engine.tools.calls.schemas import Schema, members

KEY = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"
"""The regular expression of the names of parameters that no schema lists."""


def parameters(rules: Rules, function: Function, parameter: Callable[[str | None, Schema], str]) -> str:
    """The parameters of a function, "" if it has none.

    parameter: makes the expression of one parameter from its name, None for any name, and its schema.  Raises Unenforceable.
    """
    found, more = members(function.schema, function.schema, function.strict)
    parts = []
    for member in found:
        body = rules.rule(parameter(member.name, member.schema))
        parts.append(body if member.required else f"{body}?")
    if more is not None:
        parts.append(f"{rules.rule(parameter(None, more))}*")
    return " ".join(parts)
