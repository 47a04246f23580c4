"""The answers of DeepSeek-V4: thoughts, text, and calls of functions in its markup language, DSML.

``THOUGHT</think>TEXT`` and then, if there are calls,

    <｜DSML｜tool_calls>
    <｜DSML｜invoke name="NAME">
    <｜DSML｜parameter name="NAME" string="true">TEXT</｜DSML｜parameter>
    <｜DSML｜parameter name="NAME" string="false">JSON</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜tool_calls>

The chat template wants these parts as separate values.  ``engine/text/template/deepseek4.jinja`` writes them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MARK = "｜DSML｜"
"""The token that begins each tag; a vocabulary with it belongs to a model that answers in this format."""

_BLOCK = f"<{MARK}tool_calls>"
_BLOCK_END = re.compile(rf"\s*</{MARK}tool_calls>\s*\Z")
_CALL = re.compile(rf'\s*<{MARK}invoke name="([^"]*)">')
_CALL_END = re.compile(rf"\s*</{MARK}invoke>")
_PARAMETER = re.compile(rf'\s*<{MARK}parameter name="([^"]*)" string="(true|false)">(.*?)</{MARK}parameter>', re.DOTALL)


def parts_of_answer(text: str) -> dict[str, Any]:
    """The values of a message of the assistant: ``content``, and ``reasoning_content`` and ``tool_calls`` if there are some.

    text: an answer as :meth:`Tokenizer.decode` gives it.  Text without marks is the content, and so are calls that are cut
    off or broken.
    """
    found: dict[str, Any] = {}
    thought, mark, rest = text.partition("</think>")
    if mark or text.startswith("<think>"):
        found["reasoning_content"] = thought.removeprefix("<think>")
        text = rest
    before, mark, _ = text.partition(_BLOCK)
    calls = _calls(text, len(before) + len(_BLOCK)) if mark else []
    if calls:
        found["tool_calls"] = calls
        text = before.removesuffix("\n\n")
    return {"content": text, **found}


def divided(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of the assistant with its answer divided into parts, unless it has parts of its own; arguments of calls that
    are JSON in a text become values."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, str) and not calls and message.get("reasoning_content") is None:
        return {**message, **parts_of_answer(content)}
    if not isinstance(calls, Sequence):
        return message
    return {**message, "tool_calls": [_with_values(call) for call in calls]}


def in_order_of_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose results of functions, after each message of the assistant, are in the order of its calls, as the model
    was trained to see them."""
    order: dict[Any, int] = {}
    runs: list[tuple[dict[Any, int], list[int]]] = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            calls = message.get("tool_calls")
            ids = [call.get("id") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
            order = {id: n for n, id in enumerate(ids) if isinstance(id, str)}
            runs.append((order, []))
        elif message["role"] == "tool" and runs:
            runs[-1][1].append(i)
    found = list(messages)
    for order, places in runs:
        called = sorted(places, key=lambda i: order.get(str(messages[i].get("tool_call_id")), 0))
        for place, i in zip(places, called, strict=True):
            found[place] = messages[i]
    return found


def _calls(text: str, at: int) -> list[dict[str, Any]]:
    """The calls of a block whose first tag ends at ``at``; none if the block is broken or does not end the text."""
    calls = []
    while call := _CALL.match(text, at):
        arguments: dict[str, Any] = {}
        at = call.end()
        while parameter := _PARAMETER.match(text, at):
            name, is_text, value = parameter.groups()
            arguments[name] = _unescaped(value) if is_text == "true" else _value(value)
            at = parameter.end()
        end = _CALL_END.match(text, at)
        if end is None:
            return []
        at = end.end()
        calls.append({"type": "function", "function": {"name": call[1], "arguments": arguments}})
    return calls if _BLOCK_END.match(text, at) else []


def _unescaped(text: str) -> str:
    return text.replace(f"&lt;/{MARK}parameter>", f"</{MARK}parameter>")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _with_values(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _value(function["arguments"])
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
