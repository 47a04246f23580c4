"""``POST /api/chat``."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.grammar.grammar import Grammar
from engine.serving.aside import aside
from engine.serving.conversation import prompt_of
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.serving.ollama.conversation import read_messages, read_think, read_tools
from engine.serving.ollama.exchange import respond
from engine.serving.ollama.said import Said
from engine.serving.served import Served
from engine.serving.tool_choice import calls_grammar
from engine.tools.choice import ToolChoice, beside_calls
from engine.tools.prompt import Prompt


async def chat(request: Request) -> Response:
    """Answer a conversation, as a stream unless ``stream`` is false.  Without messages, only open or close the model."""
    return await respond(request, _asks, _prompt, _form)


def _asks(fields: Fields, limits: Limits) -> bool:
    return bool(fields.items("messages", limits.messages, "--messages"))


async def _prompt(fields: Fields, served: Served, form: Grammar | None) -> tuple[Prompt, Grammar | None]:
    llm, limits = served.llm, served.limits
    messages = await aside(fields.size, partial(read_messages, fields, limits))
    tools = await aside(fields.size, partial(read_tools, fields, served))
    choice = ToolChoice(tools, [tool["function"]["name"] for tool in tools])
    begun = messages[-1]["role"] == "assistant"
    if begun and "tool_calls" in messages[-1]:
        raise fields.refuse("messages", "ends with calls of tools: add messages of the role tool with their results")
    grammar, text = beside_calls(form, choice, begun)
    ruled = grammar is not None
    values = read_think(fields, served, formatted=form is not None, ruled=ruled, begun=begun)
    given: Any = {"continue_final": begun, "ruled": ruled, "at_least": llm.check_least}
    prompt = await aside(fields.size, partial(prompt_of, llm, messages, tools, values, **given))
    return prompt, grammar or await calls_grammar(choice, llm, prompt, limits, text)


def _form(said: Said) -> Mapping[str, Any]:
    return {"message": {"role": "assistant", "content": said.content, **said.beside()}}
