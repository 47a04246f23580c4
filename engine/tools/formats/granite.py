"""Granite 3: a list of calls behind a tag."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

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


def with_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with calls as the text that the model writes for them, for its templates, which leave out earlier calls.

    Results of calls stay as they are: the templates write messages of every role.
    """
    own: list[dict[str, Any]] = []
    for each in messages:
        message = dict(each)
        if calls := message.pop("tool_calls", None):
            functions = [{key: call["function"][key] for key in ("name", "arguments")} for call in calls]
            listed = f"{Granite.OPENS[0]}{json.dumps(functions, ensure_ascii=False)}"
            message["content"] = f"{message['content'] or ''}{listed}"
        own.append(message)
    return own
