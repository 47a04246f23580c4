"""Clients that leave, as many as wanted, beside honest ones: each honest answer must be the one that its request gets alone.

``python -m tests.hostile_abandon -n 100000`` lets a fifth of the answers be abandoned by threads that iterate over them, two
fifths in an event loop, and two fifths by clients of a server that close their connection.  The model is random and tiny, so
that the scheduler and the server have more to do than it.
"""

import argparse
import asyncio
import gc
import json
import logging
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import engine
from engine.serving.answer import Ask
from engine.serving.app import app
from engine.serving.limits import Limits
from engine.serving.served import Served, Spec
from engine.synthetic.model import make_model
from engine.tools.formats.plain import plain
from tests.serving.live import live

THREADS, CLIENTS, HONEST = 8, 48, 12
"""Threads and clients that abandon answers at the same time, and those that want theirs."""

Options = dict[str, Any]


class Table:
    """Requests with their answers alone, and the counts of what became of them.

    Attributes: ``alone``: the text of each answer, from the interface that is tested: they have different defaults.
    """

    def __init__(self, llm: engine.LLM, count: int = 24) -> None:
        rng, n_vocab = np.random.default_rng(1), llm.config.n_vocab
        text = rng.integers(0, n_vocab, 120).tolist()
        self.asks: list[tuple[list[int], Options]] = []
        for i in range(count):
            ids = [*text[: int(rng.integers(1, 120))], *rng.integers(0, n_vocab, int(rng.integers(1, 9))).tolist()]
            options: Options = {"max_tokens": int(rng.integers(1, 16)), "seed": i, "ignore_eos": True}
            self.asks.append((ids, options | {"temperature": float(rng.choice([0, 0.8])), "top_k": 20}))
        self.alone: list[str] = []
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    def found(self, i: int, text: str) -> None:
        """Compare an answer with that of its request alone."""
        self.counts["honest"] += 1
        if text != self.alone[i]:
            self.counts["differing"] += 1
            self.errors[f"{text!r} instead of {self.alone[i]!r}"] += 1

    def failed(self, error: BaseException | str) -> None:
        """Count an honest request that has no answer."""
        self.counts["honest"] += 1
        self.counts["failed"] += 1
        self.errors[repr(error)[:200]] += 1


class Left:
    """How many answers are still to be abandoned."""

    def __init__(self, count: int) -> None:
        self._left = iter(range(count))
        self.over = False

    def one(self) -> bool:
        """Whether there is one more; any thread may ask."""
        self.over = self.over or next(self._left, None) is None
        return not self.over


