"""DeepSeek V4, and V3.2: calls in a markup language, DSML, whose tags contain a token of their own."""

import re

from engine.tools.formats.reader import SYMBOLS, Steps
from engine.tools.formats.tagged_values import Kind, TaggedValues
from engine.tools.formats.tools import json_or_string

_MARK = "｜DSML｜"
_CALL, _CALL_END = f'<{_MARK}invoke name="', f"</{_MARK}invoke>"
_PARAMETER, _PARAMETER_END = f'<{_MARK}parameter name="', f"</{_MARK}parameter>"
_ESCAPED = f"&lt;/{_MARK}parameter>"
_NAME = re.compile(rf'[^"\n{SYMBOLS}]+')


class DeepSeek4(TaggedValues):
    """Thoughts, text, and calls::

        THOUGHT</think>TEXT

        <｜DSML｜tool_calls>
        <｜DSML｜invoke name="NAME">
        <｜DSML｜parameter name="KEY" string="true">TEXT</｜DSML｜parameter>
        <｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
        </｜DSML｜invoke>
        </｜DSML｜tool_calls>

    The prompt ends with ``<think>``, or with ``</think>`` if the model shall not think. Texts are passed on as they arrive;
    in them ``&lt;/｜DSML｜parameter>`` stands for the closing tag. What should be JSON and is none is passed on as a text.
    V3.2 writes ``function_calls`` instead of ``tool_calls``.
    """

    THOUGHT = ("<think>", "</think>")
    OPENS = (f"<{_MARK}tool_calls>", f"<{_MARK}function_calls>", _CALL)
    CLOSES = (f"</{_MARK}tool_calls>", f"</{_MARK}function_calls>")
    TAGS = (_MARK, _CALL_END, _PARAMETER, _PARAMETER_END, _ESCAPED)
    PARAMETER, VALUE_END, CALL_END = _PARAMETER, _PARAMETER_END, _CALL_END

    def call(self, symbol: str) -> Steps[None]:
        tag = self.input.symbol
        if symbol != tag(_CALL):
            yield from self.input.blanks()
            yield from self.input.accept(tag(_CALL))
        name = yield from self.input.run(_NAME)
        yield from self.input.literal('">')
        yield from self.parameters(name)

    def parameter(self, name: str) -> Steps[tuple[str, Kind]]:
        key = yield from self.input.run(_NAME)
        yield from self.input.literal('" string="')
        is_text = (yield from self.input.accept("tf")) == "t"
        yield from self.input.literal('rue">' if is_text else 'alse">')
        return key, None if is_text else json_or_string

    def spelled(self, text: str) -> str:
        return _PARAMETER_END if text == self.input.symbol(_ESCAPED) else super().spelled(text)
