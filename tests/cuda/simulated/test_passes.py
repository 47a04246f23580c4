"""Which passes are captured, which are kept, and the memory they share."""

import mmap
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.arrays import Batch, Role
from engine.cuda import backend
from engine.cuda.runtime.pool import LARGE
from engine.cuda.runtime.values import quantized
from engine.limits import MOST_TOGETHER
from tests.cuda.simulated.device import SimulatedDevice, SimulatedMark

F = np.float32

PAGEMAP = Path("/proc/self/pagemap")


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(backend, "Device", SimulatedDevice)
    return backend.Backend(max_rows=64)


class Forward:
    """A pass of one kernel: tokens + positions, as far as they are requested."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.recorded: list[int] = []

    def __call__(self, batch: Any, n_logits: int) -> Any:
        tokens, positions, rows = batch.tokens, batch.positions, batch.rows
        self.recorded.append(rows)
        last = slice(rows - n_logits, rows)
        return self.ops.add(tokens[last], positions[last]) if n_logits else None


def usual(rows: int) -> Role:
    """What a pass of so many rows is for, as a rule."""
    return Role.DECODE if rows <= 16 else Role.PREFILL


def read(ops: Any, forward: Any, rows: int, n_logits: int = 1) -> Any:
    """Runs a pass and checks its result."""
    tokens, positions = np.arange(rows, dtype=F), np.arange(10, 10 + rows, dtype=F)
    found = ops.run(forward, Batch(tokens, positions, np.zeros(rows, np.int32), role=usual(rows)), n_logits)
    assert (found is None) == (n_logits == 0)
    if n_logits:
        assert found.tolist() == (tokens + positions)[-n_logits:].tolist()
    stays = rows in (1, 2, 16, 32, ops.max_rows)
    if stays:
        return ops.plan(forward, rows, n_logits, role=usual(rows))
    return ops.plans.latest[next(reversed(ops.plans.latest))]


def test_passes_of_many_rows_are_captured_when_they_come_again(ops: Any) -> None:
    forward = Forward(ops)
    for rows in (1, 16, ops.max_rows):
        plan = read(ops, forward, rows)
        assert plan.graph and read(ops, forward, rows) is plan
    for rows in (17, 60):
        plan = read(ops, forward, rows)
        assert plan.graph is None
        assert read(ops, forward, rows) is plan and plan.graph
        assert read(ops, forward, rows) is plan
    assert forward.recorded == [1, 16, ops.max_rows, 17, 60]


def test_only_the_latest_of_them_are_kept(ops: Any) -> None:
    forward = Forward(ops)
    wide = list(range(20, 29))
    for rows in (1, 2, 32, *wide, 20, 21, 1, 2, 32):
        read(ops, forward, rows)
        assert ops.run(forward, Batch(zeros := np.zeros(rows, F), zeros, zeros, role=usual(rows)), 0) is None
    # One recording of many rows serves passes with logits and without; the passes of steps, and of powers of two, stay.
    assert [key[1] for key in ops.plans.latest] == [*wide[-2:], 20, 21]
    assert forward.recorded == [1, 1, 2, 2, 32, *wide, 20, 21]


def test_passes_of_several_prompts_displace_no_others(ops: Any) -> None:
    """Nor do they displace the latest of their own sizes; the number of their logits is one of two."""
    forward = Forward(ops)
    for rows in (20, 21, 22, 23):
        read(ops, forward, rows)
    tried = [(rows, n) for rows in range(40, 46) for n in (3, 17)]
    for rows, n in tried:
        numbers, runs = np.arange(rows, dtype=F), np.full((2, MOST_TOGETHER + 1), rows, np.int32)
        ends = np.arange(1, n + 1, dtype=np.int32)
        batch = Batch(numbers, numbers, np.zeros(rows, np.int32), True, role=Role.PREFILL, runs=runs, ends=ends)
        assert ops.run(forward, batch, n).shape[0] == n
    latest = list(ops.plans.latest)
    assert [key[1] for key in latest if not key[4]] == [20, 21, 22, 23]
    assert [(key[1], key[2]) for key in latest if key[4]] == [(rows, {3: 16, 17: 32}[n]) for rows, n in tried[-8:]]


class Sums(Forward):
    """A pass of several kernels: tokens + ``count`` times the positions."""

    count = 5

    def __call__(self, batch: Any, n_logits: int) -> Any:
        x = batch.tokens
        for _ in range(self.count):
            x = self.ops.add(x, batch.positions)
        return x[slice(batch.rows - n_logits, batch.rows)] if n_logits else None

    def given(self, rows: int, role: Role | None = None) -> tuple[Batch[np.ndarray], list[float]]:
        """Random inputs, and the result of each row."""
        tokens, positions = np.random.default_rng(rows).integers(0, 100, (2, rows)).astype(F)
        batch = Batch(tokens, positions, np.zeros(rows, np.int32), role=role or usual(rows))
        return batch, (tokens + self.count * positions).tolist()


def test_passes_run_between_the_pieces_of_another(ops: Any) -> None:
    """Steps have other memory than a pass of many rows, for inputs and for results; a second pass of many rows lets the first
    one end before."""
    forward = Sums(ops)
    (batch, result), (other, others) = forward.given(40), forward.given(60)
    for _ in range(2):  # recorded, and captured
        passing = ops.split(forward, batch, 40)
        assert passing.pieces == forward.count
        assert passing.advance(2) == 3
        for rows in (1, 16):
            step, expected = forward.given(rows)
            assert ops.run(forward, step, step.rows).tolist() == expected
        assert passing.advance(1) == 2 and passing.advance(9) == 0
        step, expected = forward.given(8)
        assert ops.run(forward, step, step.rows).tolist() == expected
        assert passing.logits(False).tolist() == result
    passing = ops.split(forward, batch, 40)
    passing.advance(1)
    assert ops.run(forward, other, 60).tolist() == others
    assert passing.advance(1) == 0 and passing.logits(False).tolist() == result
    assert ops.split(forward, forward.given(16)[0], 1).pieces == 1


def test_logits_are_kept_while_further_passes_run(ops: Any) -> None:
    """Those of passes in flight, whose memory the next pass overwrites: of two of them, of a third one, and however late they
    are asked for.  Many rows are copied when the next pass begins."""
    forward = Sums(ops)
    given = [forward.given(rows) for rows in (40, 60, 50, 40, 64)]
    for _ in range(2):  # recorded, and captured
        passings, found = [], []
        for i, (batch, _) in enumerate(given):
            n_logits = MOST_TOGETHER + 1 if i == 3 else 1 + 4 * i
            passings.append((ops.split(forward, batch, n_logits), n_logits))
            assert passings[-1][0].advance(99) == 0
            if i == 1:  # in turn, while the next one is in flight
                found.append(passings[0][0].logits(True))
        assert not any(passing.is_running() for passing, _ in passings)
        found += [passing.logits(False) for passing, _ in passings[1:]]
        for (_, n_logits), rows, (_, expected) in zip(passings, found, given, strict=True):
            assert rows.tolist() == expected[-n_logits:]
    nothing = ops.split(forward, given[0][0], 0)
    assert nothing.advance(99) == 0 and nothing.logits(True) is None


def test_the_host_waits_for_its_pass_and_for_no_later_one(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only before a third pass writes to the pinned memory of the first one, it waits for that."""
    waits, passed = list[Any](), set[Any]()

    def wait(mark: Any, what: str) -> None:
        waits.append(mark)
        passed.add(mark)

    monkeypatch.setattr(SimulatedMark, "wait", wait)
    monkeypatch.setattr(SimulatedMark, "is_passed", lambda mark, what: mark in passed)
    forward = Sums(ops)
    batch, expected = forward.given(40)
    monkeypatch.setattr(ops.device, "synchronize", lambda what="": pytest.fail("it waits for everything"))
    first = ops.split(forward, batch, 1)
    first.advance(99)
    second = ops.split(forward, batch, 2)
    second.advance(99)
    assert first.is_running() and second.is_running() and not waits
    assert first.logits(True).tolist() == expected[-1:]
    assert not first.is_running() and second.is_running() and len(waits) == 1
    third = ops.split(forward, batch, 3)
    third.advance(99)
    assert len(waits) == 1
    fourth = ops.split(forward, batch, 4)
    fourth.advance(99)
    assert len(waits) == 2 and waits[0] is not waits[1] and not second.is_running()
    assert [p.logits(True).tolist() for p in (second, third, fourth)] == [expected[-n:] for n in (2, 3, 4)]


