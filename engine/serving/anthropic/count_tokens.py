"""``POST /v1/messages/count_tokens``."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.serving.anthropic.conversation import read_prompt, read_tool_choice
from engine.serving.body import read_fields
from engine.serving.state import State


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a prompt: exactly those that ``/v1/messages`` would read."""
    state = State.of(request)
    fields = await read_fields(request, state.limits)
    async with state.models.use(fields.text("model")) as served:
        prompt = await read_prompt(fields, served.llm, state.limits, read_tool_choice(fields, state.limits))
    headers = {"request-id": request.scope["state"]["request_id"]}
    return JSONResponse({"input_tokens": len(prompt.ids)}, headers=headers)
