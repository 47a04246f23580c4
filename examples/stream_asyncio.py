"""Two answers of one model, streamed at the same time in an asyncio program.

    python examples/stream_asyncio.py

Each answer is computed in its own thread, so the event loop never waits for the model: it continues counting, and prints
each piece of text when it arrives. The two threads share the model and take turns. Both texts are the same as when the
model computes one answer at a time; the program checks this at the end.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Unpack

import engine

PROMPTS = {"A": "def add(a, b):\n    ", "B": "class Stack:\n    def push(self, item):\n        "}
OPTIONS: engine.Options = {"max_tokens": 16, "seed": 7}


async def stream(llm: engine.LLM, prompt: str, **options: Unpack[engine.Options]) -> AsyncIterator[str]:
    """The pieces of an answer. The answer ends early if the caller stops asking for them."""
    loop = asyncio.get_running_loop()
    pieces: asyncio.Queue[str | None] = asyncio.Queue()
    answer = llm.generate(prompt, **options)

    def compute() -> None:
        try:
            for piece in answer:
                loop.call_soon_threadsafe(pieces.put_nowait, piece)
        finally:
            loop.call_soon_threadsafe(pieces.put_nowait, None)

    computing = asyncio.ensure_future(asyncio.to_thread(compute))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
    finally:
        await asyncio.to_thread(answer.close)
        await computing  # raises what went wrong in the thread


async def show(llm: engine.LLM, name: str, prompt: str) -> str:
    """Prints the pieces of one answer, each in a line, and returns its text."""
    text = ""
    async for piece in stream(llm, prompt, **OPTIONS):
        print(f"{name} {piece!r}")
        text += piece
    return text


async def count() -> int:
    """Counts how often the event loop comes round, until it is cancelled."""
    rounds = 0
    try:
        while True:
            await asyncio.sleep(0.001)
            rounds += 1
    except asyncio.CancelledError:
        return rounds


async def main() -> None:
    """Streams both answers, and compares them with the answers computed one after the other."""
    with await asyncio.to_thread(engine.load, n_ctx=256) as llm:
        await asyncio.to_thread(llm.compile)
        counting = asyncio.create_task(count())
        texts = await asyncio.gather(*(show(llm, name, prompt) for name, prompt in PROMPTS.items()))
        counting.cancel()
        rounds = await counting
        alone = [llm.complete(prompt, **OPTIONS).text for prompt in PROMPTS.values()]
    print("the event loop was free:", rounds > 0)
    print("both texts are those of one answer at a time:", texts == alone)


if __name__ == "__main__":
    asyncio.run(main())