def test_a_pass_of_a_new_size_is_started_while_it_is_recorded(ops: Any) -> None:
    """Unless steps may have to run between its pieces; one that has been recorded is started later."""
    launched: list[str] = []
    seen: list[int] = []

    class Watched(Sums):
        def __call__(self, batch: Any, n_logits: int) -> Any:
            x = batch.tokens
            for _ in range(self.count):
                x = self.ops.add(x, batch.positions)
                seen.append(len(launched))
            return x[slice(batch.rows - n_logits, batch.rows)] if n_logits else None

    ops.device.on_launch = launched.append
    forward = Watched(ops)
    batch, result = forward.given(40)
    passing = ops.split(forward, batch, 40, at_once=True)
    assert seen == [0, 1, 2, 3, 4]
    assert passing.advance(9) == 0 and passing.logits(False).tolist() == result
    assert len(launched) == passing.pieces == forward.count
    for started in (2, 3):  # launched, captured, too; launched as a graph
        passing = ops.split(forward, batch, 40, at_once=True)
        assert len(launched) == (started - 1) * forward.count
        assert passing.advance(9) == 0 and passing.logits(False).tolist() == result
        assert len(launched) == started * forward.count and ops.plans.latest[next(iter(ops.plans.latest))].graph
    seen.clear()
    (other, others), count = forward.given(41), len(launched)
    passing = ops.split(forward, other, 41)
    assert seen == [count] * forward.count and passing.advance(4) == 1
    assert passing.advance(1) == 0 and passing.logits(False).tolist() == others
    seen.clear()
    assert ops.run(forward, forward.given(42)[0], 42).tolist() == forward.given(42)[1]
    assert [n - seen[0] for n in seen] == [0, 1, 2, 3, 4]


