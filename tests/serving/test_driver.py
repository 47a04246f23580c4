"""The thread that computes answers, and how it hands tokens to an event loop."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import engine
from engine.decode.generation import request_of
from engine.decode.host_steps import HostSteps
from engine.decode.prefill import PrefillPass
from engine.decode.request import Request
from engine.decode.scheduler import Scheduler
from engine.decode.waiting_queue import WaitingQueue
from engine.errors import DeviceError
from engine.serving import driver
from engine.serving.driver import Driver, Listener, News
from engine.serving.errors import Refusal
from tests.tiers import few

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
                requests = [request_of(reader.generation) for reader in readers]
                firsts = any(request.items and not request.fetched for request in requests)
                waiting.append((compute.__qualname__, firsts or driver._urgent))
                return compute(*args)

            return wrapper

        for cls, name in (HostSteps, "start"), (PrefillPass, "advance"):
            monkeypatch.setattr(cls, name, noted(getattr(cls, name)))

    read(llm, *readers, watch=watch)
    assert len(waiting) > N_TOKENS and set(waiting) == {("HostSteps.start", False), ("PrefillPass.advance", False)}


@pytest.mark.parametrize("full", [False, True])
def test_a_pass_begins_when_it_is_full_or_nothing_more_comes(
    full: bool, llm: engine.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request takes 20 ms to be received, and as long to be read, and the first one waits for it."""
    drivers, counts, place = list[Driver](), list[int](), WaitingQueue._place

    def placed(queue: WaitingQueue, request: Request) -> bool:
        counts.append(drivers[0].n_answers)
        return place(queue, request)

    monkeypatch.setattr(WaitingQueue, "_place", placed)
    if full:
        monkeypatch.setattr(llm.model, "prompt_rows", 8)
        monkeypatch.setattr(driver, "GATHER_ROUNDS", 1 << 62)

    async def run() -> None:
        drivers.append(Driver(llm, asyncio.get_running_loop()))
        readers = [Reader(llm, prompt) for prompt in ("x =", "def add(a, b):")]
        drivers[0].submit(readers[0])
        for _ in range(2):
            await asyncio.sleep(0)
            time.sleep(0.02)
        drivers[0].submit(readers[1])
        async with asyncio.timeout(60):
            for reader in readers:
                await reader.over.wait()
        await asyncio.to_thread(drivers[0].close)

    asyncio.run(run())
    assert counts[0] == 2


