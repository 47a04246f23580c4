"""What other threads want of requests, at any time: no answer depends on it, and nothing is lost."""

import gc
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import engine
from engine.decode.generation import request_of
from engine.decode.host_steps import HostSteps
from engine.decode.orders import Order, Orders
from engine.decode.prefill import Prefilling, PrefillPass
from engine.decode.prefill_queue import PrefillQueue
from engine.decode.running import Running
from engine.decode.running_batch import RunningBatch
from engine.decode.scheduler import Scheduler
from engine.decode.waiting_queue import WaitingQueue
from engine.synthetic.model import make_model
from tests.batching import Ask, asks
from tests.tiers import amount, few

COUNT = 40
LONG: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
PROMPTS = [[5, 6, 7], [8, 9], [10] * 20, [11]]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.LLM]:
    path = make_model(tmp_path_factory.mktemp("model") / "model.gguf", "tiny-qwen3", "Q8_0")
    with engine.load(path, device="cpu", n_ctx=192, n_threads=1, parallel=3) as model:
        yield model


@pytest.fixture(scope="module")
def expected(llm: engine.LLM) -> list[list[int]]:
    """The tokens of the prompts' answers."""
    return [llm.complete(prompt, **LONG).ids for prompt in PROMPTS]


def begun(llm: engine.LLM, i: int) -> engine.Generation:
    """An answer that has a slot, and that nobody continues."""
    answer = llm.generate(PROMPTS[i], **LONG)
    next(answer)
    return answer


def finish(llm: engine.LLM) -> None:
    """Compute all answers that are not paused."""
    assert not all(llm.core.step() for _ in range(5000))


def nothing_is_left(llm: engine.LLM) -> None:
    """No request has a slot or waits, and all pages are free, once what was abandoned has been collected."""
    gc.collect()
    llm.check_pages()
    assert llm.core.n_active == 0
    llm.reset()
    assert all(pool.n_free == pool.n_pages for pool in llm.cache.pools.values())


