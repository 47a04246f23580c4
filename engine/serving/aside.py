"""Work on a request that may take a while, away from the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

SMALL = 4 << 10
"""Bytes of a body whose prompt is made in the event loop, which delays other requests by a few milliseconds."""

_COMPILING = ThreadPoolExecutor(4, "compiling")


async def compiling(call: Callable[[], T]) -> T:
    """The result of a call that compiles grammars, which may take seconds: in threads of its own, so that texts do not wait
    for it."""
    return await asyncio.get_running_loop().run_in_executor(_COMPILING, call)


async def aside(size: int, call: Callable[[], T], small: int = SMALL) -> T:
    """The result of a call that takes time in proportion to ``size``, the bytes of a body: in a thread if these are more than
    ``small``.

    A short call is made at once.  With threads, requests that arrive together would all be read before the first one is
    submitted, and the threads would compete with the one that computes for the lock of the interpreter.
    """
    return call() if size <= small else await asyncio.to_thread(call)
