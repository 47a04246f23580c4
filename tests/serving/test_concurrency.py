"""An answer depends on its request only: not on other requests, on clients that leave, or on those that read slowly."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from engine.decode.generation import request_of
from engine.speculative.params import SpeculationParams

pytest.importorskip("starlette")
pytest.importorskip("httpx")
from starlette.testclient import TestClient

from engine.serving.answer import Answer, Ask
from engine.serving.app import app
from engine.serving.errors import Refusal
from engine.serving.guard import Guard
from engine.serving.limits import Limits
from engine.serving.served import Served, Spec
from engine.serving.streams import SSE, Stream
from engine.tools.formats.plain import plain
from tests.serving.bundled import bundled

pytestmark = pytest.mark.together("serving")

CHAT = "/v1/chat/completions"
N = 16


opened = partial(bundled, parallel=6)


def served(speculation: SpeculationParams | None = None) -> Guard:
    return app([Spec("pycoder", opened, speculation=speculation or SpeculationParams())], limits=Limits(backlog=8))


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[TestClient, Guard]]:
    guarded = served()
    with TestClient(guarded, "http://localhost") as client:
        yield client, guarded


def requests() -> list[dict[str, Any]]:
    rng = random.Random(3)
    texts = ["def add(a, b):", "class Stack:", "import os\n", "for i in range(10):", "x = [1, 2,"]
    made = []
    for i in range(N):
        messages = [{"role": "user", "content": rng.choice(texts) * rng.randint(1, 4)}]
        body: dict[str, Any] = {"messages": messages, "max_tokens": rng.randint(1, 12), "seed": i}
        body |= {"temperature": rng.choice([0, 0.7, 1.3]), "n": rng.choice([1, 1, 2]), "top_p": rng.choice([1, 0.9])}
        if i % 3 == 0:
            body |= {"logprobs": True, "top_logprobs": 2}
        if i % 4 == 0:
            body |= {"stop": ["\n"]}
        made.append(body)
    return made


def answered(client: TestClient, body: dict[str, Any]) -> Any:
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def streamed(client: TestClient, body: dict[str, Any]) -> Any:
    """The text and the end of each answer of a stream."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    with client.stream("POST", CHAT, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        frames = "".join(answer.iter_text()).split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    for frame in frames[:-2]:
        for choice in json.loads(frame.removeprefix("data: "))["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["delta"].get("content", "")
            if choice["finish_reason"] is not None:
                assert index not in ends
                ends[index] = choice["finish_reason"]
    return [(texts[i], ends[i]) for i in sorted(ends)]


def test_each_answer_is_the_one_it_has_alone(server: tuple[TestClient, Guard]) -> None:
    """One after another, all at once, as streams, in another order, after a restart and with drafts."""
    client, guarded = server
    bodies = requests()
    alone = [answered(client, body) for body in bodies]
    plain = [[(c["message"]["content"], c["finish_reason"]) for c in choices] for choices in alone]
    with ThreadPoolExecutor(N) as pool:
        assert list(pool.map(lambda body: answered(client, body), bodies)) == alone
        assert list(pool.map(lambda body: streamed(client, body), reversed(bodies))) == plain[::-1]
    model = guarded.state.models.entries["pycoder"].served
    assert model is not None
    assert model.driver.n_answers == 0
    model.llm.check_pages()
    with TestClient(served(SpeculationParams(lookup=True)), "http://localhost") as other, ThreadPoolExecutor(N) as pool:
        assert list(pool.map(lambda body: answered(other, body), bodies[::-1])) == alone[::-1]


async def within(seconds: float, holds: Any) -> None:
    """Wait until ``holds()``."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)


def asked(most: int) -> Ask:
    ids = [5, 6, 7, 8]
    return Ask(ids, plain, {"max_tokens": most, "temperature": 0, "ignore_eos": True})


@asynccontextmanager
async def begun(limits: Limits) -> AsyncIterator[Served]:
    model = Served(Spec("pycoder", opened), opened(), asyncio.get_running_loop(), limits)
    try:
        yield model
    finally:
        await asyncio.to_thread(model.close)


async def ids_of(answer: Answer) -> list[int]:
    return [id async for delta in answer for id in delta.ids]


def test_an_answer_pauses_while_its_client_does_not_read_and_ends_when_it_leaves() -> None:
    async def run() -> None:
        async with begun(Limits(backlog=8)) as model:
            (whole,) = await model.answers(asked(200))
            expected = await ids_of(whole)
            assert len(expected) == 200
            (slow,) = await model.answers(asked(200))
            request = request_of(slow.generation)
            await within(60, lambda: request.paused)
            n = len(slow.generation.ids)
            # Others go on meanwhile.
            (other,) = await model.answers(asked(60))
            assert await ids_of(other) == expected[:60]
            assert len(slow.generation.ids) <= n + 16 < 200
            assert await ids_of(slow) == expected
            (left,) = await model.answers(asked(200))
            async for _ in left:
                break
            await within(60, lambda: model.driver.n_answers == 0)
            assert len(left.generation.ids) < 200
            model.llm.check_pages()

    asyncio.run(run())


def test_a_backlog_of_deltas_leaves_others_their_turn() -> None:
    """With log-probabilities each token is a delta of its own, and hundreds may wait to be written."""

    async def run() -> None:
        async with begun(Limits(backlog=8)) as model:
            ask = asked(60)
            ask.logprobs = 2
            (answer,) = await model.answers(ask)
            await within(60, lambda: request_of(answer.generation).paused)
            turns = 0

            async def other() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            task, n = asyncio.ensure_future(other()), 0
            async for _ in answer:
                assert turns >= n
                n += 1
                if n == 8:
                    break
            task.cancel()

    asyncio.run(run())


def test_the_queue_is_bounded() -> None:
    async def run() -> None:
        async with begun(Limits(queue=2)) as model:
            answers = [(await model.answers(asked(200)))[0] for _ in range(8)]
            with pytest.raises(Refusal, match="--queue") as refusal:
                await model.answers(asked(1))
            assert refusal.value.status == 503
            assert refusal.value.headers()["retry-after"]
            for answer in answers:
                answer.cancel()
            await within(60, lambda: model.driver.n_answers == 0)

    asyncio.run(run())


def test_a_stream_whose_client_left_before_its_first_token_holds_nothing() -> None:
    async def run() -> None:
        async with begun(Limits()) as model, AsyncExitStack() as stack:
            (answer,) = await model.answers(asked(200))
            stack.callback(answer.cancel)

            async def content() -> AsyncIterator[str]:
                async for delta in answer:
                    yield str(delta.ids)

            async def receive() -> Any:
                return {"type": "http.disconnect"}

            async def send(message: Any) -> None:
                await asyncio.sleep(1)

            await Stream(content(), str, stack.pop_all(), SSE)({"type": "http"}, receive, send)
            await within(60, lambda: model.driver.n_answers == 0)
            assert len(answer.generation.ids) < 200

    asyncio.run(run())
