"""The grammar of calls of DeepSeek V4 and V3.2."""

from functools import partial

from engine.tools.calls.function import Function, Unenforceable
from engine.tools.calls.parameters import KEY, parameters
from engine.tools.calls.schemas import Schema, choices, divided, patterns, with_definitions
from engine.tools.calls.tagged import Tagged
from engine.tools.formats.deepseek4 import DeepSeek4

_BLOCK, _BLOCK_V3 = "<｜DSML｜tool_calls>", "<｜DSML｜function_calls>"
_INVOKE, _INVOKE_END = '<｜DSML｜invoke name="{}">\n', "</｜DSML｜invoke>\n"
_PARAMETER, _END = '<｜DSML｜parameter name="', "</｜DSML｜parameter>\n"
_STRING, _JSON = '" string="true">', '" string="false">'
_LINE = r'"\n"'


class DeepSeek4Calls(Tagged):
    """Calls as :class:`engine.tools.formats.deepseek4.DeepSeek4` reads them: strings as plain text, other values as JSON,
    which of both an attribute says."""

    FORMAT = DeepSeek4
    OPENINGS = FORCED = (_BLOCK, _BLOCK_V3)
    MANY = True

    def rest(self, opening: str) -> str:
        text, bodies = self.rules.text, []
        for function in self.functions:
            values = parameters(self.rules, function, partial(self._parameter, function))
            # Templates leave a line empty where parameters would be.
            bodies.append(f"{text(_INVOKE.format(function.name))} {values} {_LINE}?")
        call = self.rules.rule(f"{self.alternatives(bodies)} {text(_INVOKE_END)}")
        calls = f"{call}+" if self.several else call
        return f"{_LINE} {calls} {text(opening.replace('<', '</'))}"

    def _parameter(self, function: Function, key: str | None, schema: Schema) -> str:
        text, root, strict = self.rules.text, function.schema, function.strict
        if key is None:
            name = self.rules.terminal(self.rules.regex([KEY]))
        elif not key or any(part in key for part in ('"', "\n", *self.rules.tags)):
            raise Unenforceable(f"has a parameter {key[:40]!r}, whose name has quotes or line breaks, or is empty")
        else:
            name = self.rules.plain(key)
        bodies: list[str] = []
        try:
            strings, others = divided(schema, root, strict, self.rules.spend)
            for each in strings:
                if (values := choices(each)) is None:
                    bodies.append(self.rules.until(_END, patterns(each, strict)))
                    continue
                values = [value for value in values if not any(tag in value for tag in self.rules.tags)]
                bodies += [f"{self.rules.plain(value)} {text(_END)}" for value in values]
            value: Schema | None = {"anyOf": others} if len(others) > 1 else others[0] if others else None
        except Unenforceable:
            # As JSON a string can follow what a plain text cannot.
            bodies, value = [], schema
        kinds = [f"{self.rules.plain(_STRING)} ({' | '.join(bodies)})"] if bodies else []
        if value is not None:
            json = self.rules.json(with_definitions(value, root), strict)
            kinds.append(f"{self.rules.plain(_JSON)} {json} {text(_END)}")
        if not kinds:
            raise Unenforceable("has a parameter that no value can satisfy")
        return f"{text(_PARAMETER)} {name} ({' | '.join(kinds)})"
