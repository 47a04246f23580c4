"""Unexpected errors in the middle of rounds: they end the requests that they belong to, and every other answer is the one
that its request gets alone."""

import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

import engine
from engine.cache.kv import AttentionCache
from engine.decode.core import MOST_FAILURES, EngineCore
from engine.decode.generation import request_of
from engine.decode.host_steps import HostSteps
from engine.decode.preemption import Preemption
from engine.decode.prefill import PrefillPass, PrefillSlice
from engine.decode.prefill_queue import PrefillQueue
from engine.decode.request import Request
from engine.decode.running import Running, Step
from engine.decode.running_batch import RunningBatch
from engine.decode.scheduler import Scheduler
from engine.decode.slot import Slot
from engine.decode.slots import Slots
from engine.decode.waiting_queue import WaitingQueue
from engine.errors import DeviceError, DeviceMemoryError
from engine.sampling.sampler import Sampler
from engine.synthetic.model import make_model
from tests.batching import Ask, asks
from tests.tiers import amount, few

pytestmark = pytest.mark.recovers

OWN = [
    (WaitingQueue, "_place"),
    (Slots, "free"),
    (Slot, "stops"),
    (PrefillQueue, "_slice"),
    (PrefillQueue, "_report"),
    (PrefillQueue, "_read_on"),
    (PrefillSlice, "__init__"),
    (PrefillSlice, "commit"),
    (RunningBatch, "run"),
    (Sampler, "sample"),
    (Running, "propose"),
    (Running, "took"),
    (Scheduler, "_deliver"),
    (RunningBatch, "leave"),
]
"""What a round does for one request."""

SHARED = [
    (PrefillQueue, "read"),
    (HostSteps, "start"),
    (HostSteps, "take"),
    (Scheduler, "_run"),
    (Scheduler, "take"),
    (Scheduler, "drain"),
    (RunningBatch, "next_group"),
    (EngineCore, "_obey"),
    (Scheduler, "_choose"),
    (RunningBatch, "moves"),
    (Preemption, "preempt"),
]
"""What it does for several, or for none."""


class Fault(Exception):
    """What no part of a round expects."""


