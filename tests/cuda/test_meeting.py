"""Passes of several GPUs are launched one after another on each GPU, whatever queues they use."""

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")

from engine.cuda.runtime.meeting import Meeting, MeetingGraph


class Queue:
    """That of a GPU, as far as it knows what has ended: ``before``, the passes that what is launched next starts after."""

    def __init__(self, gpu: int) -> None:
        self.info = SimpleNamespace(index=gpu)
        self.before: set[str] = set()

    def mark(self) -> "Point":
        return Point(self)

    def follow(self, mark: "Point") -> None:
        self.before |= mark.before


class Point:
    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.before: set[str] = set()

    def set(self) -> None:
        self.before = set(self._queue.before)


class Pass:
    """A graph whose launch notes what it starts after."""

    def __init__(self, name: str, gpus: str) -> None:
        self.name, self.gpus = name, gpus
        self.before: set[str] = set()
        self._queues: Any = [Queue(int(gpu)) for gpu in gpus]
        self._meeting = Meeting(self._queues)

    def start(self) -> None:
        graph: Any = SimpleNamespace(launch=self._launch)
        MeetingGraph(self._meeting, graph).launch()

    def _launch(self) -> None:
        self.before |= self._queues[0].before
        self._queues[0].before.add(self.name)


def test_passes_on_the_same_gpu_run_one_after_another() -> None:
    passes = [Pass("a", "01"), Pass("b", "12"), Pass("c", "34"), Pass("d", "20"), Pass("e", "3")]
    for each in passes:
        each.start()
    for one, other in combinations(passes, 2):
        # A pass on a single GPU waits for no other one.
        shares = set(one.gpus) & set(other.gpus) and len(other.gpus) > 1
        assert (one.name in other.before) == bool(shares), (one.name, other.name)


def test_a_model_that_is_gone_is_forgotten() -> None:
    Pass("a", "01").start()
    last = Pass("b", "01")
    last.start()
    assert last.before == set()
