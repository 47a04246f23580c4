"""The routes of Ollama that fetch, write or delete models, which this server refuses."""

from starlette.requests import Request
from starlette.responses import Response

from engine.serving.errors import Refusal

NAMES = {"pull": "POST", "push": "POST", "create": "POST", "copy": "POST", "delete": "DELETE"}
"""What the paths end in, and their methods."""


async def refused(request: Request) -> Response:
    """Say that models are not changed."""
    problem = "this server neither fetches nor changes models; start it with the models that it should offer (-m)."
    raise Refusal(problem, 501, code="not_supported")
