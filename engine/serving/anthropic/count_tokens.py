"""``POST /v1/messages/count_tokens``."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from engine.serving.anthropic.messages import read_conversation
from engine.serving.anthropic.shapes import error_body
from engine.serving.exchange import counted
from engine.serving.fields import Fields
from engine.serving.served import Served


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a prompt: exactly those that ``/v1/messages`` would read."""
    request_id = request.scope["state"]["request_id"]
    response = await counted(request, _ids, partial(error_body, request_id=request_id))
    response.headers["request-id"] = request_id
    return response


async def _ids(fields: Fields, served: Served) -> list[int]:
    prompt, *_ = await read_conversation(fields, served)
    return prompt.ids
