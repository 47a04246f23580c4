"""``GET /v1/models`` and ``GET /v1/models/{id}``; also llama-server's ``GET /models``."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.serving.state import State


async def list_models(request: Request) -> Response:
    """The models of this server; each with its status."""
    return JSONResponse({"object": "list", "data": State.of(request).models.described()})


async def show_model(request: Request) -> Response:
    """One model, by its name or an alias."""
    models = State.of(request).models
    name = models.find(request.path_params["name"], exact=True).spec.name
    return JSONResponse(next(each for each in models.described() if each["id"] == name))
