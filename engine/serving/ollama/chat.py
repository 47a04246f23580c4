"""``POST /api/chat``."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.serving.aside import aside
from engine.serving.conversation import prompt_of
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.serving.ollama.conversation import read_messages, read_think, read_tools
from engine.serving.ollama.exchange import respond
from engine.serving.ollama.said import Said
from engine.serving.served import Served
from engine.tools.prompt import Prompt


async def chat(request: Request) -> Response:
    """Answer a conversation, as a stream unless ``stream`` is false.  Without messages, only open or close the model."""
    return await respond(request, _asks, _prompt, _form)


def _asks(fields: Fields, limits: Limits) -> bool:
    return bool(fields.items("messages", limits.messages, "--messages"))


async def _prompt(fields: Fields, served: Served, formatted: bool) -> Prompt:
    messages = await aside(fields.size, partial(read_messages, fields, served.limits))
    tools = await aside(fields.size, partial(read_tools, fields, served))
    begun = messages[-1]["role"] == "assistant"
    if begun and "tool_calls" in messages[-1]:
        raise fields.refuse("messages", "ends with calls of tools: add messages of the role tool with their results")
    values = read_think(fields, served, formatted, begun)
    given: Any = {"continue_final": begun, "ruled": formatted, "at_least": served.llm.check_least}
    return await aside(fields.size, partial(prompt_of, served.llm, messages, tools, values, **given))


def _form(said: Said) -> Mapping[str, Any]:
    return {"message": {"role": "assistant", "content": said.content, **said.beside()}}
