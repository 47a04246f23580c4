"""``POST /v1/chat/completions/input_tokens``."""

from starlette.requests import Request
from starlette.responses import Response

from engine.serving.exchange import counted
from engine.serving.fields import Fields
from engine.serving.openai.chat import read_conversation
from engine.serving.openai.shapes import error_body
from engine.serving.served import Served


async def input_tokens(request: Request) -> Response:
    """Count the tokens of a prompt: exactly those that ``/v1/chat/completions`` would read."""
    return await counted(request, _ids, error_body, object="response.input_tokens")


async def _ids(fields: Fields, served: Served) -> list[int]:
    prompt, _, _ = await read_conversation(fields, served)
    return prompt.ids
