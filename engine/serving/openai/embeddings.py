"""``POST /v1/embeddings`` and its like, which this server refuses."""

from starlette.requests import Request
from starlette.responses import Response

from engine.serving.errors import Refusal


async def embeddings(request: Request) -> Response:
    """Say that there are no embeddings."""
    path = request.scope["path"]
    problem = f"this server generates text and computes no embeddings; send {path} to a server that does."
    raise Refusal(problem, 501, code="not_supported")
