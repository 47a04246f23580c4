"""Work on a request that may take a while, away from the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SMALL = 4 << 10
"""Bytes of a body whose prompt is made in the event loop, which delays other requests by a few milliseconds."""


async def aside(size: int, call: Callable[[], T], small: int = SMALL) -> T:
    """The result of a call that takes time in proportion to ``size``, the bytes of a body: in a thread if these are more than
    ``small``.

    A short call is made at once.  With threads, requests that arrive together would all be read before the first one is
    submitted, and the threads would compete with the one that computes for the lock of the interpreter.
    """
    return call() if size <= small else await asyncio.to_thread(call)
