"""From the messages and tools of a request to those of OpenAI's chat."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from engine.llm import LLM
from engine.serving.aside import aside
from engine.serving.conversation import prompt_of
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.serving.tool_choice import chosen
from engine.text.bound import AtLeast
from engine.tools.choice import ToolChoice
from engine.tools.prompt import Prompt
from engine.tools.turns import Message

BILLING = "x-anthropic-billing-header:"
"""Begins a block of the system prompt that differs with each request of a conversation, and that is not meant for a model."""

BLOCKS = 65536
"""The most blocks of a message."""


async def read_prompt(
    fields: Fields,
    llm: LLM,
    limits: Limits,
    choice: ToolChoice,
    at_least: AtLeast | None = None,
    *,
    ruled: bool = False,
    thinks: bool = True,
) -> Prompt:
    """The prompt of a request; at_least: is told how many tokens a long one has at least, and may raise an error; ruled: the
    whole answer follows a grammar of the request; thinks: whether the answer may begin with a thought."""
    messages = await aside(fields.size, partial(read_messages, fields, limits))
    prefilled = messages[-1]["role"] == "assistant"
    # Without the field Anthropic's models do not think, and clients take the first block for the text.  The beginning of an
    # answer that the client gives is text, too.
    thinking = fields.object("thinking") or Fields({"type": "disabled"}, "thinking")
    asked = thinking.choice("type", ("enabled", "adaptive", "disabled"), "enabled") != "disabled"
    values = {"enable_thinking": asked and thinks and not prefilled}
    given: dict[str, Any] = {"tools": choice.tools, "names": choice.names, "at_least": at_least, "ruled": ruled}
    make = partial(prompt_of, llm, messages, values=values, continue_final=prefilled, **given)
    return await aside(fields.size, make)


def read_messages(fields: Fields, limits: Limits) -> list[Message]:
    """The messages of a request as those of OpenAI's chat, with the system prompt first."""
    system = _system(fields, "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    n_system, names = len(messages), dict[str, str]()
    for each in fields.objects("messages", limits.messages, "--messages"):
        role = each.required_text("role")
        each.required("content")
        if role == "user":
            messages += _user(each, names)
        elif role == "assistant":
            messages.append(_assistant(each, names))
        elif role == "system":
            messages.append({"role": "system", "content": _system(each, "content")})
        else:
            raise each.refuse("role", f"must be user, assistant or system, not {role[:40]!r}")
    if len(messages) == n_system:
        raise fields.refuse("messages", "is empty: give at least one message")
    last = messages[-1]
    if last["role"] == "assistant" and "tool_calls" in last:
        raise fields.refuse(
            "messages", "ends with calls of tools: add a message of the user with their tool_result blocks"
        )
    return messages


def _system(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    texts = [_text(block) for block in fields.objects(name, BLOCKS, f"at most {BLOCKS}")]
    return "\n".join(text for text in texts if not text.startswith(BILLING))


def _text(block: Fields) -> str:
    """The text of a block that can be nothing else."""
    kind = block.required_text("type")
    if kind != "text":
        raise block.refuse("type", f"is {kind[:40]!r}, and this server reads text only here: send text blocks")
    return block.text("text", "")


def _blocks(fields: Fields) -> list[Fields]:
    value = fields.get("content")
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, fields.name("content"))]
    return list(fields.objects("content", BLOCKS, f"at most {BLOCKS}"))


def _user(fields: Fields, names: Mapping[str, str]) -> list[Message]:
    """The texts and the results of tools in a message of the user, in their order; names: the functions that were called."""
    messages: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for block in _blocks(fields):
        if block.get("type") != "tool_result":
            texts.append(_text(block))
            continue
        flush()
        id = block.required_text("tool_use_id")
        content = "\n".join(map(_text, _blocks(block))) if "content" in block else ""
        result: Message = {"role": "tool", "tool_call_id": id, "content": content}
        if id in names:
            result["name"] = names[id]
        messages.append(result)
    flush()
    return messages or [{"role": "user", "content": ""}]


def _assistant(fields: Fields, names: dict[str, str]) -> Message:
    """An answer; notes in ``names`` which functions it calls."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Mapping[str, Any]] = []
    for block in _blocks(fields):
        kind = block.required_text("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking", ""))
        elif kind == "tool_use":
            id, name = block.required_text("id"), block.required_text("name")
            names[id] = name
            function = {"name": name, "arguments": dict(block.mapping("input"))}
            calls.append({"type": "function", "id": id, "function": function})
        elif kind != "redacted_thinking":  # only the service that wrote it can read it
            texts.append(_text(block))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def read_tool_choice(fields: Fields, limits: Limits) -> ToolChoice:
    """The tools of a request, as those of OpenAI's chat, and what ``tool_choice`` says about them.  Tools of other types
    belong to a service and are left out."""
    tools: list[Mapping[str, Any]] = []
    strict = []
    for tool in fields.objects("tools", limits.tools, "--tools"):
        name = tool.required_text("name")
        if tool.text("type", "custom") != "custom":
            continue
        tool.required("input_schema")
        parameters = dict(tool.mapping("input_schema"))
        described = {"name": name, "description": tool.text("description", ""), "parameters": parameters}
        tools.append({"type": "function", "function": described})
        if tool.flag("strict", False):
            strict.append(name)
    choice = fields.object("tool_choice") or Fields({"type": "auto"}, "tool_choice")
    choice.required("type")
    kind = choice.choice("type", ("auto", "any", "tool", "none"))
    if kind == "none":
        return ToolChoice([], [])
    several = not choice.flag("disable_parallel_tool_use", False)
    names = [tool["function"]["name"] for tool in tools]
    if kind == "tool":
        names = [choice.required_text("name")]
    forced, named = kind in ("any", "tool"), kind == "tool"
    several = several and not named
    return chosen(fields, tools, names, strict, param="tool_choice", forced=forced, named=named, several=several)
