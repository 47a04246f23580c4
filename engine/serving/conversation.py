"""Conversations: from the messages of a request to those that chat templates expect.

Every interface converts its messages to those of OpenAI's chat first, and this converts them to what chat templates expect.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from engine.errors import TemplateError
from engine.llm import LLM
from engine.serving.errors import Refusal
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.text.template.chat import ChatTemplate
from engine.tools import prompt
from engine.tools.prompt import Prompt
from engine.tools.turns import Message

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
"""The roles of messages."""


def read_messages(fields: Fields, limits: Limits) -> list[Message]:
    """The messages of an OpenAI chat."""
    messages = [read_message(each) for each in fields.objects("messages", limits.messages, "--messages")]
    if not messages:
        raise fields.refuse("messages", "is empty: give at least one message", "missing_required_parameter")
    return messages


def read_message(fields: Fields) -> Message:
    """One message of an OpenAI chat."""
    role = fields.required_text("role")
    if role not in ROLES:
        raise fields.refuse("role", f"must be one of {', '.join(ROLES)}, not {role[:40]!r}")
    message: Message = {"role": "system" if role == "developer" else "tool" if role == "function" else role}
    message["content"] = read_content(fields, "content")
    thought = fields.text("reasoning_content") or fields.text("reasoning")
    if thought:
        message["reasoning_content"] = thought
    for name in ("name", "tool_call_id"):
        if (value := fields.text(name)) is not None:
            message[name] = value
    if calls := [_call(call) for call in fields.objects("tool_calls", 1024, "at most 1024")]:
        message["tool_calls"] = calls
    fields.ignore("refusal", "audio", "annotations", "function_call", "cache_control")
    return message


def read_content(fields: Fields, name: str) -> str:
    """The text of a message, which is the field ``name``: a text, or a list of parts that are texts."""
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    parts: list[str] = []
    for part in fields.objects(name, 65536, "at most 65536"):
        kind = part.text("type", "text")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise part.refuse("type", f"is {kind[:40]!r}, and this server reads text only: send text parts")
        parts.append(part.text("refusal" if kind == "refusal" else "text", ""))
    return "".join(parts)


def _call(fields: Fields) -> Mapping[str, Any]:
    function = fields.object("function")
    if function is None:
        raise fields.refuse("function", "is missing: give the name and the arguments of the call")
    return read_call(function, fields.text("id"))


def read_call(function: Fields, id: str | None) -> Mapping[str, Any]:
    """A call of a function in an answer.

    function: has the name and the arguments; id: the id of the call, which the message with its result names.
    """
    name, arguments = function.required_text("name"), function.get("arguments")
    if isinstance(arguments, str):
        # Templates write the arguments out one by one, so they need the object that the text stands for.
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            raise function.refuse("arguments", "must be the JSON text of an object") from None
    if arguments is not None and not isinstance(arguments, dict):
        raise function.refuse("arguments", "must be the JSON text of an object")
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments or {}}}


def read_tools(fields: Fields, limits: Limits) -> list[Mapping[str, Any]]:
    """The functions among the tools of an OpenAI chat.  Tools of other types belong to a service and are left out."""
    tools: list[Mapping[str, Any]] = []
    for tool in fields.objects("tools", limits.tools, "--tools"):
        if tool.required_text("type") != "function":
            continue
        function = tool.object("function") or tool
        name = function.required_text("name")
        parameters = dict(function.mapping("parameters"))
        described = {"name": name, "description": function.text("description", ""), "parameters": parameters}
        function.ignore("strict")
        tools.append({"type": "function", "function": described})
    return tools


def read_values(fields: Fields, effort: str | None) -> dict[str, Any]:
    """The variables of the chat template that a request gives; effort: how much the model should think, "none": not at
    all."""
    values = dict(fields.mapping("chat_template_kwargs"))
    for name in ("xml_tools", "python_tools"):  # SmolLM3's; calls in Python would stay text
        if values.get(name):
            problem = f"has {name}: give the functions as tools, to be called in JSON"
            raise fields.refuse("chat_template_kwargs", problem)
    if effort is not None:
        values.setdefault("reasoning_effort", effort)
        values.setdefault("enable_thinking", effort != "none")
    return values


def template_of(llm: LLM, instead: str) -> ChatTemplate:
    """The chat template of a model.  Raises Refusal, which says what to do ``instead``, if there is none."""
    if llm.chat_template is None:
        raise Refusal(f"this model has no chat template; {instead}.", param="messages")
    return llm.chat_template


def refused(error: TemplateError) -> Refusal:
    """The refusal of messages that a chat template refuses."""
    return Refusal(f"{str(error).rstrip('.')}.", param="messages")


def prompt_of(
    llm: LLM,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    values: Mapping[str, Any] | None = None,
    **how: Any,
) -> Prompt:
    """The prompt of a conversation.  Takes a while if that is long: call it by :func:`aside`.

    The arguments are those of :func:`engine.tools.prompt.prompt_of`.  Raises Refusal.
    """
    template = template_of(llm, "use /v1/completions with a text")
    try:
        return prompt.prompt_of(template, messages, tools, values, **how)
    except TemplateError as error:
        raise refused(error) from None
