"""``POST /v1/chat/completions``."""

import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.grammar.grammar import Grammar
from engine.serving.answer import Answer, Ask, Delta
from engine.serving.aside import aside
from engine.serving.conversation import read_messages
from engine.serving.exchange import Plan, respond
from engine.serving.fields import Fields
from engine.serving.openai.prompt import read_prompt
from engine.serving.openai.shapes import chat_logprobs, error_body, error_event, timings_of, usage_of
from engine.serving.permitted import read_permitted
from engine.serving.sampling import clamped, read_logprobs, read_most, read_options, read_stop
from engine.serving.served import Served
from engine.serving.streams import Last, merged, sse
from engine.serving.tool_choice import read_tool_choice
from engine.tools.choice import ToolChoice
from engine.tools.formats.events import CallArguments, CallBegin, Content, Event, Reasoning
from engine.tools.prompt import Prompt


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


@dataclass(frozen=True)
class ChatShape(Shape):
    """How an answer of a chat is written down; named: whether the request names the function to call."""

    named: bool

    def finish_of(self, answer: Answer) -> str:
        """Why an answer ended, in OpenAI's words: a call that the request names is no reason."""
        return "stop" if self.named and answer.finish_reason == "tool_calls" else answer.finish_reason


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, as a whole or as a stream."""
    return await respond(request, _read, error_event, error=error_body)


async def _read(fields: Fields, served: Served) -> Plan:
    ask, shape = await read_ask(fields, served)
    whole, chunks = partial(_whole, served=served, shape=shape), partial(_chunks, served=served, shape=shape)
    return Plan([ask], whole, chunks)


async def read_ask(fields: Fields, served: Served) -> tuple[Ask, ChatShape]:
    """What a request asks for."""
    llm, limits = served.llm, served.limits
    prompt, grammar, choice = await read_conversation(fields, served)
    top = read_logprobs(fields, limits)
    most = read_most(fields, "max_completion_tokens", "max_tokens", "n_predict")
    options = read_options(fields, llm, limits) | {
        "max_tokens": clamped(most, llm, len(prompt.ids)),
        "grammar": grammar,
    }
    given = fields.object("stream_options") or Fields({})
    ask = Ask(
        prompt.ids,
        prompt.parser,
        options,
        fields.whole("n", 1, 1, limits.n, "--most-n"),
        top,
        stop=read_stop(fields, limits),
        permitted=read_permitted(fields, llm),
        receipt=fields.flag("receipt", False),
    )
    shape = ChatShape(
        f"chatcmpl-{secrets.token_hex(12)}",
        int(time.time()),
        served.name,
        await served.fingerprint(),
        top is not None,
        top or 0,
        given.flag("include_usage", False),
        given.flag("continuous_usage_stats", False),
        choice.named,
    )
    given.ignore("include_obfuscation")
    return ask, shape


async def read_conversation(fields: Fields, served: Served) -> tuple[Prompt, Grammar | None, ToolChoice]:
    """The prompt of a request, the grammar of the answer, None if it may be any text, and what it says about functions."""
    llm, limits = served.llm, served.limits
    messages = await aside(fields.size, partial(read_messages, fields, limits))
    choice = await aside(fields.size, partial(read_tool_choice, fields, limits))
    continue_final = fields.flag("continue_final_message", False)
    if continue_final and messages[-1]["role"] != "assistant":
        raise fields.refuse("continue_final_message", "needs a last message of the assistant")
    if fields.flag("add_generation_prompt", not continue_final) == continue_final:
        raise fields.refuse("add_generation_prompt", "must be false with continue_final_message, and true without it")
    effort, form = fields.text("reasoning_effort"), (fields, "response_format")
    prompt, grammar = await read_prompt(
        fields, llm, limits, messages, choice, effort=effort, form=form, continue_final=continue_final
    )
    return prompt, grammar, choice


# --- answers -------------------------------------------------------------------------------------------------------


async def _whole(answers: list[Answer], served: Served, shape: ChatShape) -> dict[str, Any]:
    parts: dict[int, list[Delta]] = {answer.index: [] for answer in answers}
    async for answer, delta in merged(answers):
        parts[answer.index].append(delta)
    choices = [_choice(answer, parts[answer.index], served, shape) for answer in answers]
    body = shape.head("chat.completion") | {"choices": choices, "usage": usage_of(answers)}
    return body | {"timings": timings_of(answers[0])}


def _choice(answer: Answer, deltas: list[Delta], served: Served, shape: ChatShape) -> dict[str, Any]:
    said = Said(answer)
    parts = [said.fields(event) for delta in deltas for event in delta.events]
    thoughts = "".join(part.get("reasoning_content", "") for part in parts)
    calls: dict[int, dict[str, Any]] = {}
    for call in (call for part in parts for call in part.get("tool_calls", ())):
        index = call.pop("index")
        if index in calls:
            calls[index]["function"]["arguments"] += call["function"]["arguments"]
        else:
            calls[index] = call
    content = "".join(part.get("content", "") for part in parts)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thoughts:
        message |= {"reasoning_content": thoughts, "reasoning": thoughts}
    if calls:
        message["tool_calls"] = list(calls.values())
    logprobs = None
    if shape.logprobs:
        tokens = [token for delta in deltas for token in delta.logprobs]
        logprobs = chat_logprobs(served.llm.tokenizer, tokens, shape.top_logprobs)
    finish = {"logprobs": logprobs, "finish_reason": shape.finish_of(answer)}
    return {"index": answer.index, "message": message, **finish, **answer.receipt()}


async def _chunks(answers: list[Answer], served: Served, shape: ChatShape) -> AsyncIterator[str]:
    head = shape.head("chat.completion.chunk")

    def chunk(answer: Answer, delta: Mapping[str, Any], finish: str | None, logprobs: Any = None) -> str:
        choice = {"index": answer.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        choice |= answer.receipt() if finish else {}
        usage = {"usage": usage_of(answers)} if shape.continuous_usage else {}
        return sse(head | {"choices": [choice]} | usage)

    said = {answer.index: Said(answer) for answer in answers}
    begun: set[int] = set()
    left, end = len(answers), ""
    async for answer, delta in merged(answers):
        if answer.index not in begun:
            # Not before there is a token: clients take the first chunk for the first token.
            begun.add(answer.index)
            yield chunk(answer, {"role": "assistant", "content": ""}, None)
        logprobs = None
        if shape.logprobs and delta.logprobs:
            logprobs = chat_logprobs(served.llm.tokenizer, delta.logprobs, shape.top_logprobs)
        fields = [said[answer.index].fields(event) for event in delta.events]
        parts = [each for each in fields if each]
        if not parts and logprobs is not None:
            parts = [{"content": ""}]
        for i, each in enumerate(parts):
            yield chunk(answer, each, None, logprobs if i == 0 else None)
        if delta.finish_reason:
            left, end = left - 1, chunk(answer, {}, shape.finish_of(answer))
            if left:
                yield end
    if shape.include_usage:
        end += sse(head | {"choices": [], "usage": usage_of(answers), "timings": timings_of(answers[0])})
    yield Last(end + sse("[DONE]"))


class Said:
    """Writes the events of one answer as deltas of chunks.

    A message has one content, whatever stands between its parts: text after a call begins on a new line if there was text
    before the call, and so do thoughts.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._said: set[type[Event]] = set()
        self._apart: set[type[Event]] = set()

    def fields(self, event: Event) -> dict[str, Any]:
        """An event as the delta of a chunk; empty if there is nothing to write."""
        if isinstance(event, Content):
            return {"content": self._text(event)}
        if isinstance(event, Reasoning):
            text = self._text(event)
            return {"reasoning_content": text, "reasoning": text}
        if isinstance(event, CallBegin):
            self._apart |= self._said
            function = {"name": event.name, "arguments": ""}
            id = self._answer.call_id(event.index)
            return {"tool_calls": [{"index": event.index, "id": id, "type": "function", "function": function}]}
        if isinstance(event, CallArguments):
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        return {}

    def _text(self, event: Content | Reasoning) -> str:
        begin = "\n" if type(event) in self._apart else ""
        self._apart.discard(type(event))
        self._said.add(type(event))
        return begin + event.text
