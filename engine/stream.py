"""An answer in an event loop: its pieces, or the whole of it, awaited."""

from collections.abc import AsyncGenerator, Generator
from concurrent.futures import Executor

from engine.decode.generation import Generation


class Stream:
    """An answer for programs with an event loop, from :meth:`LLM.stream` or :meth:`LLM.stream_chat`.

    ``async for piece in stream`` gets the text in pieces while it is generated; ``await stream`` waits for the end and gives
    the finished answer. The event loop never waits for the model. The answer ends early if the iteration is left, or if the
    task is cancelled.

    Attributes
    ----------
    answer : Generation
        The answer, with its text so far, its tokens and, at the end, its ``finish_reason``.

    Examples
    --------
    >>> import asyncio, engine
    >>> llm = engine.load(n_ctx=256)
    >>> async def ask():
    ...     answer = await llm.stream("for i in range(", max_tokens=3, temperature=0)
    ...     print(answer.text, answer.finish_reason)
    >>> asyncio.run(ask())
    1,  length
    """

    answer: Generation

    def __init__(self, answer: Generation, threads: Executor) -> None:
        self.answer = answer
        self._threads = threads
        self._pieces = self._run()

    def __aiter__(self) -> AsyncGenerator[str, None]:
        return self._pieces

    def __await__(self) -> Generator[object, None, Generation]:
        return self._whole().__await__()

    async def aclose(self) -> None:
        """End the answer early. Does nothing if it has ended."""
        await self._pieces.aclose()
        self.answer.close()

    async def _run(self) -> AsyncGenerator[str, None]:
        import asyncio  # only here: it takes time, and most programs have no event loop

        loop = asyncio.get_running_loop()
        try:
            # Each waits in a thread of its own: there are no more of them than answers.
            while (piece := await loop.run_in_executor(self._threads, next, self.answer, None)) is not None:
                yield piece
        finally:
            self.answer.close()

    async def _whole(self) -> Generation:
        async for _ in self._pieces:
            pass
        return self.answer
