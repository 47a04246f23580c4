"""Which passes are captured, which are kept, and the memory they share."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.arrays import Pass
from engine.cuda import backend
from engine.cuda.runtime.pool import LARGE
from tests.cuda.simulated.device import SimulatedDevice

F = np.float32


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


def read(ops: Any, forward: Any, rows: int, n_logits: int = 1) -> Any:
    """Runs a pass and checks its result."""
    tokens, positions = np.arange(rows, dtype=F), np.arange(10, 10 + rows, dtype=F)
    found = ops.run(forward, Pass(tokens, positions), n_logits)
    assert (found is None) == (n_logits == 0)
    if n_logits:
        assert found.tolist() == (tokens + positions)[-n_logits:].tolist()
    stays = rows <= 16 or rows == ops.max_rows
    return ops.plan(forward, rows, n_logits) if stays else ops.plans.latest[next(reversed(ops.plans.latest))]


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
    for rows in (1, 2, 20, 21, 22, 23, 20, 24, 1, 2, 20, 21):
        read(ops, forward, rows)
        read(ops, forward, rows, 0)
    # The most recent two of 20 and of 21 rows are kept; the passes of steps stay.
    assert [key[1] for key in ops.plans.latest] == [20, 20, 21, 21]
    assert forward.recorded.count(1) == forward.recorded.count(2) == 2
    for rows in (30, 40, 50, 60):
        read(ops, forward, rows)
    read(ops, forward, 30)
    read(ops, forward, 61)
    assert [key[1] for key in ops.plans.latest] == [50, 60, 30, 61]


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