class Faulty:
    """Makes functions of a round raise ``Fault``, before or after they do what they should."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.raised = 0

    def plant(self, place: Any, name: str, due: Callable[..., bool], after: bool = False) -> None:
        """due: called with the arguments of each call; whether it raises; after: when it has done its work."""
        function = getattr(place, name)

        def faulty(*given: Any, **named: Any) -> Any:
            wrong = due(*given)
            self.raised += wrong
            if wrong and not after:
                raise Fault(name)
            found = function(*given, **named)
            if wrong:
                raise Fault(name)
            return found

        self._patch.setattr(place, name, faulty)


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    with pytest.MonkeyPatch.context() as patch:
        yield Faulty(patch)


def load(folder: Any, shape: str) -> engine.LLM:
    return engine.load(
        make_model(folder / f"{shape}.gguf", shape, "Q8_0"), device="cpu", n_ctx=192, n_threads=1, parallel=3
    )


@pytest.fixture(scope="module", params=few(["tiny-qwen3", "tiny-qwen35"], 1))
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.LLM]:
    with load(tmp_path_factory.mktemp("model"), request.param) as model:
        yield model


@pytest.fixture(scope="module")
def wanted(llm: engine.LLM) -> list[Ask]:
    return asks(llm, 5, 4, 100)


@pytest.fixture(scope="module")
def expected(llm: engine.LLM, wanted: list[Ask]) -> list[list[int]]:
    """The tokens of each answer alone."""
    found = []
    for ask in wanted:
        llm.reset()
        ((tokens, error),) = answered(llm, requests(llm, [ask]))
        assert error is None
        found.append(tokens)
    return found


def requests(llm: engine.LLM, wanted: list[Ask]) -> list[Request]:
    return [request_of(llm.generate(ask.ids, **ask.options)) for ask in wanted]


def answered(llm: engine.LLM, made: list[Request]) -> list[tuple[list[int], BaseException | None]]:
    """The tokens of requests that are computed together, and what ended each if that was an error."""
    for request in made:
        llm.core.submit(request)
    rounds = 0
    while llm.core.step():
        rounds += 1
        assert rounds < 10_000
    assert all(request.done for request in made) and llm.core.n_active == 0
    llm.check_pages()
    return [([token for token, _ in request.items], request.error) for request in made]


def once(call: int) -> Callable[..., bool]:
    """Whether a call is the one with this number."""
    calls = 0

    def due(*given: Any) -> bool:
        nonlocal calls
        calls += 1
        return calls == call

    return due


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", few([3, 1, 5], 1))
@pytest.mark.parametrize(("place", "name"), OWN)
def test_an_error_ends_the_request_that_it_belongs_to(
    llm: engine.LLM,
    wanted: list[Ask],
    expected: list[list[int]],
    faulty: Faulty,
    place: Any,
    name: str,
    call: int,
    after: bool,
) -> None:
    llm.reset()
    faulty.plant(place, name, once(call), after)
    found = answered(llm, requests(llm, wanted))
    assert faulty.raised == 1
    failed = [i for i, (_, error) in enumerate(found) if error is not None]
    assert len(failed) == 1 and isinstance(found[failed[0]][1], Fault)
    for i, ((tokens, _), whole) in enumerate(zip(found, expected, strict=True)):
        assert tokens == (whole[: len(tokens)] if i in failed else whole)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("call", few([2, 1, 9], 1))
@pytest.mark.parametrize(("place", "name"), SHARED)
def test_after_any_other_error_all_requests_are_read_again(
    llm: engine.LLM,
    wanted: list[Ask],
    expected: list[list[int]],
    faulty: Faulty,
    place: Any,
    name: str,
    call: int,
    after: bool,
) -> None:
    llm.reset()
    faulty.plant(place, name, once(call), after)
    made = requests(llm, wanted)
    if name == "preempt":  # by nothing but an interrupt
        llm.core.submit(made[0])
        llm.core.submit(made[1])
        for _ in range(4):
            llm.core.step()
        with llm.lock:
            llm.core.interrupt()
    assert answered(llm, made) == [(tokens, None) for tokens in expected]
    assert faulty.raised == 1 or name in ("drain", "preempt")


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", ["__init__", "advance", "finish"])
def test_an_error_in_a_pass_over_prompts(
    llm: engine.LLM,
    wanted: list[Ask],
    expected: list[list[int]],
    faulty: Faulty,
    name: str,
    several: bool,
    after: bool,
) -> None:
    """It ends the only request of the pass; several are read again, each alone."""
    llm.reset()
    passes: list[int] = []

    def due(*given: Any) -> bool:
        slices = given[2] if name == "__init__" else given[0].slices
        passes.append(len(slices))
        return (len(slices) > 1) is several and faulty.raised == 0

    faulty.plant(PrefillPass, name, due, after)
    found = answered(llm, requests(llm, wanted))
    assert faulty.raised == 1
    if several:
        assert found == [(tokens, None) for tokens in expected]
        at = next(i for i, n in enumerate(passes) if n > 1)
        assert passes[at + 1 : at + 1 + passes[at]] == [1] * passes[at]
    else:
        assert sum(isinstance(error, Fault) for _, error in found) == 1
        assert [tokens for tokens, error in found if error is None] == [
            tokens for tokens, (_, error) in zip(expected, found, strict=True) if error is None
        ]


@pytest.mark.parametrize("seed", few(range(4)))
def test_errors_at_random(
    llm: engine.LLM, wanted: list[Ask], expected: list[list[int]], faulty: Faulty, seed: int
) -> None:
    """Of any kind, again and again, but for one that gets no token between several."""
    rng, several = np.random.default_rng(seed), amount(10, 2)
    left = 0

    def due(*given: Any) -> bool:
        nonlocal left
        left -= 1
        if left > 0:
            return False
        left = int(rng.integers(80, 160))
        return True

    left = 20
    for place, name in SHARED:
        if name != "moves":  # it is called most often
            faulty.plant(place, name, due, bool(rng.random() < 0.5))
    for _ in range(several):
        llm.reset()
        assert answered(llm, requests(llm, wanted)) == [(tokens, None) for tokens in expected]
    assert faulty.raised >= several


def test_an_answer_that_breaks_every_pass_ends_alone(
    llm: engine.LLM, wanted: list[Ask], expected: list[list[int]], faulty: Faulty
) -> None:
    """It is computed with others at first; then each has passes of its own, until it has a token."""
    llm.reset()
    made = requests(llm, wanted)
    bad = max(range(len(wanted)), key=lambda i: len(expected[i]))
    faulty.plant(HostSteps, "start", lambda steps, batch: any(each.running.request is made[bad] for each in batch))
    found = answered(llm, made)
    assert faulty.raised == MOST_FAILURES
    assert isinstance(found[bad][1], Fault)
    del found[bad]
    assert found == [(tokens, None) for i, tokens in enumerate(expected) if i != bad]


def test_an_error_that_does_not_go_away_ends_what_it_meets(
    llm: engine.LLM, wanted: list[Ask], expected: list[list[int]], faulty: Faulty
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Faulty(patch).plant(RunningBatch, "next_group", lambda *given: True)
        found = answered(llm, requests(llm, wanted))
    for (tokens, error), whole in zip(found, expected, strict=True):
        assert (error is None and tokens == whole) or (isinstance(error, Fault) and tokens == whole[: len(tokens)][:1])
    assert sum(isinstance(error, Fault) for _, error in found) >= 3
    assert answered(llm, requests(llm, wanted)) == [(tokens, None) for tokens in expected]


def compute(llm: engine.LLM) -> None:
    """Run rounds until there is nothing to do."""
    while llm.core.step():
        pass


def spoil(llm: engine.LLM) -> None:
    """Let pages of the cache hold anything."""
    for layer in llm.cache.layers:
        if isinstance(layer, AttentionCache):
            for array in (layer.keys, layer.values):
                array.view(np.uint8)[...] = 0x3C


def all_ended(llm: engine.LLM, made: list[Request], expected: list[list[int]], error: Exception) -> None:
    """All requests have ended, those with the error that have not all tokens, and no token is wrong."""
    compute(llm)  # hands out what is left
    assert llm.core.n_active == 0
    llm.check_pages()
    found = [[token for token, _ in request.items] for request in made]
    assert all(request.done for request in made) and any(found)
    for request, tokens, whole in zip(made, found, expected, strict=True):
        assert tokens == whole[: len(tokens)]
        assert request.error is (None if tokens == whole else error)
    assert sum(request.error is error for request in made) >= 2


@pytest.mark.parametrize("then", ["", "lost", "interrupted"])
def test_an_error_of_the_device_ends_all_requests(
    llm: engine.LLM, wanted: list[Ask], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """What is in flight is wrong then, and so may be what the cache holds.  then: what happens when the device is waited
    for: it fails again, or somebody presses Ctrl-C."""
    llm.reset()
    made, error, take, calls = requests(llm, wanted), DeviceError("the GPU failed"), HostSteps.take, count()

    def failing(steps: HostSteps) -> list[Step]:
        if next(calls) != 6:
            return take(steps)
        for step in steps._taken[0]:
            step.tokens[:] = [(token + 1) % llm.config.n_vocab for token in step.tokens]
        spoil(llm)
        raise error

    def drop(steps: HostSteps) -> None:
        steps._taken.clear()
        raise DeviceError("the GPU failed again") if then == "lost" else KeyboardInterrupt

    monkeypatch.setattr(HostSteps, "take", failing)
    for request in made:
        llm.core.submit(request)
    with monkeypatch.context() as patch:
        if then:
            patch.setattr(HostSteps, "drop", drop)
        with pytest.raises((DeviceError, KeyboardInterrupt)) as raised:
            compute(llm)
    assert next(calls) > 6 and (raised.value is error) is (then != "interrupted")
    all_ended(llm, made, expected, error)
    assert answered(llm, requests(llm, wanted)) == [(tokens, None) for tokens in expected]


def test_an_error_of_the_device_that_drafts_ends_all_requests(
    llm: engine.LLM, wanted: list[Ask], expected: list[list[int]], faulty: Faulty
) -> None:
    llm.reset()
    made, error, sixth = requests(llm, wanted), DeviceError("the GPU failed"), once(6)

    def fails(*given: Any) -> bool:
        if sixth():
            raise error
        return False

    faulty.plant(Running, "propose", fails)
    for request in made:
        llm.core.submit(request)
    with pytest.raises(DeviceError):
        compute(llm)
    all_ended(llm, made, expected, error)


def test_an_error_of_the_device_beside_the_requests_ends_them(
    llm: engine.LLM, wanted: list[Ask], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that uses the model between two rounds is the first that waits for the device."""
    llm.reset()
    made, error = requests(llm, wanted[:2]), DeviceError("the GPU failed")  # a slot is left

    def finish(*given: Any) -> Any:
        raise error

    for request in made:
        llm.core.submit(request)
    for _ in range(4):
        llm.core.step()
    with monkeypatch.context() as patch:
        patch.setattr(PrefillPass, "finish", finish)
        with pytest.raises(DeviceError):
            llm.logits([1, 2, 3])
    all_ended(llm, made, expected[:2], error)


