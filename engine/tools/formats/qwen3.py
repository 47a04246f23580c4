"""Qwen 2.5 and 3, Hermes, Granite 4 and SmolLM3: JSON between tags."""

from engine.tools.formats.json_call import JsonCalls
from engine.tools.formats.reader import Steps


class Qwen3(JsonCalls):
    """Thoughts, text, and calls::

        <think>
        THOUGHT
        </think>

        TEXT
        <tool_call>
        {"name": "NAME", "arguments": {"KEY": VALUE}}
        </tool_call>

    Arguments are passed on as they arrive.
    """

    THOUGHT = ("<think>", "</think>")
    OPENS = ("<tool_call>",)
    CLOSES = ("</tool_call>",)

    def call(self, symbol: str) -> Steps[None]:
        yield from self.json_call(arguments_needed=False)
