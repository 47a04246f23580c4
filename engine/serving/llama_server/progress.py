"""``return_progress``: how much of a prompt has been read, in the stream of an answer."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping

from engine.serving.answer import Answer


class Progress:
    """What the scheduler tells about the prompt of one answer, from its thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: deque[Mapping[str, int]] = deque()
        self._news = asyncio.Event()
        #: The tokens that the cache held, and when reading began, of ``time.perf_counter``.
        self._cached = 0
        self._began: float | None = None

    def __call__(self, done: int, total: int) -> None:
        """``on_prefill`` of the answer."""
        now = time.perf_counter()
        if self._began is None:
            self._cached, self._began = done, now
        elapsed = round((now - self._began) * 1000)
        told = {"total": total, "cache": self._cached, "processed": done, "time_ms": elapsed}
        self._loop.call_soon_threadsafe(self._tell, told)

    def _tell(self, told: Mapping[str, int]) -> None:
        self._told.append(told)
        self._news.set()

    async def until(self, answer: Answer) -> AsyncIterator[Mapping[str, int]]:
        """The values of ``prompt_progress`` until the first token of the answer is there, or it has ended."""
        arrived = asyncio.ensure_future(answer.arrived())
        try:
            while True:
                news = asyncio.ensure_future(self._news.wait())
                try:
                    await asyncio.wait({arrived, news}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
                self._news.clear()
                while self._told:
                    yield self._told.popleft()
                if arrived.done():
                    return
        finally:
            arrived.cancel()
