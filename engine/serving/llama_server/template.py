"""``POST /apply-template``: the text that a conversation becomes."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.errors import TemplateError
from engine.serving.accepted import check, table_of
from engine.serving.aside import aside
from engine.serving.body import read_fields
from engine.serving.conversation import read_messages, read_values, refused, template_of
from engine.serving.exchange import note_ignored
from engine.serving.models import PATIENCE_SECONDS
from engine.serving.state import State
from engine.serving.streams import dump
from engine.serving.tool_choice import read_tool_choice
from engine.text.template.chat import ChatTemplate
from engine.tools.formats.described import described
from engine.tools.turns import Message, rendered

_SURROGATES = re.compile("[\ud800-\udfff]")


async def apply_template(request: Request) -> Response:
    """The prompt of a conversation as one text, for reading: nothing is computed."""
    state = State.of(request)
    fields = await read_fields(request, state.limits)
    check(fields, table_of("/apply-template"))
    messages = await aside(fields.size, partial(read_messages, fields, state.limits))
    tools = (await aside(fields.size, partial(read_tool_choice, fields, state.limits))).tools
    values = read_values(fields, fields.text("reasoning_effort"))
    values["add_generation_prompt"] = fields.flag("add_generation_prompt", True)
    for name in ("messages", "self"):
        values.pop(name, None)
    async with state.models.use(fields.text("model"), PATIENCE_SECONDS) as served:
        template = template_of(served.llm, "send a text to /completion")
        try:
            text = await asyncio.to_thread(_text, template, messages, tools, values)
        except TemplateError as error:
            raise refused(error) from None
        # Half a character in a message, as the tokenizer takes it.
        text = _SURROGATES.sub("\ufffd", text)
        body = await aside(fields.size, partial(dump, {"prompt": text}))
        note_ignored(request, fields)
    return Response(body, media_type="application/json")


def _text(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
) -> str:
    own = described(template.source_for(bool(tools or values.get("tools"))), messages, tools, values)
    return rendered(partial(template.render, **own.values), own.messages)