def test_only_what_no_operation_can_change_is_started(ops: Any) -> None:
    """A sum that the next kernel computes, too, is not; and what follows a kernel that must end knows that it must."""
    x, weight, positions = ops.zeros((20, 64), F), ops.zeros((64,), F), ops.zeros((20,), np.int32)
    batch = Batch(positions, positions, positions, role=Role.PREFILL)

    def forward() -> Any:
        y = ops.rms_norm_add(ops.add(x, x), x, weight, 1e-6)
        quantized(ops.recorder, ops.rms_norm(y, weight, 1e-6), 32)
        ops.places(positions, batch, positions)
        return ops.rms_norm_add(y, ops.add(y, y), weight, 1e-6)

    started: list[Any] = []
    plan = ops.recorder.record(forward, Role.PREFILL, started.append)
    names = [launch.kernel.kernel.name for launch in plan.launches]
    assert names == ["add", "rms_norm_add_quantize", "places", "add", "rms_norm_add"]
    assert [launch.finishes for launch in plan.launches] == [False, False, True, False, False]
    assert started == plan.launches[:-1] and len(ops.recorder.record(forward).launches) == 5 == len(started) + 1
    started.clear()
    other: Any = backend.Backend(max_rows=64)
    ops.device.access(other.device)

    def divided() -> None:
        ops.add(x, x)
        ops.add(x, x)
        with ops.together([other]):  # devices wait for each other
            other.add(x, x)
            ops.meet()
            ops.add(x, x)

    plan = ops.recorder.record(divided, Role.PREFILL, started.append)
    assert len(plan.launches) == 4 and started == plan.launches[:1] and ops.recorder.n_started == 1


@pytest.mark.parametrize(("prefilled", "decoded"), [(40, 40), (8, 40), (8, 8)])
def test_memory_and_pieces_depend_on_what_a_pass_is_for(ops: Any, prefilled: int, decoded: int) -> None:
    """Not on its number of rows, which may be that of a pass for the other purpose."""
    forward = Sums(ops)
    (batch, result), (step, expected) = forward.given(prefilled, Role.PREFILL), forward.given(decoded, Role.DECODE)
    passing = ops.split(forward, batch, prefilled)
    assert passing.pieces == forward.count and passing.advance(2) == 3
    assert ops.split(forward, step, decoded).pieces == 1
    assert ops.run(forward, step, decoded).tolist() == expected
    assert passing.advance(9) == 0 and passing.logits(False).tolist() == result
    plans = [ops.plan(forward, len(result), len(result), role=Role.PREFILL), ops.plan(forward, decoded, decoded)]
    assert [plan.graph is not None for plan in plans] == [False, True]
    assert plans[0].result.address != plans[1].result.address


def test_no_piece_of_a_cancelled_pass_is_started(ops: Any) -> None:
    forward = Sums(ops)
    started: list[str] = []
    (batch, _), (other, others) = forward.given(40), forward.given(60)
    passing = ops.split(forward, batch, 40)
    passing.advance(2)
    passing.cancel()
    ops.device.on_launch = started.append
    assert ops.run(forward, other, 60).tolist() == others
    assert len(started) == forward.count and passing.advance(1) == 0


