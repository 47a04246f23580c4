"""Seed OSS: parameters between tags, their values as plain text."""

import re

from engine.tools.formats.reader import SYMBOLS, Steps
from engine.tools.formats.tagged_values import TaggedValues

_NAME = re.compile(rf"[^<>\s{SYMBOLS}]+")


class SeedOss(TaggedValues):
    """Thoughts, text, and calls::

    <seed:think>
    THOUGHT
    </seed:think>TEXT
    <seed:tool_call>
    <function=NAME>
    <parameter=KEY>VALUE</parameter>
    </function>
    </seed:tool_call>
    """

    THOUGHT = ("<seed:think>", "</seed:think>")
    OPENS = ("<seed:tool_call>",)
    CLOSES = ("</seed:tool_call>",)
    TAGS = ("<function=", "</function>", "<parameter=", "</parameter>")
    PARAMETER, VALUE_END, CALL_END = "<parameter=", "</parameter>", "</function>"

    def call(self, symbol: str) -> Steps[None]:
        yield from self.input.blanks()
        yield from self.input.accept(self.input.symbol("<function="))
        yield from self.parameters((yield from self.key()))

    def key(self) -> Steps[str]:
        name = yield from self.input.run(_NAME)
        yield from self.input.accept(">")
        return name
