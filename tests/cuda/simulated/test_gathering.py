"""Columns that simulated GPUs bring together by packets have the bits of one array on one GPU."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine.cuda import backend, gather
from engine.cuda.runtime import gathering
from engine.cuda.runtime.gathering import PacketGathering
from engine.cuda.runtime.plans import Plans
from engine.cuda.runtime.recorder import Recorder
from engine.cuda.runtime.tensor import Tensor
from engine.cuda.runtime.values import Deferred, Gated, Normalized, quantized
from engine.errors import DeviceError
from engine.ops.activation import SWIGLU
from engine.shares import Cut, HeadRows, even_cut
from engine.synthetic.model import make_model
from tests.cuda.simulated.device import SimulatedDevice, WaitingDevice, use_simulated
from tests.cuda.simulated.test_group import SHAPE
from tests.cuda.simulated.test_stages import PROMPT

TOGETHER = [("a run", even_cut(192, 2)), ("segments", HeadRows(3, (96, 96)).cut(3))]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials and waits are short."""
    for module, name, value in ((gathering, "TRIAL", 3), (gathering, "TRIAL_POLLS", 3), (gather, "POLLS", 3)):
        monkeypatch.setattr(module, name, value)


def uploaded(device: Any, array: np.ndarray) -> Tensor:
    memory = device.allocate(array.nbytes, "test")
    device.write(memory.address, np.ascontiguousarray(array))
    return Tensor(memory.address, array.shape, array.dtype, memory)


def connected(kind: type[SimulatedDevice], n: int) -> list[Recorder]:
    devices: list[Any] = [kind(i) for i in range(n)]
    for one in devices:
        for other in devices:
            one.reach(other)
    return [Recorder(device) for device in devices]


@pytest.mark.parametrize("kind", [SimulatedDevice, WaitingDevice], ids=["events", "waits"])
@pytest.mark.parametrize("cut", [pytest.param(cut, id=name) for name, cut in TOGETHER])
def test_columns_come_together(kind: type[SimulatedDevice], cut: Cut) -> None:
    """As rows, as int8 with and without an activation, and normalized; more exchanges than there are places, twice."""
    recorders = connected(kind, len(cut.runs))
    of = PacketGathering(recorders)
    assert of.waits == (kind is WaitingDevice)
    random = np.random.default_rng(3)
    gate, up = (random.standard_normal((2, cut.size)).astype(np.float32) for _ in range(2))
    weight = random.standard_normal(cut.size).astype(np.float32)
    columns = [np.concatenate([np.arange(*run) for run in runs]) for runs in cut.runs]
    devices: list[Any] = [recorder.device for recorder in recorders]
    weights = [uploaded(device, weight) for device in devices]
    own = [[uploaded(d, x[:, chosen]) for x in (gate, up)] for d, chosen in zip(devices, columns, strict=True)]
    whole = [uploaded(devices[0], x) for x in (gate, up)]
    found: list[list[Any]] = []

    def forward() -> Tensor:
        of.begin()
        with recorders[0].together(recorders[1:]):
            ups = [each[1] for each in own]
            assert of.takes(2, cut)
            found.append(of.arrays(ups, cut))
            several: list[Callable[[], Sequence[Deferred]]] = [
                lambda: of.inputs(ups, cut),
                lambda: of.inputs([Gated(gate, up, SWIGLU) for gate, up in own], cut),
                lambda: of.normalized(ups, cut, weights, 1e-5),
            ]
            for values in several:
                pairs = list(zip(recorders, values(), strict=True))
                assert all(x.shape == (2, cut.size) for _, x in pairs)
                found.append([quantized(recorder, x, 32) for recorder, x in pairs])
        return whole[0]

    expected: list[Any] = []

    def single() -> Tensor:
        one = recorders[0]
        for x in (whole[1], Gated(whole[0], whole[1], SWIGLU), Normalized(whole[1], weights[0], 1e-5)):
            expected.append(quantized(one, x, 32))
        return whole[1]

    plan, alone = recorders[0].record(forward), recorders[0].record(single)
    plans = Plans(devices[0], recorders[0])
    for each in (plan, alone):
        plans.capture(each)
    plans.start_whole(alone)

    def read(value: Any, device: Any) -> list[bytes]:
        if isinstance(value, Tensor):
            return [device.read(value.address, value.shape, value.dtype).tobytes()]
        (rows, _), (q, d, sums) = (2, 0), (device.read(x.address, x.shape, x.dtype) for x in value)
        units = cut.size // 32
        parts = q.reshape(units, 8, 8)[:, :rows], d.reshape(units, 8)[:, :rows], sums.reshape(units, 8)[:, :rows]
        return [part.tobytes() for part in parts]

    wanted = [[up.tobytes()], *(read(value, devices[0]) for value in expected)]
    for _ in range(2):
        plans.start_whole(plan)
        for device in devices:
            device.synchronize()
        for values, want in zip(found, wanted, strict=True):
            for device, value in zip(devices, values, strict=True):
                assert read(value, device) == want


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The arguments of ``engine.load`` for a model whose layers two GPUs share, which wait for each other."""
    use_simulated(monkeypatch)
    monkeypatch.setattr(backend, "Device", WaitingDevice)
    path = make_model(tmp_path / "m.gguf", replace(SHAPE, n_ff=128), "Q4_0")
    return {"path_or_name": path, "n_ctx": 16, "n_threads": 1, "device": "cuda:0,cuda:1", "split_mode": "tensor"}


OPTIONS: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}


def test_gpus_that_wait_for_each_other(shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the CPU.  An exchange is a part of a kernel that one GPU runs, too.  If packets do not come, one sentence
    says so, and later answers are right."""
    one = {"device": "cpu", "split_mode": "layer"}
    expected = engine.load(**shared | one).complete(PROMPT, **OPTIONS).ids
    llm = engine.load(**shared)
    group: Any = llm.model.ops
    devices = [owner.device for owner in group.owners]
    assert group._gathering.waits
    assert llm.complete(PROMPT, **OPTIONS).ids == expected
    plan = next(each for key, each in group.lead.plans.kept.items() if key[1] == 1)
    names = Counter(launch.kernel.kernel.name for launch in plan.launches if launch.device)
    assert names["gather_quantize"] == names["take_quantize"] == 1 and names["gather_norm_quantize"] == 2
    assert names["matmul_give"] == 3  # the results of the output matrix, of gate and up, and of down
    assert names["gather"] == names["quantize"] == names["activate"] == names["place_columns"] == 0
    missing = devices[1].launch

    def drop(specialization: Any, grid: Any, block: int, arguments: Any) -> None:
        # The product with the third exchange, some of whose packets the first one does not overwrite.
        if specialization.kernel.name != "matmul_give" or arguments[20] != 3:
            missing(specialization, grid, block, arguments)

    with monkeypatch.context() as patch:
        patch.setattr(devices[1], "launch", drop)
        patch.setattr(devices[1], "capturing", None)
        with pytest.raises(DeviceError, match=r"^simulated GPU has waited too long for another GPU; run again, and"):
            llm.complete(PROMPT, **OPTIONS)
    assert llm.complete(PROMPT, **OPTIONS).ids == expected


def test_a_trial_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs whose packets do not come do not wait for each other."""
    recorders = connected(WaitingDevice, 2)
    device: Any = recorders[1].device
    monkeypatch.setattr(device, "launch", lambda *given: None)
    assert not PacketGathering(recorders).waits
    for recorder in recorders:
        recorder.device.synchronize()
