"""DeepSeek V3, R1 and V3.1: the name and the arguments of a call between tokens."""

import re

from engine.tools.formats.named_call import NamedCalls
from engine.tools.formats.reader import SYMBOLS, Steps

_NAME = re.compile(rf"[^\s{{}}{SYMBOLS}]+")
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeek3(NamedCalls):
    """Thoughts, text, and calls::

        <think>THOUGHT</think>TEXT<｜tool▁calls▁begin｜>
        <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"KEY": VALUE}<｜tool▁call▁end｜>
        <｜tool▁calls▁end｜>

    (without the newlines after the text). V3 and R1 write ``function<｜tool▁sep｜>NAME`` and the arguments in a block of
    Markdown.
    """

    THOUGHT = ("<think>", "</think>")
    OPENS = (_CALLS, _CALL)
    CLOSES = (_CALL_END, _CALLS_END)
    TAGS = (_SEPARATOR,)

    def call(self, symbol: str) -> Steps[None]:
        tag = self.input.symbol
        if symbol == tag(_CALLS):
            yield from self.input.blanks()
            yield from self.input.accept(tag(_CALL))
        name = yield from self.input.run(_NAME)
        yield from self.input.accept(tag(_SEPARATOR))
        if name == "function" and (yield from self.input.peek()) not in ("{", "\n", "`"):
            name = yield from self.input.run(_NAME)
        yield from self.named_call(name)
