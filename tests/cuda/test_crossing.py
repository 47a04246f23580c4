"""Copies from one GPU to another one that fail: no slot of a way is lost.  The devices here only record."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("numba_cuda", reason="the GPU backend needs numba-cuda")

from engine.cuda.runtime.crossing import DeviceCrossing
from engine.decode.stage_graphs import StageGraphs
from engine.errors import DeviceError
from engine.models.relay import Course
from engine.ops.crossing import SLOTS


class Point:
    """A mark that does nothing."""

    def set(self) -> None:
        pass


class FakeDevice:
    """A device whose next copy fails if ``broken``."""

    broken = False

    def access(self, other: Any) -> bool:
        return True

    def allocate(self, n_bytes: int, what: str) -> Any:
        return SimpleNamespace(address=0)

    def mark(self) -> Point:
        return Point()

    def follow(self, mark: Any) -> None:
        pass

    def move(self, target: int, source: int, n_bytes: int) -> None:
        if self.broken:
            raise DeviceError("a copy failed")


ARRAY: Any = SimpleNamespace(size=4, dtype="float32", address=0, shape=(1, 4))


class Rows(SimpleNamespace):
    """An array whose slices are the whole."""

    def __getitem__(self, rows: slice) -> Any:
        return ARRAY


def way() -> tuple[DeviceCrossing, FakeDevice, FakeDevice]:
    source, target = FakeDevice(), FakeDevice()
    return DeviceCrossing(cast(Any, source), cast(Any, target), 16), source, target


def test_a_copy_that_fails_takes_no_slot() -> None:
    crossing, source, _ = way()
    source.broken = True
    for _ in range(2 * SLOTS):
        with pytest.raises(DeviceError):
            crossing.send([ARRAY])
    source.broken = False
    tickets = [crossing.send([ARRAY]) for _ in range(SLOTS)]
    assert sorted(tickets) == list(range(SLOTS))
    for ticket in tickets:
        crossing.receive(ticket, [ARRAY])
    assert crossing.send([ARRAY]) == tickets[0]


def run(course: Course) -> None:
    """Take a course through two stages."""
    course.tell(ARRAY)
    course.enter(0)
    course.leave(0, ARRAY)
    course.enter(1)


@pytest.mark.parametrize("part", ["tell", "leave", "tap", "enter"])
def test_a_course_that_fails_gives_its_slots_back(part: str) -> None:
    """Two copies for the per-layer embeddings, the stream of a stage, and its taps; any of them may fail."""
    ways = [way() for _ in range(4)]
    told, border, tap = [ways[0][0], ways[1][0]], ways[2][0], ways[3][0]
    inputs = SimpleNamespace(x=Rows(), told=Rows(), taps={0: Rows()})
    stages = [SimpleNamespace(tapped=[0]), SimpleNamespace(tapped=[])]
    relay: Any = SimpleNamespace(told=told, borders=[border], taps=[tap, None], stages=stages, inputs=lambda i: inputs)
    broken = {"tell": ways[1][1], "leave": ways[2][1], "tap": ways[3][1], "enter": ways[3][2]}[part]
    broken.broken = True
    for _ in range(2 * SLOTS):
        course = Course(relay)
        with pytest.raises(DeviceError):
            run(course)
        course.cancel()
    assert [sorted(crossing._left) for crossing, _, _ in ways] == 4 * [list(range(SLOTS))]


def test_rows_of_a_step_that_do_not_arrive_give_their_slot_back() -> None:
    crossing, _, target = way()
    graphs = object.__new__(StageGraphs)
    ops = SimpleNamespace(tokens=Rows(), positions=Rows(), sequences=Rows())
    given: dict[str, Any] = {"_last": ops, "_others": [ops], "_ways": [crossing]}
    vars(graphs).update(given, _relay=SimpleNamespace(begin=lambda: Course(cast(Any, None))))
    target.broken = True
    for _ in range(2 * SLOTS):
        with pytest.raises(DeviceError):
            graphs.start(1, None, [])
    assert sorted(crossing._left) == list(range(SLOTS))
