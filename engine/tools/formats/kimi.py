"""Kimi K2: the id and the arguments of a call between tokens."""

import re

from engine.tools.formats.named_call import NamedCalls
from engine.tools.formats.reader import SYMBOLS, Steps

_ID = re.compile(rf"[^\s{{}}{SYMBOLS}]+")
_NUMBER = re.compile(r":[0-9]+\Z")
_CALLS, _CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"


class Kimi(NamedCalls):
    """Thoughts, text, and calls::

        <think>THOUGHT</think>TEXT<|tool_calls_section_begin|>
        <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{"KEY": VALUE}<|tool_call_end|>
        <|tool_calls_section_end|>

    (without the newlines). The number counts the calls of a conversation. It is dropped.
    """

    THOUGHT = ("<think>", "</think>")
    OPENS = (_CALLS, _CALL)
    CLOSES = (_CALL_END, _CALLS_END)
    TAGS = (_ARGUMENTS,)

    def call(self, symbol: str) -> Steps[None]:
        tag = self.input.symbol
        if symbol == tag(_CALLS):
            yield from self.input.blanks()
            yield from self.input.accept(tag(_CALL))
        yield from self.input.blanks()
        id = yield from self.input.run(_ID)
        yield from self.input.blanks()
        yield from self.input.accept(tag(_ARGUMENTS))
        yield from self.named_call(_NUMBER.sub("", id.removeprefix("functions.")))
