"""The grammar of calls of Qwen3-Coder and its successors."""

import json
import re
from functools import partial
from typing import ClassVar

from engine.grammar.digits import MOST_DIGITS
from engine.tools.calls.function import Function, Unenforceable
from engine.tools.calls.parameters import KEY, parameters
from engine.tools.calls.schemas import Schema, choices, divided, patterns, with_definitions
from engine.tools.calls.tagged import Tagged
from engine.tools.formats.parser import FormatParser
from engine.tools.formats.qwen3_coder import Qwen3Coder
from engine.tools.formats.tools import NUMBER, Tools, json_of

_BLANKS = r"[\s\x1c-\x1f]*"
_WORDS = {
    "null": "(?i:null|none)",
    "boolean": "(?i:true|false)",
    "integer": r"-?(?:0|[1-9][0-9]*)(?:\.0*)?",
    "number": NUMBER.pattern,
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}
"""The texts that count as a value of a type and not as a string, if a parameter may be both."""
_INTEGER = f"-?(?:0|[1-9][0-9]{{0,{MOST_DIGITS - 1}}})"
_PLAIN = {
    "null": "null",
    "boolean": "true|false",
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(?:\.[0-9]{{1,{MOST_DIGITS}}})?(?:[eE][+-]?[0-9]{{1,{MOST_DIGITS}}})?",
}
"""Values that are written as they are in JSON."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class Qwen3CoderCalls(Tagged):
    """Calls as :class:`engine.tools.formats.qwen3_coder.Qwen3Coder` reads them: strings as plain text, other values as
    JSON.

    A string contains no tag of a call.  If a parameter may be a string or something else, a text that would be read as
    something else is no string.
    """

    FORMAT: ClassVar[type[FormatParser]] = Qwen3Coder
    OPENINGS: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    FORCED = ("<tool_call>",)
    CALL, CALL_END = "\n<function={}>\n", "</function>\n</tool_call>"
    PARAMETER, NAME_END = "<parameter=", ">\n"
    LINE_END, VALUE_END = "\n", "</parameter>\n"

    def rest(self, opening: str) -> str:
        bare = opening == "<function="
        bodies = []
        for function in self.functions:
            head = f"{function.name}>\n" if bare else self.CALL.format(function.name)
            values = parameters(self.rules, function, partial(self._parameter, function))
            bodies.append(f"{self.rules.text(head)} {values}")
        end = self.rules.text("</function>" if bare else self.CALL_END)
        return f"{self.alternatives(bodies)} {end}"

    def _parameter(self, function: Function, key: str | None, schema: Schema) -> str:
        if key is None:
            # The parser takes the values of parameters that it does not know for strings.
            name = f"{self.rules.terminal(self.rules.regex([KEY]))} {self.rules.text(self.NAME_END)}"
            types, schema = frozenset({"string"}), {}
        else:
            if not re.fullmatch(r"[^<>\s]+", key) or any(tag in key for tag in self.rules.tags):
                raise Unenforceable(f"has a parameter {key[:40]!r}, whose name has blanks or brackets")
            name = self.rules.text(key + self.NAME_END)
            described = {"name": function.name, "parameters": function.schema}
            types = Tools([{"type": "function", "function": described}]).types(function.name, key)
        return f"{self.rules.text(self.PARAMETER)} {name} ({self._value(function, schema, types)})"

    def _value(self, function: Function, schema: Schema, types: frozenset[str]) -> str:
        """A value and the tag after it; types: those that the parser tells apart."""
        root, strict, close = function.schema, function.strict, self.LINE_END + self.VALUE_END
        end = self.rules.text(close)
        if types and "string" not in types:
            return f"{self.rules.json(with_definitions(schema, root), strict)} {end}"
        strings, others = divided(schema, root, strict, self.rules.spend)
        if types <= {"string"}:
            others = []  # whatever the schema says, it becomes a string
        texts = [value for each in strings for value in choices(each) or ()]
        texts = [text for text in texts if json_of(text, types) == json.dumps(text, ensure_ascii=False)]
        lines = [text + self.LINE_END for text in texts if not any(tag in text for tag in self.rules.tags)]
        lines += [json.dumps(value) + self.LINE_END for each in others for value in choices(each) or ()]
        bodies = [f"{self.rules.plain(line)} {self.rules.text(self.VALUE_END)}" for line in lines]
        words, without = [], [f"{_BLANKS}(?:{_WORDS[kind]}){_BLANKS}" for kind in sorted(types) if kind in _WORDS]
        for each, kind in [(one, kind) for one in others if choices(one) is None for kind in one["type"]]:
            bounded = any(bound in each for bound in _BOUNDS)
            if kind in _PLAIN and not (bounded and kind in ("integer", "number")):
                words.append(_PLAIN[kind])
                continue
            # Nothing but the first character tells such a value from a string while it is written.
            without.append({"array": r"\[(?s:.*)", "object": r"\{(?s:.*)"}.get(kind, "[-0-9](?s:.*)"))
            bodies.append(f"{self.rules.json(with_definitions({**each, 'type': kind}, root), strict)} {end}")
        free = [patterns(each, strict) for each in strings if choices(each) is None]
        bodies += [self.rules.until(close, each, without, words) for each in free]
        if words and not free:
            bodies.append(f"{self.rules.terminal(self.rules.regex(['|'.join(words)]))} {end}")
        if not bodies:
            raise Unenforceable("has a parameter that no value in this format can satisfy")
        return " | ".join(dict.fromkeys(bodies))
