"""The answers of gpt-oss, which consist of several messages: thoughts, calls of functions, and the final text.

``<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>TEXT``; a call is
``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS``.  The tokens around the parts show in an
answer, so that parts can be told apart; the chat template wants them as separate values.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

_FUNCTION = re.compile(r"\bto=functions\.([^\s<]+)")


def parts_of_answer(text: str) -> dict[str, Any]:
    """The values of a message of the assistant: ``content``, and ``thinking`` and ``tool_calls`` if there are some.

    text: an answer as :meth:`Tokenizer.decode` gives it.  Text without marks is the content.
    """
    thoughts: list[str] = []
    contents: list[str] = []
    calls = []
    for i, part in enumerate(text.split("<|start|>")):
        header, mark, body = part.partition("<|message|>")
        body = body.partition("<|end|>")[0]
        if not mark:
            # Without marks it is a text, else the answer was cut off in the head of a part.
            contents += [] if i or "<|channel|>" in header else [header.removesuffix("<|end|>")]
        elif called := _FUNCTION.search(header):
            calls.append({"type": "function", "function": {"name": called[1], "arguments": _arguments(body)}})
        else:
            (thoughts if "<|channel|>analysis" in header else contents).append(body)
    if calls:  # the template takes one text before a call
        thoughts, contents = [*thoughts, *contents], []
    found: dict[str, Any] = {"content": "\n".join(filter(None, contents))}
    if thoughts:
        found["thinking"] = "\n".join(filter(None, thoughts))
    if calls:
        found["tool_calls"] = calls
    return found


def divided(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of the assistant with its answer divided into parts; parts that the message has already stay."""
    content = message.get("content")
    if not isinstance(content, str) or "<|channel|>" not in content:
        return message
    parts = parts_of_answer(content)
    return {**parts, **message, "content": parts["content"]}


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # an answer that was cut off
        return text
