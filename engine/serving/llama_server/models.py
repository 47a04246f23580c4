"""``GET /models``: the models of the server and whether they are open."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.serving.llama_server.shapes import state_of


async def models(request: Request) -> Response:
    """The list of llama-server's router."""
    return JSONResponse({"object": "list", "data": state_of(request).models.described()})
