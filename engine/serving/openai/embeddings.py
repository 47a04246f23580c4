"""``POST /v1/embeddings``, which this server refuses."""

from starlette.requests import Request
from starlette.responses import Response

from engine.serving.errors import Refusal


async def embeddings(request: Request) -> Response:
    """Say that there are no embeddings."""
    problem = "this server generates text and computes no embeddings; send /v1/embeddings to a server that does."
    raise Refusal(problem, 501, code="not_supported")
