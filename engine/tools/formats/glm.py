"""GLM 4.5 to 4.7, Laguna and Ling 3: keys and values between tags."""

import re

from engine.tools.formats.reader import SYMBOLS, Steps
from engine.tools.formats.tagged_values import TaggedValues

_NAME = re.compile(rf"[^\s<>{SYMBOLS}]+")
_KEY = re.compile(rf"[^{SYMBOLS}]+")


class Glm(TaggedValues):
    """Thoughts, text, and calls::

        <think>THOUGHT</think>
        TEXT
        <tool_call>NAME
        <arg_key>KEY</arg_key>
        <arg_value>VALUE</arg_value>
        </tool_call>

    GLM 4.7 writes no newlines between the tags.
    """

    THOUGHT = ("<think>", "</think>")
    OPENS = ("<tool_call>",)
    CLOSES = ("</tool_call>",)
    TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    PARAMETER, VALUE_END, CALL_END = "<arg_key>", "</arg_value>", "</tool_call>"

    def call(self, symbol: str) -> Steps[None]:
        yield from self.input.blanks()
        yield from self.parameters((yield from self.input.run(_NAME)))

    def key(self) -> Steps[str]:
        key = yield from self.input.run(_KEY)
        yield from self.input.accept(self.input.symbol("</arg_key>"))
        yield from self.input.blanks()
        yield from self.input.accept(self.input.symbol("<arg_value>"))
        return key.strip()
