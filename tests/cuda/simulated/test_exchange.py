"""Exchanges of rows between a pass on a simulated GPU and the host (``engine/cuda/exchange.py``)."""

import gc
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cuda import exchange as module
from engine.cuda.exchange import EXPIRED, GIVEN, PinnedExchange
from engine.cuda.runtime.plans import Plans
from engine.cuda.runtime.recorder import Recorder
from engine.cuda.runtime.tensor import Plan, Tensor
from engine.errors import DeviceError
from tests.cuda.simulated.device import SimulatedDevice


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
    for repetition in range(2):
        device.write(x.address, values + repetition)
        with exchange.turns():
            plan.graph.launch()
            for border in (0, 2):
                exchange.take(border)
                assert (exchange.rows[:rows] == values + repetition + border).all()
                exchange.rows[:rows] += 2
                exchange.give(border + 1)
            device.synchronize()
        assert (device.read(x.address, x.shape, x.dtype) == values + repetition + 4).all()


def test_a_pass_that_is_given_up() -> None:
    device, exchange, plan, x = recorded(2, 8)
    device.clear(x.address, 4 * x.size)

    def given_up(borders: int) -> None:
        with exchange.turns():
            assert plan.graph is not None and not gc.isenabled()
            plan.graph.launch()
            for border in range(0, borders, 2):
                exchange.take(border)
                exchange.give(border + 1)
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
                exchange.give(1)
                pytest.fail("the host has answered too late")

    for late in (False, True):
        with pytest.raises(DeviceError, match="^simulated GPU has waited too long for the CPU, perhaps because"):
            expired(late)


def test_a_pass_that_does_not_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUDGET", 3)
    _, exchange, _, _ = recorded(1, 4)
    with pytest.raises(DeviceError, match="^simulated GPU has ended a pass early"), exchange.turns():
        exchange.take(0)


def test_two_models_wait_at_the_same_time() -> None:
    devices: list[Any] = [SimulatedDevice(), SimulatedDevice()]
    exchanges = [PinnedExchange(Recorder(device), 1, 1, 4) for device in devices]
    with exchanges[0].turns():
        with exchanges[1].turns():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
