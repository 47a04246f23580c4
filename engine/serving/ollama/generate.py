"""``POST /api/generate``: the answer to one prompt, or the continuation of a text."""

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
from engine.serving.ollama.conversation import read_think
from engine.serving.ollama.exchange import respond
from engine.serving.ollama.said import Said
from engine.serving.served import Served
from engine.tools.formats.plain import plain
from engine.tools.prompt import Prompt
from engine.tools.turns import Message


async def generate(request: Request) -> Response:
    """Answer a prompt, as a stream unless ``stream`` is false.  Without a prompt, only open or close the model."""
    return await respond(request, _asks, _prompt, _form)


def _asks(fields: Fields, limits: Limits) -> bool:
    return bool(fields.text("prompt"))


async def _prompt(fields: Fields, served: Served, form: Grammar | None) -> tuple[Prompt, Grammar | None]:
    """A message of the user, or, with ``raw`` and for models without a chat template, a text to continue.  Control tokens
    are recognized with ``raw`` only, since that is what a chat template has written."""
    formatted = form is not None
    values = read_think(fields, served, formatted=formatted, ruled=formatted)
    llm, text = served.llm, fields.text("prompt", "")
    system, raw = fields.text("system", ""), fields.flag("raw", False)
    if raw or llm.chat_template is None:
        for name in ("system", "think"):
            if fields.get(name):
                raise fields.refuse(name, "needs a chat template, and this prompt is used without one: leave it out")
        encode = partial(llm.tokenizer.encode, text, parse_special=raw, at_least=llm.check_least)
        return Prompt(await aside(fields.size, encode), plain), form
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    make = partial(prompt_of, llm, messages, values=values, ruled=formatted, at_least=llm.check_least)
    return await aside(fields.size, make), form


def _form(said: Said) -> Mapping[str, Any]:
    return {"response": said.content, **said.beside()}
