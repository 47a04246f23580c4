"""A budget of memory for the requests that are being answered."""

import asyncio
import time

from starlette.requests import Request

from engine.serving.aside import aside
from engine.serving.errors import Refusal
from engine.serving.fields import Fields
from engine.text.tokenizer import Tokenizer

MOST = 2 << 30
"""Bytes that requests may hold together on any machine."""

SHARE = 4
"""One in this many bytes of the free memory, if that is less."""

FREE = 1 << 20
"""Bytes that each request may hold whatever the others hold: there are no more requests than connections."""

PER_BYTE = 32
"""Bytes of memory per byte of a body, for its values and what becomes of them, other than tokens of a long text."""

LONG = 1 << 14
"""Characters of a text whose tokens take more memory than the rest."""

WAIT_SECONDS = 5.0
"""The time in which others may make room for a request before it is refused."""

POLL_SECONDS = 0.02
"""The time between two looks at whether there is room."""


def default_budget() -> int:
    """The bytes that requests may hold together: a quarter of the free memory, at most 2 GiB."""
    from engine.machine.memory import available_memory

    return min(MOST, available_memory() // SHARE)


class Budget:
    """Bytes of memory that requests hold while they are answered, by estimates.

    Attributes: ``total``: the most that they may hold together; ``held``: what they hold.  Only the event loop uses it.
    """

    def __init__(self, total: int = 0) -> None:
        """total: bytes; 0: ``default_budget()``."""
        self.total = total or default_budget()
        self.held = 0


class Claim:
    """What one request holds of a budget, in bytes: ``held``."""

    def __init__(self, budget: Budget) -> None:
        self.held = 0
        self._budget = budget

    @classmethod
    def of(cls, request: Request) -> "Claim":
        """What a request holds."""
        claim: Claim = request.scope["state"]["claim"]
        return claim

    async def grow(self, n_bytes: int) -> None:
        """Hold ``n_bytes`` in all, if that is more.  Waits a while if other requests hold too much, and raises Refusal with
        status 503 if they still do, or with 413 if the request alone needs more than all may hold."""
        if n_bytes <= self.held:
            return
        deadline = time.monotonic() + WAIT_SECONDS
        while n_bytes > FREE and self._budget.held - self.held + n_bytes > self._budget.total:
            if n_bytes > self._budget.total:
                needed, total = (round(n / 1e6) for n in (n_bytes, self._budget.total))
                problem = f"the request needs about {needed} MB of memory and this server has {total} MB for requests"
                raise Refusal(f"{problem}: send less text at once.", 413)
            if time.monotonic() >= deadline:
                problem = "the server is busy with other large requests; send the request again later."
                raise Refusal(problem, 503, retry_after=2)
            await asyncio.sleep(POLL_SECONDS)
        self.hold(n_bytes)

    def hold(self, n_bytes: int) -> None:
        """Hold ``n_bytes`` in all, whatever the others hold."""
        self._budget.held += n_bytes - self.held
        self.held = n_bytes


async def grow_for_tokens(request: Request, fields: Fields, tokenizer: Tokenizer) -> None:
    """Let a request hold what it takes to make the tokens of any text in its body.  Raises Refusal."""
    needed = 0
    if fields.size >= LONG:  # or else no text of it is long
        needed = await aside(
            fields.size, lambda: max(map(tokenizer.working_bytes, _long_texts(fields.values)), default=0)
        )
    await Claim.of(request).grow(PER_BYTE * fields.size + needed)


def _long_texts(value: object) -> list[str]:
    """The long texts in a value of JSON."""
    found: list[str] = []
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and len(value) >= LONG:
            found.append(value)
    return found
