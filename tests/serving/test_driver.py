"""The thread that computes answers, and how it hands tokens to an event loop."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import engine
from engine.decode.part import Part
from engine.errors import DeviceError
from engine.serving.driver import Driver, Listener, News
from engine.serving.errors import Refusal
from engine.speculative.steps import HostSteps

N_TOKENS = 48


@pytest.fixture(scope="module")
def llm() -> Iterator[engine.LLM]:
    with engine.load(n_ctx=256, parallel=2, device="cpu") as model:
        yield model


class Reader(Listener):
    """Keeps what it receives, and works for ``seconds`` each time."""

    def __init__(self, llm: engine.LLM, prompt: str, seconds: float = 0.0) -> None:
        self.generation = llm.generate(prompt, max_tokens=N_TOKENS, temperature=0, ignore_eos=True)
        self.received: list[News] = []
        self.over = asyncio.Event()
        self._seconds = seconds

    def receive(self, news: News) -> None:
        self.received.append(news)
        end = time.thread_time() + self._seconds
        while time.thread_time() < end:
            pass
        if news.done:
            self.over.set()

    @property
    def ids(self) -> list[int]:
        return [token for news in self.received for token in news.tokens]


def read(llm: engine.LLM, *readers: Reader, watch: Callable[[Driver], None] = lambda driver: None) -> None:
    """Let the readers have their answers; watch: called with the driver before it has anything to compute."""

    async def run() -> None:
        driver = Driver(llm, asyncio.get_running_loop())
        watch(driver)
        for reader in readers:
            driver.submit(reader)
        async with asyncio.timeout(60):
            for reader in readers:
                await reader.over.wait()
        await asyncio.to_thread(driver.close)

    asyncio.run(run())


def expected(llm: engine.LLM, prompt: str) -> list[int]:
    return llm.complete(prompt, max_tokens=N_TOKENS, temperature=0, ignore_eos=True).ids


def test_a_busy_event_loop_gets_several_tokens_at_once(llm: engine.LLM) -> None:
    """It works 30 ms on what it gets, far longer than a token takes to compute; none is lost, and the first one is not held
    back for others."""
    prompts = "def add(a, b):", "import os\n"
    readers = [Reader(llm, prompt, 0.03) for prompt in prompts]
    read(llm, *readers)
    for reader, prompt in zip(readers, prompts, strict=True):
        assert reader.ids == expected(llm, prompt)
        sizes = [len(news.tokens) for news in reader.received]
        assert sizes[0] <= 2  # a round may compute the token after it, too
        assert len(sizes) < N_TOKENS / 2


def test_nothing_urgent_waits_while_the_host_computes(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third prompt is read when the first answer has ended."""
    readers = [Reader(llm, prompt) for prompt in ("def add(a, b):", "import os\n" * 4, "class A:\n" * 8)]
    waiting = []

    def watch(driver: Driver) -> None:
        def noted(compute: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(*args: Any) -> Any:
                requests = [reader.generation.request for reader in readers]
                firsts = any(request.items and not request.fetched for request in requests)
                waiting.append((compute.__qualname__, firsts or driver._urgent))
                return compute(*args)

            return wrapper

        for cls, name in (HostSteps, "start"), (Part, "advance"):
            monkeypatch.setattr(cls, name, noted(getattr(cls, name)))

    read(llm, *readers, watch=watch)
    assert len(waiting) > N_TOKENS and set(waiting) == {("HostSteps.start", False), ("Part.advance", False)}


def test_tokens_that_were_held_back_precede_an_error(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop works on the first token until the error comes."""
    reader, step, rounds = Reader(llm, "def add(a, b):", 0.3), llm.scheduler.step, 0

    def fails(on_wait: Callable[[], None]) -> bool:
        nonlocal rounds
        rounds += 1
        if rounds == 20:
            raise DeviceError("the GPU is gone")
        return step(on_wait)

    monkeypatch.setattr(llm.scheduler, "step", fails)
    read(llm, reader)
    assert isinstance(reader.received[-1].error, DeviceError)
    monkeypatch.undo()
    assert not reader.generation.request.items
    assert len(reader.ids) >= 10 and reader.ids == expected(llm, "def add(a, b):")[: len(reader.ids)]


def test_an_answer_that_comes_after_the_end_is_refused(llm: engine.LLM) -> None:
    """Its grammar may have been compiled while the model was closed."""

    async def run() -> None:
        driver, reader = Driver(llm, asyncio.get_running_loop()), Reader(llm, "import os")
        await asyncio.to_thread(driver.close)
        driver.submit(reader)
        async with asyncio.timeout(10):
            await reader.over.wait()
        (news,) = reader.received
        assert isinstance(news.error, Refusal) and news.error.status == 503 and not news.tokens
        assert driver.n_answers == 0

    asyncio.run(run())


def test_the_thread_ends_whenever_it_is_told_to(llm: engine.LLM) -> None:
    """Also when a round is about to begin."""

    async def run() -> None:
        driver = Driver(llm, asyncio.get_running_loop())

        class Wake(threading.Event):
            def clear(self) -> None:
                driver.stop()
                super().clear()

        before, driver._wake = driver._wake, Wake()
        before.set()
        await asyncio.to_thread(driver._thread.join, 5)
        ended = not driver._thread.is_alive()
        await asyncio.to_thread(driver.close)
        assert ended

    asyncio.run(run())
