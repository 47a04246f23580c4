"""Conversations: from the messages of a request to the token ids of a prompt, and the parser of the answer.

Every interface converts its messages to those of OpenAI's chat first, and this converts them to what chat templates expect.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from engine.errors import TemplateError
from engine.llm import LLM
from engine.serving.errors import Refusal
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.text.bound import AtLeast
from engine.text.template.chat import ChatTemplate
from engine.text.tokenizer import TokenType
from engine.tools.calls.tagged import MAYBE, NONE, OPEN
from engine.tools.formats import generic, select
from engine.tools.formats.history import adapted
from engine.tools.formats.parser import Parser
from engine.tools.turns import Message, rendered

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
"""The roles of messages."""

LAST = 32
"""The tokens at the end of a prompt among which is a tag that opens a thought."""


class Prompt(NamedTuple):
    """The token ids of a conversation, and what makes a parser of its answer.

    format: the name of the format in which the model writes calls and thoughts; thought: ``OPEN``, ``MAYBE`` or ``NONE`` of
    ``engine.tools.calls.tagged``: whether the answer begins in a thought; headed: whether it begins in a text that the
    prompt has given a header, so that no call can follow before the end of this text.
    """

    ids: list[int]
    parser: Callable[[], Parser]
    format: str = "plain"
    thought: str = NONE
    headed: bool = False


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
    *,
    continue_final: bool = False,
    names: Collection[str] | None = None,
    ruled: bool = False,
    at_least: AtLeast | None = None,
) -> Prompt:
    """The prompt of a conversation.  Takes a while if that is long: call it by :func:`aside`.

    values: further variables of the template, such as ``enable_thinking``; continue_final: the last message, which is one of
    the assistant, is the beginning of the answer; names: the functions that may be called, None: all ``tools``; ruled: the
    answer follows a grammar of the request, so that nothing in it is a call or a thought;
    at_least: is told how many tokens a long text has at least, before it is tokenized, and may raise an error.
    """
    template = template_of(llm, "use /v1/completions with a text")
    extra = dict(values or {}) | ({"tools": list(tools)} if tools else {})
    for name in ("messages", "self", "known", "at_least", "add_generation_prompt"):
        extra.pop(name, None)
    last: Message = {}
    if continue_final:
        *messages, last = messages
    source = template.source_for(bool(extra.get("tools")))
    format = select.detect(source, bool(tools))
    messages = adapted(format, messages)
    if format == "generic":
        # A template without a place for the system message gets it in the first message of the user (turns.py).
        messages = generic.with_system(generic.as_text(messages), generic.describe(tools))
        extra = {name: value for name, value in extra.items() if name != "tools"}
    try:
        ids = rendered(lambda own: template.encode(own, at_least=at_least, **extra), messages)
    except TemplateError as error:
        raise refused(error) from None
    tags = select.FORMATS[format].THOUGHT
    thought = NONE
    end = llm.tokenizer.decode(ids[-LAST:], special=True)
    if select.opens_thought(format, end):
        thought = OPEN
    elif format == "gpt_oss" or (tags and tags[0] in source and not _is_closed(end, tags[1], extra)):
        thought = MAYBE
    if thought == OPEN and (begun := last.get("reasoning_content")):
        ids = ids + llm.tokenizer.encode(begun, add_special=False, at_least=at_least)
    header: tuple[str, ...] = ()
    text = last.get("content") or ""
    if text or ruled:
        if thought == OPEN and tags:
            # What the client has begun, or what a grammar holds, is text, so the thought before it has ended.
            own_line = tags[1] == "</think>" and end.endswith("\n")
            close = f"\n{tags[1]}\n\n" if own_line else tags[1]
            ids = ids + llm.tokenizer.encode(close, add_special=False, parse_special=True)
        if header := select.FORMATS[format].HEADER:
            ids = ids + llm.tokenizer.encode("".join(header), add_special=False, parse_special=True)
        ids, thought = ids + llm.tokenizer.encode(text, add_special=False, at_least=at_least), NONE
    offered = [tool for tool in tools if names is None or tool["function"]["name"] in names]

    def parser() -> Parser:
        made = select.parser(
            format,
            offered,
            single=lambda tag: control_token(llm, tag) is not None,
            reasoning_open=thought == OPEN,
            calls=not ruled,
            reasoning=not ruled,
        )
        for piece in header:
            made.feed(piece, True)
        return made

    return Prompt(ids, parser, format, thought, bool(header))


def _is_closed(end: str, close: str, values: Mapping[str, Any]) -> bool:
    """Whether the model is not to think: the variables of the template say so, or the prompt ends with the tag after a
    thought."""
    return values.get("enable_thinking") is False or end.rstrip().endswith(close)


def control_token(llm: LLM, text: str) -> int | None:
    """The control or user-defined token that is this text; None if there is none."""
    id = llm.tokenizer.token_id(text)
    return (
        id if id is not None and llm.tokenizer.token_type(id) in (TokenType.CONTROL, TokenType.USER_DEFINED) else None
    )
