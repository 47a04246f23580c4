"""Hunyuan: calls with a block of Markdown, or a list of JSON."""

import re

from engine.tools.formats.json_call import JsonCalls
from engine.tools.formats.named_call import NamedCalls
from engine.tools.formats.reader import SYMBOLS, Steps

_NAME = re.compile(rf"[^\s{{}}`{SYMBOLS}]+")


class Hunyuan(JsonCalls, NamedCalls):
    """Thoughts, text, and calls::

        <think>
        THOUGHT
        </think>
        <answer>
        TEXT
        <tool_calls>
        <tool_call>NAME
        ```json
        {"KEY": VALUE}
        ```
        </tool_call>
        </tool_calls>

    (``<answer>`` is text). ``function<tool_sep>`` may stand before the name, and the calls may be a list of objects with
    ``name`` and ``arguments``.
    """

    THOUGHT = ("<think>", "</think>")
    OPENS = ("<tool_calls>", "<tool_call>")
    CLOSES = ("</tool_call>", "</tool_calls>")
    TAGS = ("<tool_sep>",)

    def call(self, symbol: str) -> Steps[None]:
        tag = self.input.symbol
        yield from self.input.blanks()
        if symbol == tag("<tool_calls>") and (yield from self.input.peek()) == tag("<tool_call>"):
            self.input.take(1)
            yield from self.input.blanks()
        if (yield from self.input.peek()) in ("[", "{"):
            yield from self.json_calls()
            return
        name = yield from self.input.run(_NAME)
        if (yield from self.input.peek()) == tag("<tool_sep>"):
            self.input.take(1)
            name = yield from self.input.run(_NAME)
        yield from self.named_call(name)
