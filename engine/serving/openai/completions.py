"""``POST /v1/completions``: a text is continued, or its tokens are scored."""

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.checks import described
from engine.llm import LLM
from engine.serving.answer import Answer, Ask, Delta
from engine.serving.aside import aside
from engine.serving.exchange import TOKEN_BYTES, Plan, respond
from engine.serving.fields import Fields, is_token_id
from engine.serving.limits import Limits
from engine.serving.openai.chat import Shape
from engine.serving.openai.scores import Scores, joined
from engine.serving.openai.shapes import error_body, error_event, timings_of, usage_of
from engine.serving.permitted import read_permitted
from engine.serving.sampling import clamped, read_most, read_options, read_stop
from engine.serving.served import Served
from engine.serving.streams import Last, merged, sse
from engine.serving.structured import read_form
from engine.tools.formats.events import Content
from engine.tools.formats.plain import plain

MAX_TOKENS = 16
"""Tokens of an answer, if the request does not say how many."""


@dataclass(frozen=True)
class TextShape(Shape):
    """How an answer is written down; echo: after the prompt; n_prompts: the number of prompts."""

    echo: bool
    n_prompts: int


async def completions(request: Request) -> Response:
    """Continue texts, each as a whole or all in one stream."""
    return await respond(request, _read, error_event, error=error_body)


async def _read(fields: Fields, served: Served) -> Plan:
    asks, shape = await read_asks(fields, served)
    whole, chunks = partial(_whole, served=served, shape=shape), partial(_chunks, served=served, shape=shape)
    return Plan(asks, whole, chunks)


async def read_asks(fields: Fields, served: Served) -> tuple[list[Ask], TextShape]:
    """What a request asks for, one entry per prompt."""
    llm, limits = served.llm, served.limits
    n = fields.whole("n", 1, 1, limits.n, "--most-n")
    best_of = fields.whole("best_of", n, 1)
    if best_of != n:
        problem = f"must be {n}, the number of answers (n), not {best_of}: this server returns every answer it computes"
        raise fields.refuse("best_of", problem)
    prompts = await aside(fields.size, partial(read_prompts, fields, llm, limits))
    most = limits.queue + len(llm.slots)
    if n * len(prompts) > most:
        problem = f"asks for {n * len(prompts)} answers and this server computes at most {most} at once (--queue)"
        raise fields.refuse("prompt", problem)
    logprobs = fields.whole("logprobs", None, 0, limits.top_logprobs, "--top-logprobs")
    echo = fields.flag("echo", False)
    max_tokens = read_most(fields, "max_tokens", "n_predict", default=MAX_TOKENS)
    grammar = await read_form(fields, llm, limits, (fields, "response_format"))
    permitted = read_permitted(fields, llm)
    options, stop = read_options(fields, llm, limits), read_stop(fields, limits)
    scored, receipt = echo and logprobs is not None, fields.flag("receipt", False)
    asks = []
    for ids in prompts:
        # A prompt that leaves no room is refused when 1 token is asked for; 0 would be an empty answer.
        room = clamped(max_tokens, llm, len(ids)) or (1 if max_tokens is None else min(max_tokens, 1))
        own = options | {"max_tokens": room, "grammar": grammar}
        asks.append(Ask(ids, plain, own, n, logprobs, scored, stop, permitted, receipt))
    given = fields.object("stream_options") or Fields({})
    shape = TextShape(
        f"cmpl-{secrets.token_hex(12)}",
        int(time.time()),
        served.name,
        await served.fingerprint(),
        logprobs is not None,
        logprobs or 0,
        given.flag("include_usage", False),
        given.flag("continuous_usage_stats", False),
        echo,
        len(prompts),
    )
    given.ignore("include_obfuscation")
    return asks, shape


def read_prompts(fields: Fields, llm: LLM, limits: Limits, name: str = "prompt") -> list[list[int]]:
    """The token ids of each prompt: of a text, of a list of texts, of a list of ids or of a list of lists of ids.

    name: the field.  Control tokens in a text are text.  Takes a while if a text is long: call it by :func:`aside`.
    """
    value = fields.required(name)
    if isinstance(value, str):
        return [_ids(fields, name, value, llm)]
    if not isinstance(value, list) or not value:
        problem = "must be a text, a list of token ids, or a list of either that is not empty"
        raise fields.refuse(name, f"{problem}, not {described(value)}")
    if not isinstance(value[0], (str, list)):
        return [_ids(fields, name, value, llm)]
    fields.items(name, limits.prompts, "--prompts")
    for i, each in enumerate(value):
        if type(each) is not type(value[0]):
            wanted = "a text" if isinstance(value[0], str) else "a list of token ids"
            raise fields.refuse(f"{name}[{i}]", f"must be {wanted}, as the first one is, not {described(each)}")
    return [_ids(fields, f"{name}[{i}]", each, llm) for i, each in enumerate(value)]


