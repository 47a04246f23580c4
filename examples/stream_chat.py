"""An answer to a conversation, streamed in an event loop: python examples/stream_chat.py"""

import asyncio

import bitmirror


async def main(llm: bitmirror.LLM) -> None:
    stream = llm.stream_chat(
        [{"role": "user", "content": "# add two numbers"}], chat_template="chatml", max_tokens=24, seed=1
    )
    async for piece in stream:
        print(piece, end="", flush=True)
    print(f"\n{len(stream.answer.ids)} tokens, {stream.answer.finish_reason}")


asyncio.run(main(bitmirror.load(n_ctx=256)))
