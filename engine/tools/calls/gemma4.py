"""The grammar of calls of Gemma 4."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from engine.tools.calls.function import Function, Unenforceable
from engine.tools.calls.parameters import KEY
from engine.tools.calls.schemas import (
    KINDS,
    Member,
    Schema,
    as_schema,
    check,
    choices,
    count,
    divided,
    members,
    patterns,
)
from engine.tools.calls.tagged import Tagged
from engine.tools.formats.gemma4 import Gemma4

_QUOTE = '<|"|>'
_BARE = re.compile(r'[^\s:,{}\[\]"<>]+')


class Gemma4Calls(Tagged):
    """Calls as :class:`engine.tools.formats.gemma4.Gemma4` reads them: keys without quotes, strings between quotes that
    are a tag, nothing escaped.

    Parameters come in the order of their names, in which templates write them.
    """

    FORMAT = Gemma4
    OPENINGS = FORCED = ("<|tool_call>",)
    THOUGHT_BEGIN = "thought\n"
    BETWEEN = ""

    def rest(self, opening: str) -> str:
        bodies = []
        for function in self.functions:
            arguments = _Values(self, function).object(function.schema)
            bodies.append(f"{self.rules.plain(f'call:{function.name}')} {arguments}")
        return f"{self.alternatives(bodies)} {self.rules.text('<tool_call|>')}"


class _Values:
    """The values of the parameters of one function."""

    def __init__(self, calls: Gemma4Calls, function: Function) -> None:
        self._rules = calls.rules
        self._function = function
        self._strict = function.strict
        self._root: Schema = function.schema
        self._known: dict[str, str] = {}

    def value(self, schema: Schema) -> str:
        """A value of a schema."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._known:
            # Noted first, since a schema may contain itself.
            self._known[key] = self._rules.reserved()
            self._rules.define(self._known[key], self._alternatives(schema))
        return self._known[key]

    def _alternatives(self, schema: Schema) -> str:
        if not schema:
            return self._anything()
        strings, others = divided(schema, self._root, self._strict, self._rules.spend)
        bodies: list[str] = []
        for each in strings:
            values = choices(each)
            if values is None:
                bodies.append(f"{self._rules.text(_QUOTE)} {self._rules.until(_QUOTE, patterns(each, self._strict))}")
            else:
                bodies += [self._literal(value) for value in values]
        for each in others:
            if (values := choices(each)) is not None:
                bodies += [self._literal(value) for value in values]
                continue
            bodies += [self._of_kind(kind, each) for kind in each["type"]]
        if not bodies:
            raise Unenforceable("has a parameter that no value can satisfy")
        return " | ".join(dict.fromkeys(bodies))

    def object(self, schema: Schema) -> str:
        """An object."""
        found, more = members(schema, self._root, self._strict)
        found = sorted(found, key=lambda member: member.name.lower())  # as Jinja's dictsort does
        extra = f'{self._rules.terminal(self._rules.regex([KEY]))} ":" {self.value(more)}' if more is not None else ""
        after = self._rules.rule(f'("," {extra})*' if extra else '""')
        first = self._rules.rule(f"({extra} {after})?" if extra else '""')
        for member in reversed(found):
            body = self._rules.rule(self._member(member))
            alone = f"{body} {after}"
            first = self._rules.rule(alone if member.required else f"{alone} | {first}")
            after = self._rules.rule(f'"," {alone}' if member.required else f'("," {body})? {after}')
        return self._rules.rule(f'"{{" {first} "}}"')

    def _member(self, member: Member) -> str:
        name = self._rules.plain(member.name)
        if not _BARE.fullmatch(member.name):
            name = self._literal(member.name)
        return f'{name} ":" {self.value(member.schema)}'

    def _anything(self) -> str:
        """Any value."""
        name, key = self._known["{}"], self._rules.terminal(self._rules.regex([KEY]))
        text = f"{self._rules.text(_QUOTE)} {self._rules.until(_QUOTE)}"
        plain = [self._of_kind(kind, {}) for kind in KINDS[1:4]]
        array, member = f'"[" ({name} ("," {name})*)? "]"', f'{key} ":" {name}'
        return " | ".join([text, *plain, array, f'"{{" ({member} ("," {member})*)? "}}"'])

    def _of_kind(self, kind: str, schema: Schema) -> str:
        if kind == "object":
            return self.object(schema)
        if kind == "array":
            return self._array(schema)
        bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        return self._rules.json(
            {"type": kind, **{name: schema[name] for name in bounds if name in schema}}, self._strict
        )

    def _array(self, schema: Schema) -> str:
        check(schema, self._strict)
        first, items = schema.get("prefixItems"), schema.get("items", True)
        begin = [self.value(as_schema(each)) for each in first] if isinstance(first, list) else []
        least = count(schema, "minItems") or 0
        most = count(schema, "maxItems")
        if items is False:
            most = len(begin) if most is None else min(len(begin), most)
        if most is not None and most < least:
            raise Unenforceable("has an array that must have more items than it can have")
        begin = begin[:most]
        if most is None or most > len(begin):
            item = self.value(as_schema(items))
            # The first item, which no comma precedes, counts as one of those that have places of their own.
            begin = begin or [item]
            body = _times(f'"," {item}', max(0, least - len(begin)), None if most is None else most - len(begin))
        else:
            body = ""
        for i, each in reversed(list(enumerate(begin))):
            own = f'"," {each} {body}' if i else f"{each} {body}"
            body = own if i < least else f"({own})?"
        return self._rules.rule(f'"[" {body} "]"')

    def _literal(self, value: Any) -> str:
        """One value as it is written."""
        if isinstance(value, str):
            if any(tag in value for tag in self._rules.tags):
                raise Unenforceable("has a text with a tag of this model's calls among its values")
            inner = f" {self._rules.plain(value)} " if value else " "
            return f"{self._rules.text(_QUOTE)}{inner}{self._rules.text(_QUOTE)}"
        if isinstance(value, list):
            return f'"[" {self._row(map(self._literal, value))} "]"'
        if isinstance(value, Mapping):
            members = (f'{self._literal(key)} ":" {self._literal(each)}' for key, each in value.items())
            return f'"{{" {self._row(members)} "}}"'
        return self._rules.plain(json.dumps(value))

    def _row(self, bodies: Iterable[str]) -> str:
        """Expressions with commas between them."""
        return ' "," '.join(bodies)


def _times(body: str, least: int, most: int | None) -> str:
    """An expression ``least`` to ``most`` times in a row; None: any number of times."""
    return "" if most == 0 else f"({body}){{{least},{'' if most is None else most}}}"
