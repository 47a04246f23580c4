"""Exchanges of rows between a pass on a simulated GPU and the host (``engine/cuda/exchange.py``)."""

import gc
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cpu.backend import Backend
from engine.cpu.runtime.flags import EXPIRED, GIVEN
from engine.cuda import exchange as module
from engine.cuda.exchange import PinnedExchange
from engine.cuda.runtime.plans import Plans
from engine.cuda.runtime.recorder import Recorder
from engine.cuda.runtime.tensor import Plan, Tensor
from engine.errors import DeviceError
from tests.cuda.simulated.device import SimulatedDevice


class Answers:
    """A pass of the host that takes rows at even borders and gives them back with ``step`` added."""

    def __init__(self, exchange: PinnedExchange, rows: int, borders: int, step: float = 2) -> None:
        self.host = host = Backend(1)

        def forward() -> None:
            added = np.full(exchange.rows[:rows].shape, step, np.float32)
            for border in range(0, borders, 2):
                exchange.take(host, border)
                exchange.give(host, border + 1, host.add(exchange.rows[:rows], added), rows)

        self.program = host.record(forward)
        self.program.finish()

    def run(self) -> None:
        self.host.run_program(self.program)


def recorded(rows: int, width: int) -> tuple[Any, PinnedExchange, Plan, Tensor]:
    """A device, and a pass on it that sends an array, receives it, and sends and receives it once more."""
    device: Any = SimulatedDevice()
    recorder = Recorder(device)
    exchange = PinnedExchange(recorder, 4, 5, width)
    buffer = device.allocate(4 * (rows * width + 3), "test")
    x = Tensor(buffer.address, (rows, width), np.dtype(np.float32), buffer)

    def forward() -> None:
        exchange.send(0, x)
        exchange.receive(1, x)
        exchange.send(2, x)
        exchange.receive(3, x)

    plan = recorder.record(forward)
    Plans(device, recorder).capture(plan)
    return device, exchange, plan, x


@pytest.mark.parametrize(("rows", "width"), [(1, 6), (3, 300), (5, 256)])
def test_rows_go_to_the_host_and_back(rows: int, width: int) -> None:
    device, exchange, plan, x = recorded(rows, width)
    values = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    assert plan.graph is not None
    answers = Answers(exchange, rows, 4)
    for repetition in range(2):
        device.write(x.address, values + repetition)
        with exchange.turns():
            plan.graph.launch()
            answers.run()
            device.synchronize()
        assert (device.read(x.address, x.shape, x.dtype) == values + repetition + 4).all()
        assert answers.host.waited_seconds > 0


def test_chosen_experts_go_with_their_rows() -> None:
    """Of a pass that is padded, too, whose last row is given several times."""
    device: Any = SimulatedDevice()
    recorder = Recorder(device)
    exchange = PinnedExchange(recorder, 2, 4, 8, 3)

    def tensor(values: np.ndarray) -> Tensor:
        buffer = device.allocate(values.nbytes, "test")
        device.write(buffer.address, values)
        return Tensor(buffer.address, values.shape, values.dtype, buffer)

    rows = np.arange(32, dtype=np.float32).reshape(4, 8)
    ids, weights = np.arange(12, dtype=np.int32).reshape(4, 3), np.arange(12, 24, dtype=np.float32).reshape(4, 3)
    x, chosen = tensor(rows), (tensor(ids), tensor(weights))

    def forward() -> None:
        exchange.send(0, x, chosen)
        exchange.receive(1, x)

    plan = recorder.record(forward)
    Plans(device, recorder).capture(plan)
    host = Backend(1)

    def answer() -> None:
        exchange.take(host, 0)
        exchange.give(host, 1, host.scale(exchange.rows[:3], 2.0), 4)

    program = host.record(answer)
    program.finish()
    assert plan.graph is not None
    with exchange.turns():
        plan.graph.launch()
        host.run_program(program)
        device.synchronize()
        found = exchange.chosen(4, 3)
        assert (found[0] == ids).all() and (found[1] == weights).all()
    assert (device.read(x.address, x.shape, x.dtype) == 2 * rows[[0, 1, 2, 2]]).all()


def test_a_pass_that_is_given_up() -> None:
    device, exchange, plan, x = recorded(2, 8)
    device.clear(x.address, 4 * x.size)

    def given_up(borders: int) -> None:
        with exchange.turns():
            assert plan.graph is not None and not gc.isenabled()
            plan.graph.launch()
            if borders:
                Answers(exchange, 2, borders).run()
            raise KeyboardInterrupt

    for borders in (0, 2, 4):
        with pytest.raises(KeyboardInterrupt):
            given_up(borders)
        assert device.is_idle() and gc.isenabled()


def test_a_device_that_has_waited_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLLS", 3)
    device, exchange, plan, _ = recorded(1, 4)
    monkeypatch.setattr(device, "_waits", lambda *launch: False)

    def expired(late: bool) -> None:
        with exchange.turns():
            assert plan.graph is not None
            plan.graph.launch()
            assert (exchange._flags[:: module.WORDS] == [GIVEN, EXPIRED, GIVEN, EXPIRED]).all()
            if late:
                Answers(exchange, 1, 2).run()

    for late in (False, True):
        with pytest.raises(DeviceError, match="^simulated GPU has waited too long for the CPU, perhaps because"):
            expired(late)


def test_a_pass_that_does_not_send() -> None:
    _, exchange, _, _ = recorded(1, 4)
    with pytest.raises(DeviceError, match="^simulated GPU has ended a pass early"), exchange.turns():
        Answers(exchange, 1, 2).run()


def test_two_models_wait_at_the_same_time() -> None:
    devices: list[Any] = [SimulatedDevice(), SimulatedDevice()]
    exchanges = [PinnedExchange(Recorder(device), 1, 1, 4) for device in devices]
    with exchanges[0].turns():
        with exchanges[1].turns():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
