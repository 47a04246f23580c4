"""MiniMax M2: parameters between tags with attributes."""

import re

from engine.tools.formats.reader import SYMBOLS, Steps
from engine.tools.formats.tagged_values import TaggedValues

_NAME = re.compile(rf'[^"\n{SYMBOLS}]+')
_CALLS, _CALL = "<minimax:tool_call>", '<invoke name="'


class MiniMax(TaggedValues):
    """Thoughts, text, and calls::

    <think>
    THOUGHT
    </think>

    TEXT
    <minimax:tool_call>
    <invoke name="NAME">
    <parameter name="KEY">VALUE</parameter>
    </invoke>
    </minimax:tool_call>
    """

    THOUGHT = ("<think>", "</think>")
    OPENS = (_CALLS, _CALL)
    CLOSES = ("</minimax:tool_call>",)
    TAGS = ("</invoke>", '<parameter name="', "</parameter>")
    PARAMETER, VALUE_END, CALL_END = '<parameter name="', "</parameter>", "</invoke>"

    def call(self, symbol: str) -> Steps[None]:
        if symbol == self.input.symbol(_CALLS):
            yield from self.input.blanks()
            yield from self.input.accept(self.input.symbol(_CALL))
        yield from self.parameters((yield from self.key()))

    def key(self) -> Steps[str]:
        name = yield from self.input.run(_NAME)
        yield from self.input.literal('">')
        return name
