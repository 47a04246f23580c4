"""``POST /v1/chat/completions``."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.serving.answer import Answer, Ask, Delta
from engine.serving.conversation import prompt_of, read_messages, read_tools
from engine.serving.exchange import Plan, respond
from engine.serving.fields import Fields
from engine.serving.formats.events import CallArguments, CallBegin, Content, Reasoning
from engine.serving.openai.shapes import chat_logprobs, error_event, timings_of, usage_of
from engine.serving.sampling import clamped, read_logprobs, read_options, read_stop
from engine.serving.served import Served
from engine.serving.streams import merged, sse
from engine.serving.structured import read_grammar

MEANINGLESS = (
    *("user", "metadata", "store", "service_tier", "verbosity", "prediction", "prompt_cache_key", "safety_identifier"),
    *("prompt_cache_options", "prompt_cache_retention", "moderation", "web_search_options", "parallel_tool_calls"),
    *(
        "cache_prompt",
        "add_generation_prompt",
        "length_penalty",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    ),
)
"""Fields that other services know and that change no answer here."""


@dataclass(frozen=True)
class Shape:
    """How an answer is written down: the fields that all of its chunks have, and what was asked for."""

    id: str
    created: int
    model: str
    fingerprint: str
    logprobs: bool
    top_logprobs: int
    include_usage: bool
    continuous_usage: bool

    def head(self, kind: str) -> dict[str, Any]:
        """The fields of every object of the kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, as a whole or as a stream."""
    return await respond(request, _read, error_event)


async def _read(fields: Fields, served: Served) -> Plan:
    ask, shape = await read_ask(fields, served)
    whole, chunks = partial(_whole, served=served, shape=shape), partial(_chunks, served=served, shape=shape)
    return Plan([ask], whole, chunks)


async def read_ask(fields: Fields, served: Served) -> tuple[Ask, Shape]:
    """What a request asks for."""
    llm, limits = served.llm, served.limits
    messages, tools = read_messages(fields, limits), read_tools(fields, limits)
    values = dict(fields.mapping("chat_template_kwargs"))
    effort = fields.text("reasoning_effort")
    if effort is not None:
        values.setdefault("reasoning_effort", effort)
        values.setdefault("enable_thinking", effort != "none")
    tools = read_tool_choice(fields, tools)
    grammar = await read_grammar(fields, llm, limits)
    if grammar is not None:
        values.setdefault("enable_thinking", False)  # the answer follows the grammar from its first character
    continue_final = fields.flag("continue_final_message", False)
    if continue_final and messages[-1]["role"] != "assistant":
        raise fields.refuse("continue_final_message", "needs a last message of the assistant")
    prompt = await asyncio.to_thread(prompt_of, llm, messages, tools, values, continue_final=continue_final)
    top = read_logprobs(fields, limits)
    most = fields.whole("max_completion_tokens", fields.whole("max_tokens", None, 0), 0)
    options = read_options(fields, llm, limits) | {
        "max_tokens": clamped(most, llm, len(prompt.ids)),
        "grammar": grammar,
    }
    refuse_unanswerable(fields)
    given = fields.object("stream_options") or Fields({})
    ask = Ask(
        prompt.ids,
        prompt.parser,
        options,
        fields.whole("n", 1, 1, limits.n),
        top,
        stop=read_stop(fields, limits),
    )
    shape = Shape(
        f"chatcmpl-{secrets.token_hex(12)}",
        int(time.time()),
        served.name,
        served.fingerprint,
        top is not None,
        top or 0,
        given.flag("include_usage", False),
        given.flag("continuous_usage_stats", False),
    )
    given.ignore("include_obfuscation")
    fields.ignore(*MEANINGLESS)
    return ask, shape


def read_tool_choice(fields: Fields, tools: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools that the model may call."""
    choice = fields.get("tool_choice")
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return []
    raise fields.refuse("tool_choice", 'must be "auto" or "none": this server does not force calls yet')


