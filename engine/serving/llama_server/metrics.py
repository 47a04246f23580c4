"""``GET /metrics``: the counts of the server, for Prometheus."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from engine.serving.state import State


async def metrics(request: Request) -> Response:
    """All counts, in the text format of Prometheus."""
    state = State.of(request)
    return Response(state.metrics.text(state.models), headers={"content-type": CONTENT_TYPE_LATEST})
