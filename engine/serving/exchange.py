"""From a request to its response: what all interfaces that answer have in common."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from engine.serving.accepted import check, table_of
from engine.serving.answer import Answer, Ask
from engine.serving.aside import aside
from engine.serving.body import read_fields
from engine.serving.budget import Claim, grow_for_tokens
from engine.serving.errors import Refusal
from engine.serving.fields import MOST_IGNORED, Fields
from engine.serving.served import Served
from engine.serving.state import State
from engine.serving.streams import SSE, Framing, Stream, dump, ended, soon, started, whole

LONG_SALT = 256
"""Characters of a salt for which its hash stands: salts are compared often."""

TOKEN_BYTES = 40
"""About the bytes that a token takes: one of a prompt in memory, or one that is written with its log-probability."""


class Plan(NamedTuple):
    """What a request asks for, one entry per prompt, and how its answers are written down: as a whole, or as the texts of a
    stream."""

    asks: Sequence[Ask]
    whole: Callable[[list[Answer]], Coroutine[Any, Any, Mapping[str, Any]]]
    chunks: Callable[[list[Answer]], AsyncIterator[str]]


async def respond(
    request: Request,
    read: Callable[[Fields, Served], Awaitable[Plan]],
    failed: Callable[[Refusal], str],
    framing: Framing = SSE,
    *,
    error: Callable[[Refusal], Mapping[str, Any]],
    fields: Fields | None = None,
    streams: bool = False,
) -> Response:
    """Answer a request, as a whole or as a stream.

    read: what the body asks for; failed: an error in a stream that has begun; framing: how a stream is written; error: the
    object of an error; fields: the body, if it has been read already; streams: whether the answer is a stream if the body
    does not say.
    """
    state = State.of(request)
    fields = fields or await read_fields(request, state.limits)
    check(fields, table_of(request.scope["path"]))
    stream = fields.flag("stream", streams)
    beginning = _begun(request, state, fields, read)
    if not stream:
        return await whole(request, _written(beginning), error)
    async with AsyncExitStack() as stack:
        # The model may have to be opened first.
        begun = started(beginning)
        stack.push_async_callback(_released, begun)
        if await soon(request, begun):
            plan, answers, _ = begun.result()
            return Stream(plan.chunks(answers), failed, stack.pop_all(), framing)
        return Stream(_chunks(begun, framing), failed, stack.pop_all(), framing)


class _Begun(NamedTuple):
    """Answers that are computed, and what is released when they are not needed any more."""

    plan: Plan
    answers: list[Answer]
    held: AsyncExitStack


async def _begun(
    request: Request, state: State, fields: Fields, read: Callable[[Fields, Served], Awaitable[Plan]]
) -> _Begun:
    salt = salt_of(request, fields)
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(state.models.use(fields.text("model")))
        await grow_for_tokens(request, fields, served.llm.tokenizer)
        plan = await read(fields, served)
        answers: list[Answer] = []
        for ask in plan.asks:
            ask.options["cache_salt"] = salt
            for answer in await served.answers(ask):
                # If a later one is refused, all are cancelled.
                stack.callback(answer.cancel)
                answers.append(answer)
        _note(request, state, served, answers, fields)
        # The body is not needed any more.
        fields.values.clear()
        Claim.of(request).hold(TOKEN_BYTES * sum(len(ask.prompt) for ask in plan.asks))
        return _Begun(plan, answers, stack.pop_all())


async def _released(begun: asyncio.Task[_Begun]) -> None:
    """Release what answers hold, also if they have not begun yet."""
    await ended(begun)
    if not begun.cancelled() and begun.exception() is None:
        await begun.result().held.aclose()


async def _chunks(begun: asyncio.Task[_Begun], framing: Framing) -> AsyncIterator[str]:
    """The texts of a stream that begins before its answers."""
    yield framing.ping
    plan, answers, _ = await begun
    async with aclosing(plan.chunks(answers)) as chunks:  # type: ignore[type-var]
        async for text in chunks:
            yield text


async def counted(
    request: Request,
    read: Callable[[Fields, Served], Awaitable[Sequence[int]]],
    error: Callable[[Refusal], Mapping[str, Any]],
    **more: Any,
) -> Response:
    """How many tokens the prompt of a request has, which ``read`` gives.

    error: the object of an error; more: further fields of the answer.
    """

    async def answer(fields: Fields, served: Served) -> Mapping[str, Any]:
        return {**more, "input_tokens": len(await read(fields, served))}

    return await computed(request, answer, error)


async def computed(
    request: Request,
    answer: Callable[[Fields, Served], Awaitable[Mapping[str, Any] | Sequence[Any]]],
    error: Callable[[Refusal], Mapping[str, Any]],
    fields: Fields | None = None,
) -> Response:
    """The response of a request that generates no text.

    answer: its JSON; error: the object of an error; fields: the body, if it has been read already.
    """
    state = State.of(request)
    fields = fields or await read_fields(request, state.limits)
    check(fields, table_of(request.scope["path"]))
    body = fields

    async def written() -> str:
        async with state.models.use(body.text("model")) as served:
            await grow_for_tokens(request, body, served.llm.tokenizer)
            found = await answer(body, served)
            request.scope["state"]["notes"]["model"] = served.name
            note_ignored(request, body)
            return await aside(body.size, partial(dump, found))

    return await whole(request, written(), error)


async def _written(beginning: Awaitable[_Begun]) -> str:
    """The JSON of answers that are written as a whole."""
    plan, answers, held = await beginning
    async with held:
        body = await plan.whole(answers)
        return await aside(_size(plan, answers), partial(dump, body))


def _size(plan: Plan, answers: Sequence[Answer]) -> int:
    """About how many bytes answers have that are written as a whole."""
    n_tokens = sum(answer.n_completion for answer in answers) + sum(len(ask.prompt) for ask in plan.asks if ask.scored)
    return TOKEN_BYTES * n_tokens * (1 + max(ask.logprobs or 0 for ask in plan.asks))


def salt_of(request: Request, fields: Fields) -> str:
    """The salt of what the cache holds of a request: only requests with the same key, if there are several, and the same
    ``cache_salt`` share it."""
    given = fields.text("cache_salt")
    if given == "":
        raise fields.refuse("cache_salt", "is empty: give some text, or leave it out")
    if given is not None and len(given) > LONG_SALT:
        given = hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()
    owner = request.scope["state"]["owner"]
    # The number of a key has no colon, so no two pairs give the same text.
    return f"{owner}:{given or ''}" if owner else given or ""


def _note(request: Request, state: State, served: Served, answers: Sequence[Answer], fields: Fields) -> None:
    """Count answers when they end, and name in the line of the log what it says besides the path."""
    notes = request.scope["state"]["notes"]
    notes["model"] = served.name
    note_ignored(request, fields)
    for answer in answers:
        state.metrics.begin(served.name, answer)
    notes["tokens"] = _Tokens(answers)


def note_ignored(request: Request, fields: Fields) -> None:
    """Name in the line of the log the fields that were ignored."""
    if ignored := fields.ignored():
        # A name may hold anything; what could end the line is written as an escape.
        names = ",".join(name[:40].encode("unicode_escape").decode() for name in ignored[:MOST_IGNORED])
        request.scope["state"]["notes"]["ignored"] = names


class _Tokens:
    """The tokens of answers, counted when the line of the log is written."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = answers

    def __str__(self) -> str:
        first = self._answers[0]
        return f"{first.n_cached}+{first.n_prompt - first.n_cached}+{sum(a.n_completion for a in self._answers)}"
