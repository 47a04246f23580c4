"""``POST /models/load`` and ``POST /models/unload``: a model is opened before it is needed, or closed."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.serving.body import read_fields
from engine.serving.llama_server.shapes import error_body
from engine.serving.models import Entry, Models
from engine.serving.state import State
from engine.serving.streams import dump, whole


async def load(request: Request) -> Response:
    """Open a model.  The answer comes when it is open."""
    models, entry = await _find(request)

    async def opened() -> str:
        if entry.served is None:
            async with models.use(entry.spec.name):
                pass
        return dump({"success": True})

    return await whole(request, opened(), error_body)


async def unload(request: Request) -> Response:
    """Close a model as soon as nobody uses it: answers in progress end first."""
    models, entry = await _find(request)
    await models.release(entry)
    return JSONResponse({"success": True})


async def _find(request: Request) -> tuple[Models, Entry]:
    state = State.of(request)
    fields = await read_fields(request, state.limits)
    return state.models, state.models.find(fields.required_text("model"), exact=True)
