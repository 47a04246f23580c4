"""Gemma 4: thoughts in a channel, and calls in a dialect of JSON."""

import re

from engine.tools.formats.arguments import Arguments
from engine.tools.formats.parser import FormatParser
from engine.tools.formats.reader import SYMBOLS, Broken, Steps

_QUOTE = '<|"|>'
_NAME = re.compile(rf"[^\s{{}}{SYMBOLS}]+")


class Gemma4(FormatParser):
    """Thoughts, text, and calls::

        <|channel>thought
        THOUGHT
        <channel|>TEXT<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:3,KEY:[true,{KEY:null}]}<tool_call|>

    Nothing is escaped between the quotes ``<|"|>``. The closing tag of a call may be missing at the end, and more of them, or
    ``<|tool_response>``, may follow it: they are dropped.
    """

    THOUGHT = ("<|channel>", "<channel|>")
    OPENS = ("<|tool_call>",)
    CLOSES = ("<tool_call|>", "<|tool_response>")
    TAGS = (_QUOTE,)

    def thought(self) -> Steps[None]:
        yield from self.input.literal("thought")
        found = yield from self.input.peek()
        if found not in ("", "\n", self.input.symbol("<channel|>")):
            raise Broken

    def call(self, symbol: str) -> Steps[None]:
        yield from self.input.blanks()
        yield from self.input.literal("call:")
        name = yield from self.input.run(_NAME)
        yield from self.input.blanks()
        if (yield from self.input.peek()) != "{" or not self.tools.has(name):
            raise Broken
        self.begin(name)
        yield from self.object(Arguments(self.input.spelled, self.input.symbol(_QUOTE)))
        yield from self.end()
