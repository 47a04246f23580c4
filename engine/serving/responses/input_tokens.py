"""``POST /v1/responses/input_tokens``."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.serving.exchange import counted
from engine.serving.fields import Fields
from engine.serving.responses.request import read_request
from engine.serving.served import Served


async def input_tokens(request: Request) -> Response:
    """Count the tokens of a prompt: exactly those that ``/v1/responses`` would read."""
    return JSONResponse({"object": "response.input_tokens", "input_tokens": await counted(request, _ids)})


async def _ids(fields: Fields, served: Served) -> list[int]:
    return (await read_request(fields, served)).ask.prompt
