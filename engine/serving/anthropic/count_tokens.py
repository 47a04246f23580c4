"""``POST /v1/messages/count_tokens``."""

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.serving.anthropic.conversation import read_prompt, read_tool_choice
from engine.serving.aside import aside
from engine.serving.exchange import counted
from engine.serving.fields import Fields
from engine.serving.served import Served


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a prompt: exactly those that ``/v1/messages`` would read."""
    body = {"input_tokens": await counted(request, _ids)}
    return JSONResponse(body, headers={"request-id": request.scope["state"]["request_id"]})


async def _ids(fields: Fields, served: Served) -> list[int]:
    choice = await aside(fields.size, partial(read_tool_choice, fields, served.limits))
    return (await read_prompt(fields, served.llm, served.limits, choice)).ids
