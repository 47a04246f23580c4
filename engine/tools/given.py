"""Conversations and functions as programs give them, checked and in the form that chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.checks import described
from engine.errors import UsageError
from engine.tools.choice import Tool, ToolChoice
from engine.tools.turns import Message

CONVERSATION = 'give a list such as [{"role": "user", "content": "Hello"}]'
FUNCTION = 'give a list such as [{"type": "function", "function": {"name": "now", "parameters": {}}}]'


def checked_messages(messages: object) -> list[Message]:
    """The messages of a conversation.  Raises UsageError unless they are a sequence of mappings that have a role and a text,
    or calls of functions."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise UsageError(f"messages must be a sequence of mappings, not {described(messages)}; {CONVERSATION}.")
    if not messages:
        raise UsageError(f"there are no messages to answer; {CONVERSATION}.")
    return [_message(i, message) for i, message in enumerate(messages)]


def _message(i: int, given: object) -> Message:
    if not isinstance(given, Mapping):
        raise UsageError(f"message {i} must be a mapping, not {described(given)}; {CONVERSATION}.")
    message = dict(given)
    calls = message.get("tool_calls")
    if not isinstance(message.get("role"), str) or not ("content" in message or calls):
        raise UsageError(f"message {i} needs a role, which is a text, and a content; {CONVERSATION}.")
    message["content"] = _text(i, message.get("content"))
    if calls is not None:
        if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
            raise UsageError(f"the tool_calls of message {i} must be a list, not {described(calls)}.")
        message["tool_calls"] = [_call(i, call) for call in calls]
    return message


def _text(i: int, content: object) -> str:
    """The text of a message, which may be given in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, Sequence) and not isinstance(content, bytes) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"the content of message {i} must be a text, not {described(content)}; {CONVERSATION}.")
    return "".join(map(str, texts))


def _call(i: int, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"a call in message {i} must have a function with a name and arguments.")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass
    if not isinstance(arguments, Mapping):
        raise UsageError(f"the arguments of a call in message {i} must be a mapping, or its JSON text.")
    described = {"name": function["name"], "arguments": dict(arguments)}
    return {"type": "function", "id": call.get("id"), "function": described}


def given_choice(tools: object, choice: object, parallel_tool_calls: bool) -> ToolChoice:
    """The functions that an answer may or must call, from the arguments ``tools``, ``tool_choice`` and
    ``parallel_tool_calls`` in OpenAI's form.  Raises UsageError."""
    if tools is None:
        tools = ()
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise UsageError(f"tools must be a sequence of mappings, not {described(tools)}; {FUNCTION}.")
    found = [_tool(i, tool) for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool, _ in found]
    strict = [tool["function"]["name"] for tool, strict in found if strict]
    named = choice["function"] if isinstance(choice, Mapping) and isinstance(choice.get("function"), Mapping) else None
    if not (named is not None and isinstance(named.get("name"), str)) and choice not in ("auto", "none", "required"):
        wanted = 'auto, none, required, or a function as in {"type": "function", "function": {"name": "now"}}'
        raise UsageError(f"tool_choice must be {wanted}, not {described(choice)}.")
    if choice == "none":
        return ToolChoice([], [])
    forced = choice != "auto"
    if forced and not found:
        raise UsageError("tool_choice forces a call, and there are no functions to call: give tools.")
    if named is not None:
        if named["name"] not in names:
            raise UsageError(f"tool_choice names {described(named['name'])}, which is not one of the tools.")
        names = [named["name"]]
    several = bool(parallel_tool_calls) and named is None
    return ToolChoice([tool for tool, _ in found], names, forced, named is not None, several, strict)


def _tool(i: int, tool: object) -> tuple[Tool, bool]:
    """A function as templates expect it, and whether its calls must follow its schema."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"tool {i} must be a mapping that has a function with a name; {FUNCTION}.")
    parameters, description = function.get("parameters") or {}, function.get("description") or ""
    if not isinstance(parameters, Mapping):
        raise UsageError(f"the parameters of tool {i} must be a JSON schema as a dict, not {described(parameters)}.")
    if not isinstance(description, str):
        raise UsageError(f"the description of tool {i} must be a text, not {described(description)}.")
    own = {"name": function["name"], "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": own}, bool(function.get("strict"))
