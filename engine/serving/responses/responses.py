"""``POST /v1/responses``."""

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.sampling.token_logprob import TokenLogprob
from engine.serving.answer import Answer
from engine.serving.errors import Refusal
from engine.serving.exchange import Plan, respond
from engine.serving.fields import Fields
from engine.serving.openai.shapes import chat_logprobs, error_body, timings_of, usage_of
from engine.serving.responses.items import Items, Logprob
from engine.serving.responses.request import Asked, read_request
from engine.serving.served import Served
from engine.serving.streams import merged, sse


async def responses(request: Request) -> Response:
    """Answer a conversation, as a whole or as a stream."""
    reply = Reply()
    return await respond(request, reply.read, reply.failed, error=error_body)


class Reply:
    """The response to one request, in each of its states."""

    _served: Served
    _asked: Asked

    def __init__(self) -> None:
        self._read = False
        self._output: list[dict[str, Any]] = []
        self._n_sent = 0

    async def read(self, fields: Fields, served: Served) -> Plan:
        """What the request asks for."""
        self._served, self._asked = served, await read_request(fields, served)
        self._read = True
        return Plan([self._asked.ask], self._whole, self._events)

    def failed(self, refusal: Refusal) -> str:
        """The last event of a stream that ends with an error."""
        code = "server_error" if refusal.status >= 500 else "invalid_prompt"
        if not self._read:
            return self._event({"type": "error", "code": code, "message": refusal.message, "param": refusal.param})
        error = {"code": code, "message": refusal.message, "param": refusal.param, "type": refusal.kind}
        return self._event({"type": "response.failed", "response": self._state("failed", error=error)})

    async def _whole(self, answers: list[Answer]) -> dict[str, Any]:
        (answer,) = answers
        items = self._items(answer)
        async for _, delta in merged(answers):
            items.delta(delta)
        return self._ended(answer)

    async def _events(self, answers: list[Answer]) -> AsyncIterator[str]:
        (answer,) = answers
        items = self._items(answer)
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self._state("in_progress")})
        async for _, delta in merged(answers):
            for message in items.delta(delta):
                yield self._event(message)
        response = self._ended(answer)
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def _items(self, answer: Answer) -> Items:
        return Items(answer, self._asked.id, self._output, self._described, self._asked.seal)

    def _described(self, tokens: Sequence[TokenLogprob]) -> list[Logprob]:
        return chat_logprobs(self._served.llm.tokenizer, tokens, self._asked.top_logprobs)["content"]

    def _event(self, message: dict[str, Any]) -> str:
        number, self._n_sent = self._n_sent, self._n_sent + 1
        return sse(message | {"sequence_number": number}, message["type"])

    def _state(self, status: str, **more: Any) -> dict[str, Any]:
        """The response as it is now."""
        empty = {"error": None, "incomplete_details": None, "completed_at": None, "usage": None}
        return {**self._asked.head, "status": status, "output": self._output, **empty, **more}

    def _ended(self, answer: Answer) -> dict[str, Any]:
        """The response at its end."""
        counts = usage_of([answer])
        usage = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": counts["completion_tokens_details"],
            "total_tokens": counts["total_tokens"],
        }
        more = {"usage": usage, "timings": timings_of(answer), **answer.receipt()}
        if answer.finish_reason == "length":
            return self._state("incomplete", incomplete_details={"reason": "max_output_tokens"}, **more)
        return self._state("completed", completed_at=int(time.time()), **more)