@pytest.mark.parametrize("patience", [10.0, 0.02])
def test_the_event_loop_lets_a_pass_start_before_it_reads_on(
    patience: float, llm: engine.LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 0.2 s to prepare, for which the event loop waits, or once for as long as it may."""
    monkeypatch.setattr(driver, "GIVE_WAY_SECONDS", patience)
    monkeypatch.setattr(llm.model, "prompt_rows", 1)  # each prompt fills a pass
    events, step = list[str](), llm.core.step

    def prepares(on_wait: Callable[[], None]) -> bool:
        def waits() -> None:
            events.append("started")
            on_wait()

        if not events.count("started"):
            time.sleep(0.2)
        return step(waits)

    async def run() -> None:
        own = Driver(llm, asyncio.get_running_loop())
        while own.moved != math.inf:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(llm.core, "step", prepares)
        readers = [Reader(llm, prompt) for prompt in ("x =", "def add(a, b):", "import os")]
        for reader in readers:
            own.submit(reader)
            events.append("submitted")
        async with asyncio.timeout(60):
            for reader in readers:
                await reader.over.wait()
        await asyncio.to_thread(own.close)

    asyncio.run(run())
    if patience > 1:
        assert events[:2] == ["started", "submitted"]
    else:
        assert events[:3] == ["submitted"] * 3


def test_tokens_that_were_held_back_precede_an_error(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop works on the first token until the error comes."""
    reader, step, rounds = Reader(llm, "def add(a, b):", 0.3), llm.core.step, 0

    def fails(on_wait: Callable[[], None]) -> bool:
        nonlocal rounds
        rounds += 1
        if rounds == 20:
            raise DeviceError("the GPU is gone")
        return step(on_wait)

    monkeypatch.setattr(llm.core, "step", fails)
    read(llm, reader)
    assert isinstance(reader.received[-1].error, DeviceError)
    monkeypatch.undo()
    assert not request_of(reader.generation).items
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


class Fault(Exception):
    """What no part of a round expects."""


def faulty(patch: pytest.MonkeyPatch, place: Any, name: str, due: Callable[..., bool]) -> None:
    """Let a function raise ``Fault`` if ``due(*arguments)``."""
    function = getattr(place, name)

    def wrapper(*given: Any) -> Any:
        if due(*given):
            raise Fault(name)
        return function(*given)

    patch.setattr(place, name, wrapper)


PROMPTS = ["def add(a, b):", "import os\n", "class A:\n", "for i in range(3):"]


def error_of(reader: Reader) -> BaseException | None:
    """What ended its answer, if that was an error."""
    assert [news.done for news in reader.received] == [False] * (len(reader.received) - 1) + [True]
    return reader.received[-1].error


@pytest.mark.recovers
@pytest.mark.parametrize(("place", "name"), few([(HostSteps, "take"), (HostSteps, "start"), (Scheduler, "_choose")]))
def test_an_error_in_a_round_ends_no_answer(
    llm: engine.LLM, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    """It comes once, in the middle of answers that run, begin and wait."""
    whole, rounds = [expected(llm, prompt) for prompt in PROMPTS], 0

    def due(*given: Any) -> bool:
        nonlocal rounds
        rounds += 1
        return rounds == 20

    faulty(monkeypatch, place, name, due)
    readers = [Reader(llm, prompt) for prompt in PROMPTS]
    read(llm, *readers)
    assert rounds > 20
    assert [(reader.ids, error_of(reader)) for reader in readers] == [(ids, None) for ids in whole]
    llm.check_pages()


@pytest.mark.recovers
def test_an_error_ends_only_the_answer_that_it_belongs_to(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer breaks every pass that it is part of, another cannot record its tokens, a third cannot begin."""
    whole = [expected(llm, prompt) for prompt in PROMPTS]
    readers = [Reader(llm, prompt) for prompt in PROMPTS]
    bad, unrecorded, unplaced, good = (reader.generation for reader in readers)
    faulty(
        monkeypatch,
        HostSteps,
        "start",
        lambda steps, batch: any(each.running.request is request_of(bad) for each in batch),
    )
    faulty(monkeypatch, unrecorded, "_took", lambda token, logits: len(unrecorded.ids) == 7)
    faulty(monkeypatch, WaitingQueue, "_place", lambda waiting, request: request is request_of(unplaced))
    read(llm, *readers)
    assert [type(error_of(reader)) for reader in readers] == [Fault, Fault, Fault, type(None)]
    assert [reader.ids for reader in readers] == [whole[0][:1], whole[1][:7], [], whole[3]]
    assert llm.core.n_active == 0
    llm.check_pages()


def test_answers_that_cannot_be_received(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others get their tokens in the same call."""
    bad, good = (Reader(llm, prompt) for prompt in PROMPTS[:2])
    faulty(monkeypatch, bad, "receive", lambda news: True)

    async def run() -> None:
        driver = Driver(llm, asyncio.get_running_loop())
        driver.submit(bad)
        driver.submit(good)
        async with asyncio.timeout(60):
            await good.over.wait()
            while driver.n_answers:
                await asyncio.sleep(0.001)
        await asyncio.to_thread(driver.close)

    asyncio.run(run())
    assert good.ids == expected(llm, PROMPTS[1])
    assert llm.core.n_active == 0


def test_orders_after_the_end(llm: engine.LLM) -> None:
    """The model may have been closed by then."""

    async def run() -> None:
        driver, reader = Driver(llm, asyncio.get_running_loop()), Reader(llm, "import os")
        await asyncio.to_thread(driver.close)
        for order in (driver.cancel, driver.pause, driver.proceed):
            order(request_of(reader.generation))

    asyncio.run(run())


def test_the_thread_sleeps_while_all_answers_are_paused(llm: engine.LLM) -> None:
    async def run() -> None:
        driver = Driver(llm, asyncio.get_running_loop())
        readers = [Reader(llm, prompt) for prompt in PROMPTS]
        for reader in readers:
            driver.submit(reader)
            driver.pause(request_of(reader.generation))
        async with asyncio.timeout(60):
            while driver.moved != math.inf:
                await asyncio.sleep(0.001)
            assert driver.n_answers == 4 and not any(reader.over.is_set() for reader in readers)
            driver.cancel(request_of(readers[0].generation))
            await readers[0].over.wait()
            for reader in readers:
                driver.proceed(request_of(reader.generation))
            for reader in readers:
                await reader.over.wait()
        await asyncio.to_thread(driver.close)
        assert [reader.ids for reader in readers[1:]] == [expected(llm, prompt) for prompt in PROMPTS[1:]]

    asyncio.run(run())


def test_memory_goes_back_while_there_is_nothing_to_do(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some time, and more of it later.  A request ends that before it is computed, whenever it comes."""
    calls: list[object] = []
    step = llm.core.step

    def noted(on_wait: Callable[[], None]) -> bool:
        moved = step(on_wait)
        if moved and calls[-1] != "step":
            calls.append("step")
        return moved

    monkeypatch.setattr(llm.core, "step", noted)
    monkeypatch.setattr(llm, "rest", lambda forget=False: calls.append("forget" if forget else "rest"))
    monkeypatch.setattr(llm, "resume", lambda: calls.append("resume"))
    for name, seconds in (("IDLE_SECONDS", 0.01), ("REST_SECONDS", 0.02), ("FORGET_SECONDS", 60.0)):
        monkeypatch.setattr(driver, name, seconds)
    stages = ["rest"], ["rest", "resume", "step", "rest", "forget"]

    async def run() -> None:
        own = Driver(llm, asyncio.get_running_loop())
        async with asyncio.timeout(60):
            for expected in stages:
                while len(calls) < len(expected):
                    await asyncio.sleep(0.002)
                assert calls == expected
                monkeypatch.setattr(driver, "FORGET_SECONDS", 0.02)
                reader = Reader(llm, "def add(a, b):")
                own.submit(reader)
                await reader.over.wait()
        await asyncio.to_thread(own.close)

    asyncio.run(run())
    assert calls[: len(stages[-1]) + 2] == [*stages[-1], "resume", "step"]
