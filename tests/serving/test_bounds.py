"""What bounds the requests of all clients together: connections, memory, time in the event loop, lines of the log."""

import asyncio
import logging
import time

import pytest

pytest.importorskip("uvicorn")

from engine.serving import budget, watchdog
from engine.serving.budget import Budget
from engine.serving.connections import Connections
from engine.serving.errors import Refusal
from engine.serving.repeated import Repeated
from engine.serving.watchdog import Watchdog


class Fake:
    def __init__(self, idle: bool) -> None:
        self.idle, self.dropped = idle, False

    def drop(self) -> None:
        self.dropped = True


def test_the_oldest_idle_connection_is_closed() -> None:
    connections = Connections(3)
    busy, first, second = Fake(False), Fake(True), Fake(True)
    for each in (busy, first, second):
        assert connections.add(each)
    connections.used(first)
    newest = Fake(True)
    assert connections.add(newest) and len(connections) == 3
    assert [each.dropped for each in (busy, first, second, newest)] == [False, False, True, False]
    connections.remove(newest)
    connections.remove(newest)
    assert len(connections) == 2


def test_a_connection_is_refused_if_all_are_busy() -> None:
    connections = Connections(2)
    busy = [Fake(False), Fake(False)]
    assert all(connections.add(each) for each in busy)
    assert not connections.add(Fake(True))
    assert not any(each.dropped for each in busy)


def test_a_budget_of_memory() -> None:
    shared = Budget(100)
    first: dict[str, int] = {}
    second: dict[str, int] = {}
    shared.take(first, 90)
    shared.take(first, 90)  # alone, it may hold more than all together
    with pytest.raises(Refusal) as refused:
        shared.take(second, 1)
    assert refused.value.status == 503 and refused.value.retry_after
    shared.give_back(first)
    shared.give_back(first)
    assert shared.held == 0
    shared.take(second, 60)
    with pytest.raises(Refusal):
        shared.take(first, 60)
    shared.take(first, 40)
    assert shared.held == 100


def test_the_default_budget_is_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    class Memory:
        available = 1 << 40

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert Budget().total == budget.MOST
    Memory.available = 1 << 20
    assert Budget().total == (1 << 20) // budget.SHARE


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
