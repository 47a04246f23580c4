"""``POST /v1/messages``."""

import secrets
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.grammar.grammar import Grammar
from engine.serving.answer import Answer, Ask
from engine.serving.anthropic.blocks import Blocks, joined
from engine.serving.anthropic.conversation import read_prompt, read_tool_choice
from engine.serving.anthropic.shapes import ending_of, error_body, error_event, usage_of
from engine.serving.aside import aside
from engine.serving.exchange import Plan, respond
from engine.serving.fields import Fields
from engine.serving.permitted import read_permitted
from engine.serving.sampling import clamped, read_options, read_stop
from engine.serving.served import Served
from engine.serving.streams import SSE, merged, sse
from engine.serving.structured import read_grammar
from engine.serving.tool_choice import calls_grammar
from engine.text.bound import AtLeast
from engine.tools.choice import ToolChoice, beside_calls
from engine.tools.prompt import Prompt

EVENTS = SSE._replace(ping=sse({"type": "ping"}, "ping"))
"""Anthropic's clients know an event that fills the silence."""


async def messages(request: Request) -> Response:
    """Answer a conversation, as a whole or as a stream."""
    request_id = request.scope["state"]["request_id"]
    failed, error = partial(error_event, request_id=request_id), partial(error_body, request_id=request_id)
    response = await respond(request, _read, failed, EVENTS, error=error)
    response.headers["request-id"] = request_id
    return response


async def _read(fields: Fields, served: Served) -> Plan:
    ask = await read_ask(fields, served)
    return Plan([ask], partial(_whole, served=served), partial(_events, served=served))


async def read_ask(fields: Fields, served: Served) -> Ask:
    """What a request asks for."""
    llm, limits = served.llm, served.limits
    fields.required("max_tokens")
    most = fields.whole("max_tokens", 0)
    fields.number("temperature", 1.0, 0, 1)
    options = read_options(fields, llm, limits)
    stop = read_stop(fields, limits, "stop_sequences")
    prompt, choice, form, text = await read_conversation(fields, served, llm.check_least)
    options |= {
        "max_tokens": clamped(most, llm, len(prompt.ids)),
        "grammar": form or await calls_grammar(choice, llm, prompt, limits, text),
    }
    if receipt := fields.flag("receipt", False):
        await served.fingerprint()  # which a receipt contains
    return Ask(prompt.ids, prompt.parser, options, stop=stop, permitted=read_permitted(fields, llm), receipt=receipt)


async def read_conversation(
    fields: Fields, served: Served, at_least: AtLeast | None = None
) -> tuple[Prompt, ToolChoice, Grammar | None, str]:
    """The prompt of a request, its functions, and the form of the answer beside calls of them (:func:`beside_calls`);
    at_least: is told how many tokens a long prompt has at least, and may raise an error."""
    llm, limits = served.llm, served.limits
    choice = await aside(fields.size, partial(read_tool_choice, fields, limits))
    output = fields.object("output_config") or Fields({}, "output_config")
    output.ignore("effort")
    shape = await read_grammar(output, llm, limits, "format")
    form, text = beside_calls(shape, choice, _begun(fields))
    ruled, thinks = form is not None, shape is None
    prompt = await read_prompt(fields, llm, limits, choice, at_least, ruled=ruled, thinks=thinks)
    return prompt, choice, form, text


def _begun(fields: Fields) -> bool:
    """Whether the last message is the beginning of the answer.  The messages have not been checked yet."""
    messages = fields.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _head(answer: Answer, served: Served) -> dict[str, Any]:
    """A message that has not begun."""
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": served.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_of(answer),
    }


async def _whole(answers: list[Answer], served: Served) -> dict[str, Any]:
    (answer,) = answers
    blocks = Blocks(partial(answer.call_id, prefix="toolu_"))
    written = []
    async for _, delta in merged(answers):
        written += blocks.feed(delta.events)
    written += blocks.end()
    return _head(answer, served) | {"content": joined(written)} | ending_of(answer) | answer.receipt()


async def _events(answers: list[Answer], served: Served) -> AsyncIterator[str]:
    (answer,) = answers
    blocks = Blocks(partial(answer.call_id, prefix="toolu_"))
    begun = False
    async for _, delta in merged(answers):
        if not begun:
            # Not before there is a token: only then it is known how much of the prompt the cache held.
            begun = True
            yield sse({"type": "message_start", "message": _head(answer, served)}, "message_start")
        for event in blocks.feed(delta.events):
            yield sse(event, event["type"])
    for event in blocks.end():
        yield sse(event, event["type"])
    ended = {"type": "message_delta", "delta": ending_of(answer), "usage": usage_of(answer), **answer.receipt()}
    yield sse(ended, "message_delta")
    yield sse({"type": "message_stop"}, "message_stop")
