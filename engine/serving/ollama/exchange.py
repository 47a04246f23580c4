"""From a request to its response: what the two routes that answer have in common."""

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.grammar.grammar import Grammar
from engine.serving import exchange
from engine.serving.exchange import Plan
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.serving.ollama.lines import Clock, Lines
from engine.serving.ollama.loading import keeps_nothing, open_or_close
from engine.serving.ollama.options import read_ask, read_format
from engine.serving.ollama.said import Said
from engine.serving.ollama.shapes import error_body, error_line, model_name, read_body
from engine.serving.served import Served
from engine.serving.state import State
from engine.serving.streams import NDJSON
from engine.tools.prompt import Prompt


async def respond(
    request: Request,
    asks: Callable[[Fields, Limits], bool],
    prompt: Callable[[Fields, Served, Grammar | None], Awaitable[tuple[Prompt, Grammar | None]]],
    form: Callable[[Said], Mapping[str, Any]],
) -> Response:
    """Answer a request, as a stream unless ``stream`` is false.

    asks: whether a body asks for an answer; if not, the model is only opened or closed; prompt: that of a body, for an answer
    that has the form of a grammar or None, and the grammar of the whole answer; form: the fields that hold what is said.
    """
    came = time.monotonic_ns()
    limits = State.of(request).limits
    fields = await read_body(request, limits)
    if not asks(fields, limits):
        return await open_or_close(request, fields, form(Said()))

    async def read(fields: Fields, served: Served) -> Plan:
        clock = Clock(came, time.monotonic_ns())
        llm = served.llm
        keeps_nothing(fields)  # refuses what is no duration; otherwise it means nothing here
        ask = read_ask(fields, llm, limits, *await prompt(fields, served, await read_format(fields, llm, limits)))
        return Lines(model_name(fields, served.name), form, llm.tokenizer, ask.logprobs, clock).plan(ask)

    return await exchange.respond(request, read, error_line, NDJSON, error=error_body, fields=fields, streams=True)
