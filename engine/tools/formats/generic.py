"""Calls in JSON between tags, as the prompt describes them to models whose template does not, or in no known format."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.tools.formats.qwen3 import Qwen3
from engine.tools.formats.reader import Steps

_HEAD = """# Tools

You may call one or more of these functions to answer the user. Each line describes one of them as JSON:
"""
_TAIL = """
To call a function, write a JSON object with its name and its arguments between these tags:
<tool_call>
{"name": "the name of the function", "arguments": {"a parameter": "its value"}}
</tool_call>
The result follows in <tool_response></tool_response>. If no function helps, answer in plain text."""


class Generic(Qwen3):
    """Thoughts, text, and calls, which are an object or a list of objects::

    <think>
    THOUGHT
    </think>

    TEXT
    <tool_call>
    {"name": "NAME", "arguments": {"KEY": VALUE}}
    </tool_call>
    """

    def call(self, symbol: str) -> Steps[None]:
        yield from self.json_calls()


def describe(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text for a model that says which functions it may call, and how."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    return "\n".join((_HEAD, *lines, _TAIL))


def as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with calls and their results as text, for a template that may know neither.

    Results that follow each other become one message of the user.
    """
    own: list[dict[str, Any]] = []
    answered = False
    for each in messages:
        message = dict(each)
        is_result = message["role"] == "tool"
        if calls := message.pop("tool_calls", None):
            parts = [message["content"]] if message["content"] else []
            for call in calls:
                function = {key: call["function"][key] for key in ("name", "arguments")}
                parts.append(f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>")
            message["content"] = "\n".join(parts)
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": text}
            if answered:
                own[-1]["content"] += f"\n{text}"
                continue
        answered = is_result
        own.append(message)
    return own


def with_system(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """``messages`` with ``text`` at the end of the system message."""
    own = [dict(each) for each in messages]
    if own and own[0]["role"] == "system":
        own[0]["content"] = f"{own[0]['content']}\n\n{text}"
        return own
    return [{"role": "system", "content": text}, *own]