def refuse_unanswerable(fields: Fields) -> None:
    """Refuse the fields whose silent loss would change an answer."""
    kinds = fields.get("modalities")
    if kinds is not None and kinds != ["text"]:
        raise fields.refuse("modalities", 'must be ["text"]: this server answers in text only')
    for name in ("audio", "functions", "function_call"):
        if fields.get(name):
            raise fields.refuse(name, "is not supported by this server: leave it out")


# --- answers -------------------------------------------------------------------------------------------------------


async def _whole(answers: list[Answer], served: Served, shape: Shape) -> dict[str, Any]:
    parts: dict[int, list[Delta]] = {answer.index: [] for answer in answers}
    async for answer, delta in merged(answers):
        parts[answer.index].append(delta)
    choices = [_choice(answer, parts[answer.index], served, shape) for answer in answers]
    body = shape.head("chat.completion") | {"choices": choices, "usage": usage_of(answers)}
    return body | {"timings": timings_of(answers[0])}


def _choice(answer: Answer, deltas: list[Delta], served: Served, shape: Shape) -> dict[str, Any]:
    events = [event for delta in deltas for event in delta.events]
    thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            calls[event.index] = {"id": call_id(answer, event.index), "type": "function", "function": function}
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.text
    content = "".join(event.text for event in events if isinstance(event, Content))
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thoughts:
        message |= {"reasoning_content": thoughts, "reasoning": thoughts}
    if calls:
        message["tool_calls"] = list(calls.values())
    logprobs = None
    if shape.logprobs:
        tokens = [token for delta in deltas for token in delta.logprobs]
        logprobs = chat_logprobs(served.llm.tokenizer, tokens, shape.top_logprobs)
    finish = {"logprobs": logprobs, "finish_reason": answer.finish_reason}
    return {"index": answer.index, "message": message, **finish}


def call_id(answer: Answer, index: int) -> str:
    """The id of a call of an answer, the same for the same request and seed."""
    return f"call_{answer.generation.seed & 0xFFFFFFFF:08x}{answer.index:02x}{index:06x}"


async def _chunks(answers: list[Answer], served: Served, shape: Shape) -> AsyncIterator[str]:
    head = shape.head("chat.completion.chunk")

    def chunk(answer: Answer, delta: Mapping[str, Any], finish: str | None, logprobs: Any = None) -> str:
        choice = {"index": answer.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": usage_of(answers)} if shape.continuous_usage else {}
        return sse(head | {"choices": [choice]} | usage)

    begun: set[int] = set()
    async for answer, delta in merged(answers):
        if answer.index not in begun:
            # Not before there is a token: clients take the first chunk for the first token.
            begun.add(answer.index)
            yield chunk(answer, {"role": "assistant", "content": ""}, None)
        logprobs = None
        if shape.logprobs and delta.logprobs:
            logprobs = chat_logprobs(served.llm.tokenizer, delta.logprobs, shape.top_logprobs)
        fields = [_fields(answer, event) for event in delta.events]
        said = [each for each in fields if each]
        if not said and logprobs is not None:
            said = [{"content": ""}]
        for i, each in enumerate(said):
            yield chunk(answer, each, None, logprobs if i == 0 else None)
        if delta.finish_reason:
            yield chunk(answer, {}, delta.finish_reason)
    if shape.include_usage:
        yield sse(head | {"choices": [], "usage": usage_of(answers), "timings": timings_of(answers[0])})
    yield sse("[DONE]")


def _fields(answer: Answer, event: Any) -> dict[str, Any]:
    """An event as the delta of a chunk."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text, "reasoning": event.text}
    if isinstance(event, CallBegin):
        function = {"name": event.name, "arguments": ""}
        call = {"index": event.index, "id": call_id(answer, event.index), "type": "function", "function": function}
        return {"tool_calls": [call]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return {}
