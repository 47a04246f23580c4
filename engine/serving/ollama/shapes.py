"""What the routes of Ollama have in common: bodies, errors and times."""

from collections.abc import Mapping
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.serving.body import read_fields
from engine.serving.errors import Refusal
from engine.serving.fields import Fields
from engine.serving.limits import Limits
from engine.serving.streams import line

PREFIX = "/api/"
"""What the paths of this interface begin with."""


async def read_body(request: Request, limits: Limits) -> Fields:
    """The body of a request.  Many of Ollama's clients, and the examples in its documentation, do not declare it as JSON."""
    return await read_fields(request, limits, declared=False)


def error_body(refusal: Refusal) -> Mapping[str, str]:
    """The body of an error."""
    return {"error": refusal.message}


def error_response(refusal: Refusal) -> Response:
    """The response of an error."""
    return JSONResponse(error_body(refusal), refusal.status, refusal.headers())


def error_line(refusal: Refusal) -> str:
    """An error in a stream that has begun."""
    return line(error_body(refusal))


def written(time: datetime) -> str:
    """A time as it is sent: UTC, with microseconds."""
    return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def now() -> str:
    """The present time as it is sent."""
    return written(datetime.now(UTC))


def model_name(fields: Fields, name: str) -> str:
    """The model's name as the client wrote it, or ``name``; halves of characters become question marks."""
    return (fields.text("model") or name).encode(errors="replace").decode()
