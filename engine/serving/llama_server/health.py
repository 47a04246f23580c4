"""``GET /health``: whether the server answers requests."""

import time

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from engine.serving.errors import Refusal
from engine.serving.models import Status
from engine.serving.state import State

STALLED_SECONDS = 60
"""The time that a round may take before the server counts as broken."""


async def health(request: Request) -> Response:
    """Status 200 if the server answers requests, else 503 with the reason."""
    reason = problem(State.of(request))
    if reason:
        raise Refusal(reason, 503, retry_after=5)
    return JSONResponse({"status": "ok"})


def problem(state: State) -> str:
    """Why a server does not answer requests, "" if it does."""
    if state.draining:
        return "The server is shutting down"
    entries = state.models.entries.values()
    for entry in entries:
        if entry.served is None:
            continue
        driver = entry.served.driver
        if driver.failed is not None:
            return f"The device of {entry.spec.name} has failed; restart the server"
        if time.monotonic() - driver.moved > STALLED_SECONDS:
            return f"{entry.spec.name} has computed nothing for {STALLED_SECONDS} seconds; restart the server"
    # A server of several models answers while it opens another one.
    if all(entry.served is None for entry in entries) and any(entry.status is Status.LOADING for entry in entries):
        return "Loading model"
    return ""