def test_requests_go_on_if_memory_runs_out(
    llm: engine.LLM, wanted: list[Ask], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.reset()
    made, start, calls = requests(llm, wanted), HostSteps.start, count()

    def failing(steps: HostSteps, batch: Any) -> None:
        if next(calls) == 6:
            raise DeviceMemoryError("there is too little memory")
        start(steps, batch)

    monkeypatch.setattr(HostSteps, "start", failing)
    for request in made:
        llm.core.submit(request)
    with pytest.raises(DeviceMemoryError):
        compute(llm)
    assert answered(llm, made) == [(tokens, None) for tokens in expected]


def test_no_thread_gets_the_error_of_another(
    llm: engine.LLM, wanted: list[Ask], expected: list[list[int]], faulty: Faulty
) -> None:
    """One of them breaks its passes, which any of them may compute."""
    llm.reset()
    made = [llm.generate(ask.ids, **ask.options) for ask in wanted]
    bad = max(range(len(wanted)), key=lambda i: len(expected[i]))
    faulty.plant(
        HostSteps, "start", lambda steps, batch: any(each.running.request is request_of(made[bad]) for each in batch)
    )
    errors: dict[int, BaseException] = {}

    def read(i: int) -> None:
        try:
            for _ in made[i]:
                pass
        except BaseException as error:
            errors[i] = error

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert list(errors) == [bad] and isinstance(errors[bad], Fault)
    ends = llm.tokenizer.eog_ids
    for i, (answer, tokens) in enumerate(zip(made, expected, strict=True)):
        if i != bad:
            assert answer.ids == (tokens[:-1] if tokens[-1] in ends and answer.finish_reason == "stop" else tokens)
    llm.check_pages()
