"""``POST /v1/verify``: the replay of a receipt."""

import asyncio
import dataclasses
import threading
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.errors import UsageError
from engine.serving.errors import Refusal
from engine.serving.exchange import computed
from engine.serving.fields import Fields
from engine.serving.openai.shapes import error_body
from engine.serving.served import Served


async def verify(request: Request) -> Response:
    """Whether the model gives the answer of a receipt, or what differs first."""
    return await computed(request, _answer, error_body)


async def _answer(fields: Fields, served: Served) -> Mapping[str, Any]:
    receipt = fields.required("receipt")
    if not isinstance(receipt, dict):
        raise fields.refuse("receipt", "must be an object: the receipt of an answer")
    if served.n_replays >= served.limits.queue:
        problem = (
            f"{served.n_replays} requests wait and this server lets {served.limits.queue} wait (--queue); try later."
        )
        raise Refusal(problem, 503, retry_after=5)
    fingerprint = await served.fingerprint()
    left = threading.Event()

    def go_on(done: int, total: int) -> None:
        """Called between passes: end the replay if nobody waits for it."""
        if left.is_set():
            raise UsageError("nobody waits for this replay.")

    served.n_replays += 1
    try:
        async with served.replaying:
            found = await asyncio.to_thread(served.llm.verify, receipt, go_on)
    finally:
        left.set()
        served.n_replays -= 1
    head = {"object": "verification", "model": served.name, "system_fingerprint": fingerprint}
    return head | dataclasses.asdict(found)
