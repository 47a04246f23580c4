"""The routes of stored responses, of which this server has none."""

from starlette.requests import Request
from starlette.responses import Response

from engine.serving.errors import Refusal


async def stored(request: Request) -> Response:
    """Say that there is no response."""
    raise Refusal(
        "this server stores no responses: keep what POST /v1/responses answers, and send it again as input.", 404
    )