def test_a_small_pass_takes_the_memory_of_a_large_one(ops: Any) -> None:
    """Once the largest pass has been recorded, smaller ones need almost no memory."""
    widths = (4096, 1024, 1024, 4096, 12288, 12288, 4096)

    def forward(rows: int) -> Any:
        held = [ops.recorder.empty((rows, width)) for width in widths[:4]]
        del held[1:]
        held += [ops.recorder.empty((rows, width)) for width in widths[4:]]
        return held[-1]

    ops.device.info = SimpleNamespace(memory=1 << 34)
    before = ops.device.allocated
    ops.record(partial(forward, 256))
    most = ops.device.allocated
    assert most - before <= 256 * 4 * (2 * 4096 + 2 * 12288 + 2 * 1024 + 4096)
    for rows in (256, 200, 128, 100, 64, 17, 16, 8, 1):
        ops.record(partial(forward, rows))
    assert ops.device.allocated - most < 4 * LARGE


def test_gpus_that_cannot_copy_while_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turing(SimulatedDevice):
        compute_capability = (7, 5)

    monkeypatch.setattr(backend, "Device", Turing)
    assert [backend.Backend(max_rows=rows).max_rows for rows in (0, 8, 16, 17, 4096)] == [16, 8, 16, 16, 16]
    monkeypatch.setattr(backend, "Device", SimulatedDevice)
    assert [backend.Backend(max_rows=rows).max_rows for rows in (0, 8, 4096)] == [1024, 8, 4096]


def test_the_largest_pass_is_that_of_a_model(ops: Any) -> None:
    """Models that share a backend may read prompts in passes of other sizes: those of each are captured at once."""
    one, other = Forward(ops), Forward(ops)
    tokens = np.zeros(48, F)
    for forward, most in ((one, 48), (other, 0)):
        passing = ops.split(forward, Batch(tokens, tokens, np.zeros(48, np.int32), role=Role.PREFILL), 1, most)
        passing.advance(passing.pieces)
    plans = [
        next(plan for key, plan in kept.items() if key[0] is forward)
        for forward, kept in ((one, ops.plans.kept), (other, ops.plans.latest))
    ]
    assert [plan.graph is not None for plan in plans] == [True, False]
    assert ops.max_rows == 64


def test_how_a_prompt_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside answers the odd tokens come first, so that the logits are those of a pass with memory of its own."""
    monkeypatch.setattr(backend, "Device", SimulatedDevice)
    ops: Any = backend.Backend()

    def parts(left: int, beside: bool, most: int = 1024) -> list[int]:
        found = []
        while left:
            found.append(ops.next_rows(left, most, beside))
            left -= found[-1]
        return found

    assert parts(4000, False) == [1024, 1024, 1024, 928]
    assert parts(4000, True) == [16, 16, 1024, 1024, 1024, 896]
    for most in (200, 1000, 1500, 2000, 2048, 3000):
        wide = [rows for rows in parts(9999, True, most) if rows > 16]
        assert parts(9999, True, most)[-len(wide) :] == wide and not any(rows % 128 for rows in wide)
        assert len(set(wide)) <= 9
    assert parts(133, False) == [133] and parts(133, True) == [5, 128]
    assert parts(127, False) == parts(127, True) == [16] * 7 + [15]
    assert parts(128, False) == parts(128, True) == [128]


@pytest.mark.skipif(not PAGEMAP.exists(), reason="needs Linux's pagemap")
def test_a_file_is_not_in_memory_after_loading(ops: Any, tmp_path: Path) -> None:
    """What was copied to the device is no longer counted as memory of the process; it can still be read."""
    path, data = tmp_path / "tensors", np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    path.write_bytes(data.tobytes())
    with path.open("rb") as file:
        tensor = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def resident() -> int:
        with PAGEMAP.open("rb", buffering=0) as pages:
            pages.seek(tensor.ctypes.data // mmap.PAGESIZE * 8)
            found = np.frombuffer(pages.read(tensor.nbytes // mmap.PAGESIZE * 8), np.uint64)
        return int((found >> np.uint64(63)).sum()) * mmap.PAGESIZE

    ops.loading([tensor], None)
    assert (tensor == data).all() and resident() == tensor.nbytes
    ops.loaded()
    assert resident() == 0 and (tensor == data).all()


def test_the_memory_of_intermediate_results_is_counted(ops: Any) -> None:
    before, allocated = ops.buffer_bytes(), ops.device.allocated
    read(ops, Forward(ops), 40)
    assert ops.buffer_bytes() - before == ops.device.allocated - allocated > 0
