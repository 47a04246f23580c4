"""From the messages of a request to those of OpenAI's chat, and from ``think`` to the variables of chat templates."""

from collections.abc import Mapping
from typing import Any

from engine.serving import conversation
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.serving.served import Served
from engine.tools.formats import select
from engine.tools.turns import Message

LEVELS = ("low", "medium", "high", "max")
"""How much a model may think."""


def read_messages(fields: Fields, limits: Limits) -> list[Message]:
    """The messages of a request as those of OpenAI's chat."""
    own = [_converted(each) for each in fields.objects("messages", limits.messages, "--messages")]
    return conversation.read_messages(Fields({"messages": own}), limits)


def _converted(fields: Fields) -> Mapping[str, Any]:
    refuse_unanswerable(fields, "images")
    message = dict(fields.values) | {"role": fields.required_text("role").lower()}
    if thinking := fields.text("thinking"):
        message["reasoning_content"] = thinking
    if name := fields.text("tool_name"):
        message["name"] = name
    return message


def read_tools(fields: Fields, served: Served) -> list[Mapping[str, Any]]:
    """The functions that the model may call."""
    tools = conversation.read_tools(fields, served.limits)
    if tools and not select.can_call(_template(served, tools=True)):
        raise fields.refuse("tools", f"cannot be given: {served.name} does not support tools; leave them out")
    return tools


def read_think(
    fields: Fields, served: Served, *, formatted: bool, ruled: bool, begun: bool = False
) -> Mapping[str, Any]:
    """The variables of the chat template that ``think`` stands for: true, false, or a level.

    An answer that has a format has no thought by default.  One that is ruled, so that it follows its format from the first
    character, or has begun in the last message, cannot have one.
    """
    value, template = fields.get("think"), _template(served)
    if value is None or value is False:
        return {"enable_thinking": False} if formatted or begun or value is False else {}
    if value is not True and value not in LEVELS:
        raise fields.refuse("think", f"must be true, false, {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
    if not select.can_think(template):
        raise fields.refuse("think", f"must be false: {served.name} does not support thinking")
    if ruled:
        raise fields.refuse("think", "must be false with a format, which the answer follows from its first character")
    if begun:
        raise fields.refuse("think", "must be false with a last message of the assistant, which the answer continues")
    if value is True:
        return {"enable_thinking": True}
    # gpt-oss knows no higher level than this.
    level = "high" if value == "max" and select.detect(template) == "gpt_oss" else value
    return {"enable_thinking": True, "reasoning_effort": level}


def refuse_unanswerable(fields: Fields, *names: str) -> None:
    """Refuse fields whose silent loss would change an answer; those that are empty say nothing."""
    for name in names:
        if fields.get(name):
            raise fields.refuse(name, "is not supported by this server: leave it out")


def _template(served: Served, tools: bool = False) -> str:
    template = served.llm.chat_template
    return "" if template is None else template.source_for(tools)
