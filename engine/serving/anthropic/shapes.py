"""What Anthropic's answers have in common: errors, usage and the reasons why an answer ends."""

from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from engine.serving.answer import Answer
from engine.serving.errors import Refusal
from engine.serving.streams import sse

TYPES = {413: "request_too_large", 500: "api_error", 501: "api_error"}
"""The types of errors that Anthropic names otherwise, by their status."""

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Why an answer ended, in Anthropic's words."""


def error_body(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """The body of an error."""
    message = refusal.message
    if refusal.code == "context_length_exceeded":
        # Clients look for these words and shorten the conversation.
        message = f"prompt is too long: {message}"
    error = {"type": TYPES.get(refusal.status, refusal.kind), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


class ErrorResponse(Response):
    """The response of an error.  It learns the id of the request, which is part of the body, when it is sent."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(status_code=refusal.status)
        self.refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope["state"]["request_id"]
        headers = {**self.refusal.headers(), "request-id": request_id}
        response = JSONResponse(error_body(self.refusal, request_id), self.status_code, headers)
        await response(scope, receive, send)


def error_event(refusal: Refusal, request_id: str) -> str:
    """An error in a stream that has begun."""
    return sse(error_body(refusal, request_id), "error")


def usage_of(answer: Answer) -> dict[str, int]:
    """The tokens of an answer and of its prompt; ``input_tokens`` are those that the cache did not hold."""
    return {
        "input_tokens": answer.n_prompt - answer.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.n_cached,
        "output_tokens": answer.n_completion,
    }


def ending_of(answer: Answer) -> dict[str, str | None]:
    """Why an answer ended, and the stop text that ended it."""
    if answer.stop_text and answer.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_text}
    return {"stop_reason": STOP_REASONS[answer.finish_reason], "stop_sequence": None}