def in_threads(llm: engine.LLM, table: Table, n: int) -> None:
    """Threads that go away in the middle of iterating."""
    left = Left(n)
    table.alone = [llm.complete(ids, **options).text for ids, options in table.asks]

    def abandon(number: int) -> None:
        rng = np.random.default_rng(number)
        while left.one():
            ids, options = table.asks[int(rng.integers(len(table.asks)))]
            answer = llm.generate(ids, **(options | {"max_tokens": 60}))
            for _ in range(int(rng.integers(1, 4))):
                next(answer, None)
            if rng.random() < 0.5:
                answer.close()
            del answer
            table.counts["abandoned in threads"] += 1

    def want(number: int) -> None:
        rng = np.random.default_rng([1, number])
        while not left.over:
            i = int(rng.integers(len(table.asks)))
            try:
                table.found(i, llm.complete(table.asks[i][0], **table.asks[i][1]).text)
            except Exception as error:
                table.failed(error)

    threads = [threading.Thread(target=abandon, args=(i,)) for i in range(THREADS)]
    threads += [threading.Thread(target=want, args=(i,)) for i in range(HONEST)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    llm.complete(table.asks[0][0], max_tokens=1)
    llm.check_pages()
    assert llm.core.n_active == 0, "answers that nobody wants have slots"


async def _storm(
    abandon: Callable[[np.random.Generator], Awaitable[None]],
    want: Callable[[int], Awaitable[str]],
    table: Table,
    n: int,
    what: str,
) -> None:
    """Abandon n answers, and want others meanwhile."""
    left = Left(n)
    table.alone = [await want(i) for i in range(len(table.asks))]

    async def abandoning(number: int) -> None:
        rng = np.random.default_rng(number)
        while left.one():
            await abandon(rng)
            table.counts[what] += 1

    async def wanting(number: int) -> None:
        rng = np.random.default_rng([1, number])
        while not left.over:
            i = int(rng.integers(len(table.asks)))
            try:
                table.found(i, await want(i))
            except Exception as error:
                table.failed(error)

    async with asyncio.TaskGroup() as group:
        for i in range(CLIENTS):
            group.create_task(abandoning(i))
        for i in range(HONEST):
            group.create_task(wanting(i))


async def in_a_loop(llm: engine.LLM, table: Table, n: int) -> None:
    """Answers of a driver that are cancelled, or that nobody reads before."""
    served = Served(Spec("tiny", lambda: llm), llm, asyncio.get_running_loop(), Limits(backlog=4))

    async def begun(i: int, **options: Any) -> Any:
        ids, own = table.asks[i]
        return (await served.answers(Ask(ids, plain, own | options)))[0]

    async def abandon(rng: np.random.Generator) -> None:
        answer = await begun(int(rng.integers(len(table.asks))), max_tokens=60)
        how = rng.random()
        if how < 0.3:
            await asyncio.sleep(float(rng.random()) * 0.02)  # unread, it pauses
        elif how < 0.8:
            deltas = aiter(answer)
            for _ in range(int(rng.integers(1, 5))):
                await anext(deltas, None)
            await deltas.aclose()
        answer.cancel()

    async def want(i: int) -> str:
        ids = [id async for delta in await begun(i) for id in delta.ids]
        return llm.tokenizer.decode(ids)

    await _storm(abandon, want, table, n, "cancelled in a loop")
    while served.driver.n_answers:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(served.driver.close)
    llm.check_pages()
    assert llm.core.n_active == 0, "answers that nobody wants have slots"


def _body(table: Table, i: int, **fields: Any) -> bytes:
    ids, options = table.asks[i]
    return json.dumps({"prompt": ids} | options | fields).encode()


def _request(body: bytes, length: int) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\nConnection: close\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


async def over_http(host: str, port: int, table: Table, n: int) -> None:
    """Clients that close their connection: before the end of their request, before the answer, or in the middle of it."""

    async def abandon(rng: np.random.Generator) -> None:
        body = _body(table, int(rng.integers(len(table.asks))), max_tokens=60, stream=bool(rng.random() < 0.7))
        reader, writer = await asyncio.open_connection(host, port)
        cut = int(rng.integers(1, len(body))) if rng.random() < 0.1 else len(body)
        writer.write(_request(body[:cut], len(body)))
        how = rng.random()
        if how < 0.3:
            await asyncio.sleep(float(rng.random()) * 0.03)
        elif cut == len(body):
            for _ in range(int(rng.integers(1, 4))):
                await reader.read(200)
        if rng.random() < 0.5:  # a reset instead of an orderly end
            own = writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        try:
            await writer.wait_closed()
        except OSError:
            pass

    async def want(i: int) -> str:
        stream = i % 2 == 0
        body = _body(table, i, stream=stream)
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(_request(body, len(body)))
            head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise ConnectionError(head[:60] + rest[:100])
        if b"chunked" in head.lower():
            rest = _joined(rest)
        if not stream:
            return str(json.loads(rest)["choices"][0]["text"])
        *frames, end, nothing = rest.decode().split("\n\n")
        if (end, nothing) != ("data: [DONE]", ""):
            raise ConnectionError(f"the stream ends with {end!r}")
        events = [json.loads(frame.removeprefix("data: ")) for frame in frames]
        return "".join(choice["text"] for event in events for choice in event["choices"])

    await _storm(abandon, want, table, n, "left a server")


def _joined(data: bytes) -> bytes:
    """A body without the lengths of its chunks."""
    found = b""
    while data:
        length, _, data = data.partition(b"\r\n")
        count = int(length, 16)
        found, data = found + data[:count], data[count + 2 :]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print counts; exit status 1 if an honest request failed or got another answer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=5000, help="answers to abandon")
    parser.add_argument("-np", type=int, default=4, help="answers that are computed at once")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder) / "tiny.gguf", "tiny-qwen3", "Q8_0")

        def opened() -> engine.LLM:
            return engine.load(path, device="cpu", n_ctx=192, n_threads=1, parallel=args.np)

        with opened() as llm:
            table = Table(llm)
            parts: list[tuple[str, float]] = [("threads", 0.2), ("loop", 0.4), ("server", 0.4)]
            for name, share in parts:
                before, begun, n = table.counts.copy(), time.perf_counter(), int(share * args.n)
                if name == "threads":
                    in_threads(llm, table, n)
                elif name == "loop":
                    asyncio.run(in_a_loop(llm, table, n))
                else:
                    guarded = app([Spec("tiny", opened)], limits=Limits(backlog=8))
                    with live(guarded) as (host, port):
                        asyncio.run(over_http(host, port, table, n))
                        served = guarded.state.models.entries["tiny"].served
                        assert served is not None
                        until = time.monotonic() + 30
                        while served.driver.n_answers and time.monotonic() < until:
                            time.sleep(0.01)
                        assert served.driver.n_answers == served.llm.core.n_active == 0, "answers are left"
                        served.llm.check_pages()
                new = table.counts - before
                new["honest"] += 0
                listed = ", ".join(f"{what} {count}" for what, count in new.items())
                print(f"{name}: {listed}; {time.perf_counter() - begun:.0f} s", flush=True)
    counts = table.counts
    wrong = counts["failed"] + counts["differing"]
    print(f"honest {counts['honest']}, failed {counts['failed']}, differing {counts['differing']}", flush=True)
    for error, count in table.errors.most_common(5):
        print(f"  {count} times {error}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
