"""What bounds the requests of all clients together: connections, memory, time in the event loop, lines of the log."""

import asyncio
import logging
import sys
import time

import pytest

pytest.importorskip("uvicorn")

from engine.machine import memory
from engine.serving import budget, watchdog
from engine.serving.budget import Budget, Claim
from engine.serving.connections import (
    AT_ONCE,
    BODY,
    REQUEST,
    RESERVE,
    UNREAD,
    Connections,
    Wait,
    highest_descriptor,
)
from engine.serving.errors import Refusal
from engine.serving.repeated import Repeated
from engine.serving.watchdog import Watchdog


class Fake:
    """A connection; all: those that are open."""

    def __init__(self, all: Connections, waits: Wait | None, descriptor: int = 5) -> None:
        self.waits, self.dropped, self._all = waits, False, all
        all.add(self, descriptor)

    def drop(self) -> None:
        self.dropped = True
        self._all.remove(self)


def test_those_that_have_waited_longest_for_their_clients_are_closed() -> None:
    """For a request first, then for the rest of a body, then for a client to read; never one whose client waits."""
    connections = Connections(6)
    waits = [None, Wait(UNREAD, 0), Wait(BODY, 1), Wait(REQUEST, 3), Wait(REQUEST, 2), Wait(UNREAD, 9)]
    busy, *others = (Fake(connections, wait) for wait in waits)
    order = [others[i] for i in (3, 2, 1, 0, 4)]
    for i, _ in enumerate(order):
        Fake(connections, None)
        assert [each.dropped for each in order] == [n <= i for n in range(len(order))]
    assert not busy.dropped
    assert Fake(connections, Wait(REQUEST, 10)).dropped, "no other can be closed"


def test_few_searches_make_room_for_many() -> None:
    connections = Connections(8 * AT_ONCE)
    idle = [Fake(connections, Wait(REQUEST, i)) for i in range(8 * AT_ONCE + 1)]
    assert [each.dropped for each in idle] == [i < 8 for i in range(len(idle))]


def test_a_high_descriptor_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever holds the others: connections, models or files."""
    resource = pytest.importorskip("resource")
    for limit, highest in ((256, 256 - RESERVE), (64, 48), (resource.RLIM_INFINITY, float("inf"))):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        assert highest_descriptor() == highest
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    connections = Connections()
    first = Fake(connections, Wait(REQUEST, 0), 256 - RESERVE - 1)
    assert not first.dropped and not Fake(connections, Wait(REQUEST, 1), 256 - RESERVE).dropped
    assert first.dropped


def test_a_budget_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "FREE", 10)
    monkeypatch.setattr(budget, "WAIT_SECONDS", 0)

    async def ask() -> None:
        shared = Budget(100)
        first, second, small = Claim(shared), Claim(shared), Claim(shared)
        await first.grow(60)
        await first.grow(50)
        await second.grow(40)
        assert shared.held == 100
        await small.grow(10)  # whatever the others hold
        with pytest.raises(Refusal) as refused:
            await second.grow(41)
        assert refused.value.status == 503 and refused.value.retry_after
        for claim in (first, second, small):
            claim.hold(0)
        assert shared.held == 0
        with pytest.raises(Refusal) as refused:
            await first.grow(101)
        assert refused.value.status == 413 and first.held == 0

    asyncio.run(ask())


def test_a_request_waits_until_others_make_room() -> None:
    async def ask() -> None:
        shared = Budget(budget.FREE * 4)
        first, second = Claim(shared), Claim(shared)
        await first.grow(budget.FREE * 3)
        waiting = asyncio.ensure_future(second.grow(budget.FREE * 2))
        await asyncio.sleep(3 * budget.POLL_SECONDS)
        assert not waiting.done()
        first.hold(budget.FREE)
        await waiting
        assert shared.held == budget.FREE * 3

    asyncio.run(ask())


def test_the_default_budget_is_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, total in ((1 << 40, budget.MOST), (1 << 20, (1 << 20) // budget.SHARE)):
        monkeypatch.setattr(memory, "available_memory", lambda free=free: free)
        assert Budget().total == total


def test_a_repeated_message_is_a_line_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    quiet, written = Repeated("access"), []

    def log(text: str, value: int, name: str = "engine") -> None:
        record = logging.LogRecord(name, logging.WARNING, "", 0, text, (value,), None)
        if quiet.filter(record):
            written.append(record.getMessage())

    for value in range(5):
        log("refused %d", value)
        log("closed %d", value)
        log("asked %d", value, "access")
        now += 0.3
    assert written == [
        *("refused 0", "closed 0", "asked 0", "asked 1", "asked 2", "asked 3"),
        *("refused 4 (3 more like this)", "closed 4 (3 more like this)", "asked 4"),
    ]
    for value in range(1000):
        log(f"{value} %d", value)
    assert len(quiet._seen) <= 256


def test_errors_from_different_places_are_different_messages() -> None:
    quiet = Repeated()

    def passes(text: str, divisor: str) -> bool:
        try:
            _ = text[int(divisor)]
        except (IndexError, ValueError):
            record = logging.LogRecord("engine", logging.ERROR, "", 0, "a request failed", (), sys.exc_info())
        return quiet.filter(record)

    assert [passes("a", given) for given in ("5", "6", "x", "y")] == [True, False, True, False]


def hold_the_loop(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_what_holds_the_event_loop_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PAUSE_SECONDS", 0.01)

    async def work() -> None:
        dog = Watchdog(asyncio.get_running_loop())
        await asyncio.sleep(0.1)
        hold_the_loop(1.6)
        await asyncio.sleep(0.1)
        dog.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    held = [message for message in caplog.messages if "hold_the_loop" in message]
    assert len(held) == 2 and "has been held for 0.2 s" in held[0]
    assert "was held for" in held[1] and "serving/test_bounds.py" in held[1]
