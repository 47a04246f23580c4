"""Granite 3: a list of calls behind a tag."""

from engine.tools.formats.json_call import JsonCalls
from engine.tools.formats.reader import Steps


class Granite(JsonCalls):
    """Thoughts, text, and calls::

        <think>THOUGHT</think>TEXT<|tool_call|>[{"name": "NAME", "arguments": {"KEY": VALUE}}]

    Earlier releases write ``<tool_call>`` for the tag.
    """

    THOUGHT = ("<think>", "</think>")
    OPENS = ("<|tool_call|>", "<tool_call>")
    CLOSES = ("</tool_call>",)

    def call(self, symbol: str) -> Steps[None]:
        yield from self.json_calls()
