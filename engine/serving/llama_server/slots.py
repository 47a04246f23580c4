"""``GET /slots``: what the slots of a model compute."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.decode.request import Request as EngineRequest
from engine.serving.errors import Refusal
from engine.serving.llama_server.shapes import model_of, parameters
from engine.serving.models import PATIENCE_SECONDS
from engine.serving.state import State


async def slots(request: Request) -> Response:
    """The slots of a model; ``?fail_on_no_slot=1``: status 503 if none is free.  Texts are not shown."""
    async with State.of(request).models.use(model_of(request), PATIENCE_SECONDS) as served:
        llm = served.llm
        found = [{"id": i, "n_ctx": llm.n_ctx, **_described(slot.owner)} for i, slot in enumerate(llm.slots)]
    if request.query_params.get("fail_on_no_slot") and all(slot["is_processing"] for slot in found):
        raise Refusal("no slot available", 503, retry_after=1)
    return JSONResponse(found)


def _described(owner: EngineRequest | None) -> Mapping[str, Any]:
    if owner is None:
        return {"id_task": -1, "speculative": False, "is_processing": False}
    n_decoded = len(owner.known) - owner.n_prompt
    return {
        "id_task": owner.number,
        "speculative": owner.speculation is not None,
        "is_processing": True,
        "params": parameters(owner.sampler.params),
        "next_token": [{"has_next_token": not owner.done, "n_remain": owner.left, "n_decoded": n_decoded}],
    }
