"""gpt-oss: an answer of several messages, each with a header."""

import re

from engine.tools.formats.arguments import Arguments
from engine.tools.formats.parser import FormatParser
from engine.tools.formats.reader import SYMBOLS, Broken, Steps

_HEADER = re.compile(
    r"(?: to=functions\.(\S+))?<\|channel\|>(analysis|commentary|final)(?: to=functions\.(\S+))?(?:\s*json)?\s*"
)
_TEXT = re.compile(rf"[^{SYMBOLS}]+")
_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"


class GptOss(FormatParser):
    """Thoughts, calls and text, each a message::

        <|channel|>analysis<|message|>THOUGHT<|end|>
        <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"KEY": VALUE}<|call|>
        <|start|>assistant<|channel|>final<|message|>TEXT<|return|>

    (without the newlines). The function may also be named in the role: ``<|start|>assistant to=functions.NAME<|channel|>…``,
    without ``<|start|>`` at the beginning of the answer. Text in the channel ``commentary`` is text. A newline is put
    between two thoughts, and between two texts.
    """

    CLOSES = ("<|end|>", "<|call|>", "<|return|>")
    HEADER = (_CHANNEL, "final", _MESSAGE)
    TAGS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN)

    def _answer(self) -> Steps[None]:
        said: set[bool] = set()
        while (yield from self.input.peek()):
            self._known = False
            yield from self.attempt(self._header())
            yield from self._body(said)

    def is_opening(self, pending: str) -> bool:
        return pending[:1] in (self.input.symbol(_START), self.input.symbol(_CHANNEL)) or pending.startswith(" to=")

    def _header(self) -> Steps[None]:
        """Reads the header of a message, and the call if it is one."""
        tag = self.input.symbol
        if (yield from self.input.peek()) == tag(_START):
            self.input.take(1)
            yield from self.input.literal("assistant")
        header = ""
        if (yield from self.input.peek()) == " ":
            yield from self.input.literal(" to=")
            header = " to=" + (yield from self.input.run(_TEXT))
        yield from self.input.accept(tag(_CHANNEL))
        header += _CHANNEL + (yield from self.input.run(_TEXT))
        if (yield from self.input.peek()) == tag(_CONSTRAIN):
            self.input.take(1)
            header += yield from self.input.run(_TEXT)
        yield from self.input.accept(tag(_MESSAGE))
        found = _HEADER.fullmatch(header)
        if not found:
            raise Broken
        role, channel, function = found.groups()
        if role or function:
            yield from self._call(role or function)
        elif channel == "analysis":
            if not self.looks_for_reasoning:
                raise Broken
            self.thinking = True
        self._known = True

    def _call(self, name: str) -> Steps[None]:
        yield from self.input.blanks()
        following = yield from self.input.peek()
        if not self.looks_for_calls or not self.tools.has(name) or following != "{":
            raise Broken
        self.begin(name)
        yield from self.object(Arguments(self.input.spelled))
        yield from self.end()

    def _body(self, said: set[bool]) -> Steps[None]:
        """Says the text of a message; the tag after it is text if the header was."""
        ends = "".join(map(self.input.symbol, self.CLOSES))
        begun = False
        while (found := (yield from self.input.peek())) and found != self.input.symbol(_START):
            text = self.input.match(_TEXT) or self.input.take(1)
            if found in ends and self._known:
                break
            separator = "\n" if not begun and self.thinking in said else ""
            self._flush(separator + self.input.spelled(text))
            said.add(self.thinking)
            begun = True
            if found in ends:
                break
        self.input.mark()
        self.thinking = False