def test_an_answer_is_closed_while_another_one_leaves(
    llm: engine.LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave, first, second = RunningBatch.leave, begun(llm, 0), begun(llm, 1)

    def leaving(batch: RunningBatch, state: Prefilling | Running) -> None:
        monkeypatch.undo()
        first.close()  # as another thread may
        leave(batch, state)

    monkeypatch.setattr(RunningBatch, "leave", leaving)
    with llm.lock:
        second.close()  # it leaves in the next round
    assert llm.complete(PROMPTS[2], **LONG).ids == expected[2]
    nothing_is_left(llm)


STAGES = [
    (Orders, "take"),
    (WaitingQueue, "_place"),
    (Scheduler, "_deliver"),
    (RunningBatch, "leave"),
    (WaitingQueue, "admit"),
    (PrefillQueue, "read"),
    (PrefillPass, "advance"),
    (RunningBatch, "run"),
    (Scheduler, "_start"),
    (HostSteps, "start"),
    (Scheduler, "take"),
]


@pytest.mark.parametrize(("place", "name"), few(STAGES, 2))
def test_an_answer_is_collected_anywhere_in_a_round(
    llm: engine.LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    """The collector may run in the thread that computes, and close answers that run, wait, or are done."""
    llm.core.interrupt()
    done = llm.generate(PROMPTS[3], **(LONG | {"max_tokens": 3}))
    next(done)
    abandoned = [begun(llm, 0), begun(llm, 1), begun(llm, 2), done]
    function = getattr(place, name)

    def collect() -> None:
        if abandoned:
            before = list(llm.core.scheduler.batch.active)
            abandoned.pop()
            gc.collect()
            assert llm.core.scheduler.batch.active == before

    def collecting(*given: Any) -> Any:
        collect()
        found = function(*given)
        collect()
        return found

    del done
    monkeypatch.setattr(place, name, collecting)
    assert llm.complete(PROMPTS[2], **LONG).ids == expected[2]
    monkeypatch.undo()
    abandoned.clear()
    nothing_is_left(llm)


def test_threads_that_abandon_answers(
    llm: engine.LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight begin answers, and others close them, whatever is computed then: a round takes its time to let an answer leave,
    and threads change often."""
    leave, abandoned, errors = RunningBatch.leave, 0, list[BaseException]()
    left: SimpleQueue[engine.Generation | None] = SimpleQueue()

    def leaving(batch: RunningBatch, state: Prefilling | Running) -> None:
        time.sleep(1e-3)
        leave(batch, state)

    def abandon(i: int) -> None:
        nonlocal abandoned
        try:
            while honest.is_alive():
                answer = begun(llm, i % 4)
                if i % 2:
                    left.put(answer)
                del answer
                abandoned += 1
        except BaseException as error:
            errors.append(error)

    def close() -> None:
        while (answer := left.get()) is not None:
            answer.close()

    def complete() -> None:
        try:
            for i in range(amount(40, 4)):
                assert llm.complete(PROMPTS[i % 4], **LONG).ids == expected[i % 4]
        except BaseException as error:
            errors.append(error)

    monkeypatch.setattr(RunningBatch, "leave", leaving)
    honest = threading.Thread(target=complete)
    threads = [threading.Thread(target=abandon, args=(i,)) for i in range(8)]
    closing = [threading.Thread(target=close) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in (honest, *threads, *closing):
            thread.start()
        for thread in (honest, *threads):
            thread.join(120)
    finally:
        for _ in closing:
            left.put(None)
        sys.setswitchinterval(interval)
    assert errors == [] and abandoned >= 8
    llm.complete(PROMPTS[0], max_tokens=1)  # a round, for what was closed at the very end
    nothing_is_left(llm)


def test_a_paused_answer_gives_its_slot_to_one_that_waits(llm: engine.LLM, expected: list[list[int]]) -> None:
    """All slots belong to answers whose tokens nobody takes."""
    core = llm.core
    paused = [request_of(llm.generate(PROMPTS[i], **LONG)) for i in range(3)]
    for request in paused:
        core.submit(request)
    while not all(request.items for request in paused):
        core.step()
    for request in paused:
        core.order(Order.PAUSE, request)
    finish(llm)
    counts = [len(request.items) for request in paused]
    assert core.n_active == 3 and all(0 < count < COUNT for count in counts)
    other = request_of(llm.generate(PROMPTS[3], **LONG))
    core.submit(other)
    finish(llm)
    assert [token for token, _ in other.items] == expected[3]
    # Only the latest one had to give way.
    assert [request.has_slot for request in paused] == [True, True, False]
    assert [len(request.items) for request in paused] == counts
    for request in reversed(paused):
        core.order(Order.PROCEED, request)
    finish(llm)
    assert [[token for token, _ in request.items] for request in paused] == expected[:3]
    nothing_is_left(llm)


def test_a_prompt_is_read_at_once_beside_a_paused_answer(llm: engine.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for its next token, so it need not be read in small parts."""
    advance, sizes, core = PrefillPass.advance, list[int](), llm.core

    def noted(passing: PrefillPass, count: int) -> int:
        sizes.append(passing.rows)
        return advance(passing, count)

    monkeypatch.setattr(PrefillPass, "advance", noted)
    requests = [request_of(llm.generate([7 + i] * 100, **LONG)) for i in range(3)]
    for request, order in zip(requests, (Order.PAUSE, Order.PROCEED, Order.PROCEED), strict=True):
        core.submit(request)
        while not request.items:
            core.step()
        core.order(order, request)
    assert sizes[:2] == [100, 100] and max(sizes[2:]) < 100
    core.order(Order.PROCEED, requests[0])
    finish(llm)
    nothing_is_left(llm)


def test_an_answer_that_goes_on_waits_in_the_order_of_arrival(llm: engine.LLM) -> None:
    """Before those that came later, also if they have waited while it was paused; it takes no slot from any of them."""
    core = llm.core
    made = [request_of(llm.generate(PROMPTS[i % 4], **LONG)) for i in range(7)]
    for request in made[:3]:
        core.submit(request)
    while not all(request.items for request in made[:3]):
        core.step()
    core.order(Order.PAUSE, made[0])
    for request in made[3:]:
        core.submit(request)
    core.step()
    assert [request.has_slot for request in made] == [False, True, True, True, False, False, False]
    core.order(Order.PROCEED, made[0])
    core.step()
    assert not made[0].has_slot
    core.close(made[3])
    core.step()
    assert [request.has_slot for request in made] == [True, True, True, False, False, False, False]
    finish(llm)
    assert [len(request.items) for request in made] == [COUNT, COUNT, COUNT, 0, COUNT, COUNT, COUNT]
    nothing_is_left(llm)


def whole(llm: engine.LLM, ask: Ask) -> list[int]:
    """The tokens of an answer alone."""
    llm.reset()
    request = request_of(llm.generate(ask.ids, **ask.options))
    llm.core.submit(request)
    finish(llm)
    return [token for token, _ in request.items]


@pytest.mark.parametrize("seed", few(range(4)))
def test_threads_order_at_random(llm: engine.LLM, seed: int) -> None:
    """Any of them submits, pauses, continues and closes any request while another one computes rounds."""
    wanted = asks(llm, amount(40, 9), seed, 120)
    alone = [whole(llm, ask) for ask in wanted]
    made = [request_of(llm.generate(ask.ids, **ask.options)) for ask in wanted]
    closed, core = set[int](), llm.core
    llm.reset()

    def give_orders(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        own = [i for i in range(len(made)) if i % 3 == number]
        for _ in range(12 * len(own)):
            i = int(rng.choice(own))
            order = Order(rng.choice([order.value for order in Order], p=[0.4, 0.05, 0.25, 0.3]))
            if order is Order.CLOSE:
                closed.add(i)
            if order is Order.CLOSE and rng.random() < 0.5:
                core.close(made[i])
            else:
                core.order(order, made[i])
            time.sleep(float(rng.choice([0, 0, 1e-4, 1e-3])))
        for i in own:
            core.order(Order.SUBMIT, made[i])
            core.order(Order.PROCEED, made[i])

    threads = [threading.Thread(target=give_orders, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        core.step()
    finish(llm)
    for i, (request, tokens) in enumerate(zip(made, alone, strict=True)):
        assert request.error is None and request.done
        if i not in closed:
            assert [token for token, _ in request.items] == tokens
    nothing_is_left(llm)
