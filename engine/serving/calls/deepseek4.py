"""The grammar of calls of DeepSeek V4 and V3.2."""

from functools import partial

from engine.serving.calls.function import Function, Unenforceable
from engine.serving.calls.parameters import KEY, parameters
from engine.serving.calls.schemas import Schema, choices, divided, patterns, with_definitions
from engine.serving.calls.tagged import Tagged
from engine.serving.formats.deepseek4 import DeepSeek4

_BLOCK, _BLOCK_V3 = "<｜DSML｜tool_calls>", "<｜DSML｜function_calls>"
_END = "</｜DSML｜parameter>\n"


class DeepSeek4Calls(Tagged):
    """Calls as :class:`engine.serving.formats.deepseek4.DeepSeek4` reads them: strings as plain text, other values as JSON,
    which of both an attribute says."""

    FORMAT = DeepSeek4
    OPENINGS = FORCED = (_BLOCK, _BLOCK_V3)
    MANY = True

    def rest(self, opening: str) -> str:
        bodies = []
        for function in self.functions:
            values = parameters(self.rules, function, partial(self._parameter, function))
            # Templates leave a line empty where parameters would be.
            body = f"({values} | {self.rules.plain(chr(10))})" if "*" in values else values or '"\\n"?'
            bodies.append(
                f"{self.rules.text(f'<｜DSML｜invoke name={chr(34)}{function.name}{chr(34)}>' + chr(10))} {body}"
            )
        calls = f"({self.alternatives(bodies)} {self.rules.text('</｜DSML｜invoke>' + chr(10))}){'+' if self.several else ''}"
        return f"{self.rules.plain(chr(10))} {self.rules.rule(calls)} {self.rules.text(opening.replace('<', '</', 1))}"

    def _parameter(self, function: Function, key: str | None, schema: Schema) -> str:
        text, root, strict = self.rules.text, function.schema, function.strict
        if key is None:
            name = self.rules.terminal(self.rules.regex([KEY]))
        elif any(character in key for character in '"\n') or any(tag in key for tag in self.rules.tags) or not key:
            raise Unenforceable(f"has a parameter {key[:40]!r}, whose name has quotes or line breaks")
        else:
            name = self.rules.plain(key)
        try:
            strings, others = divided(schema, root, strict)
            bodies = []
            for each in strings:
                if (values := choices(each)) is None:
                    bodies.append(self.rules.until(_END, patterns(each, strict)))
                    continue
                values = [value for value in values if not any(tag in value for tag in self.rules.tags)]
                bodies += [f"{self.rules.plain(value)} {text(_END)}" if value else text(_END) for value in values]
            value = {"anyOf": others} if len(others) > 1 else others[0] if others else None
        except Unenforceable:
            # As JSON a string can follow what a plain text cannot.
            bodies, value = [], schema
        kinds = []
        if bodies:
            kinds.append(
                f"{self.rules.plain(chr(34) + ' string=' + chr(34) + 'true' + chr(34) + '>')} ({' | '.join(bodies)})"
            )
        if value is not None:
            json = self.rules.json(with_definitions(value, root), strict)
            kinds.append(
                f"{self.rules.plain(chr(34) + ' string=' + chr(34) + 'false' + chr(34) + '>')} {json} {text(_END)}"
            )
        return f"{text('<｜DSML｜parameter name=' + chr(34))} {name} ({' | '.join(kinds)})"