def _ids(fields: Fields, name: str, prompt: str | list[Any], llm: LLM) -> list[int]:
    """The token ids of one prompt, which is the field of this name."""
    if isinstance(prompt, str):
        ids = llm.tokenizer.encode(prompt, add_special=True, parse_special=False, at_least=llm.check_least)
    else:
        last = llm.config.n_vocab - 1
        # One by one only if one of them is wrong: there may be a million.
        right = set(map(type, prompt)) <= {int} and (not prompt or 0 <= min(prompt) <= max(prompt) <= last)
        for i, id in enumerate(() if right else prompt):
            if not is_token_id(id, llm.config.n_vocab):
                raise fields.refuse(
                    f"{name}[{i}]", f"must be a token id of this model, 0 to {last}, not {described(id)}"
                )
        ids = prompt
    if not ids:
        raise fields.refuse(name, "has no tokens: give at least one")
    return ids


# --- answers -------------------------------------------------------------------------------------------------------


class Writer:
    """Writes one answer down, piece by piece; index: its number among all answers of the request."""

    def __init__(self, answer: Answer, index: int, served: Served, shape: TextShape) -> None:
        self.index = index
        self._answer = answer
        self._tokenizer = served.llm.tokenizer
        self._shape = shape
        self._scores = Scores(self._tokenizer, shape.top_logprobs)
        self._begun = False

    def size(self, delta: Delta) -> int:
        """About how many bytes :meth:`choice` gives for a delta."""
        n_tokens = len(delta.logprobs)
        if not self._begun and self._answer.prompt_scores is not None:
            n_tokens += len(self._answer.prompt_scores)
        return TOKEN_BYTES * n_tokens * (1 + self._shape.top_logprobs)

    def choice(self, delta: Delta) -> dict[str, Any]:
        """A delta as a choice of OpenAI's answers: the first one begins with the prompt, if that is echoed."""
        answer, logprobs = self._answer, None
        text = "".join(event.text for event in delta.events if isinstance(event, Content))
        tokens = list(delta.logprobs)
        ending = answer.generation.end_logprob
        if delta.finish_reason and ending is not None and not answer.stop_text:
            tokens.append(ending)  # evaluations count on one entry per token, also for the token that ends the answer
        parts = []
        if self._shape.echo and not self._begun:
            ids = answer.generation.prompt_ids
            text = self._tokenizer.decode(ids) + text
            if answer.prompt_scores is not None:
                parts.append(self._scores.prompt(ids, answer.prompt_scores))
        self._begun = True
        if self._shape.logprobs:
            logprobs = joined([*parts, self._scores.answer(tokens)])
        finish = delta.finish_reason or None
        choice = {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return choice | answer.receipt() if finish else choice


def _writers(answers: Sequence[Answer], served: Served, shape: TextShape) -> Mapping[Answer, Writer]:
    return {answer: Writer(answer, i, served, shape) for i, answer in enumerate(answers)}


async def _whole(answers: list[Answer], served: Served, shape: TextShape) -> dict[str, Any]:
    writers = _writers(answers, served, shape)
    parts: list[list[dict[str, Any]]] = [[] for _ in answers]
    async for answer, delta in merged(answers):
        writer = writers[answer]
        parts[writer.index].append(await aside(writer.size(delta), partial(writer.choice, delta)))
    choices = [
        own[-1]
        | {
            "text": "".join(part["text"] for part in own),
            "logprobs": joined([part["logprobs"] for part in own]) if shape.logprobs else None,
        }
        for own in parts
    ]
    body = shape.head("text_completion") | {"choices": choices, "usage": usage_of(answers, shape.n_prompts)}
    return body | {"timings": timings_of(answers[0])}


async def _chunks(answers: list[Answer], served: Served, shape: TextShape) -> AsyncIterator[str]:
    head, writers = shape.head("text_completion"), _writers(answers, served, shape)
    left, end = len(answers), ""
    async for answer, delta in merged(answers):
        writer = writers[answer]
        size = writer.size(delta)
        choice = await aside(size, partial(writer.choice, delta))
        if choice["text"] or choice["finish_reason"] or (shape.logprobs and choice["logprobs"]["tokens"]):
            usage = {"usage": usage_of(answers, shape.n_prompts)} if shape.continuous_usage else {}
            text = await aside(size, partial(sse, head | {"choices": [choice]} | usage))
            if choice["finish_reason"]:
                left -= 1
            if left:
                yield text
            else:
                end = text
    if shape.include_usage:
        usage = {"usage": usage_of(answers, shape.n_prompts), "timings": timings_of(answers[0])}
        end += sse(head | {"choices": []} | usage)
    yield Last(end + sse("[DONE]"))
