"""Two answers of one model, streamed at the same time in an asyncio program.

    python examples/stream_asyncio.py

`llm.stream` waits for pieces in threads, so the event loop never waits for the model: it continues counting, and prints each
piece of text when it arrives. Both answers are computed together, a row of each in one pass. Both texts are the same as when
the model computes one answer at a time; the program checks this at the end.
"""

import asyncio

import engine

PROMPTS = {"A": "def add(a, b):\n    ", "B": "class Stack:\n    def push(self, item):\n        "}
OPTIONS: engine.Options = {"max_tokens": 16, "seed": 7}


async def show(llm: engine.LLM, name: str, prompt: str) -> str:
    """Prints the pieces of one answer, each in a line, and returns its text."""
    text = ""
    async for piece in llm.stream(prompt, **OPTIONS):
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
    with await asyncio.to_thread(engine.load, n_ctx=256, parallel=2) as llm:
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
