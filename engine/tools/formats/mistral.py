"""Mistral, Ministral and Devstral: calls behind a tag, in a list of JSON or with the name before the arguments."""

import re

from engine.tools.formats.json_call import JsonCalls
from engine.tools.formats.reader import SYMBOLS, Broken, Steps

_NAME = re.compile(rf"[^\s{{}}\[\]{SYMBOLS}]+")
_ID = re.compile(rf"[^\s{{}}\[\]{SYMBOLS}]*")


class Mistral(JsonCalls):
    """Thoughts, text, and calls, of which newer models write the second kind::

        [THINK]THOUGHT[/THINK]TEXT[TOOL_CALLS][{"name": "NAME", "arguments": {"KEY": VALUE}, "id": "ID"}]
        TEXT[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{"KEY": VALUE}

    The id may be missing. It is dropped.
    """

    THOUGHT = ("[THINK]", "[/THINK]")
    OPENS = ("[TOOL_CALLS]",)
    TAGS = ("[CALL_ID]", "[ARGS]")

    def call(self, symbol: str) -> Steps[None]:
        yield from self.input.blanks()
        if (yield from self.input.peek()) in ("[", "{"):
            yield from self.json_calls()
            return
        name = yield from self.input.run(_NAME)
        if not self.tools.has(name):
            raise Broken
        tag = self.input.symbol
        if (yield from self.input.peek()) == tag("[CALL_ID]"):
            self.input.take(1)
            yield from self.input.run(_ID)
        if (yield from self.input.peek()) == tag("[ARGS]"):
            self.input.take(1)
        yield from self.input.blanks()
        yield from self.json_arguments(name)
        yield from self.end()
