"""Columns that simulated GPUs bring together by packets have the bits of one array on one GPU."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import engine
from engine.cache.types import CHUNK
from engine.cuda import backend, gather
from engine.cuda.attention import attend as attention
from engine.cuda.attention import integer_steps
from engine.cuda.runtime import gathering
from engine.cuda.runtime.gathering import PacketGathering
from engine.cuda.runtime.plans import Plans
from engine.cuda.runtime.recorder import Recorder
from engine.cuda.runtime.tensor import Tensor
from engine.cuda.runtime.values import Attended, Deferred, Gated, GatedNormalized, Normalized, quantized
from engine.decode.generation import request_of
from engine.errors import DeviceError
from engine.ops.activation import SWIGLU
from engine.shares import Cut, HeadRows, even_cut
from engine.synthetic.model import make_model
from engine.verify.layout import activations
from tests.cuda.simulated.device import SimulatedDevice, WaitingDevice, use_simulated
from tests.cuda.simulated.test_group import SHAPE
from tests.cuda.simulated.test_stages import PROMPT

KINDS = [SimulatedDevice, WaitingDevice]

TOGETHER = [("a run", even_cut(192, 2)), ("segments", HeadRows(3, (96, 96)).cut(3))]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials and waits are short, and an exchange has up to four blocks."""
    monkeypatch.setattr(SimulatedDevice, "multiprocessors", 2)
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


def same_everywhere(
    of: PacketGathering,
    recorders: Sequence[Recorder],
    together: Callable[[], list[Sequence[Any]]],
    alone: Callable[[], list[Any]],
    shape: tuple[int, int],
    unit: int,
) -> None:
    """What owners compute together, twice, is at each of them what the first one computes alone: rows as float32 or int8."""
    one, devices = recorders[0], [cast(Any, recorder.device) for recorder in recorders]
    found: list[Sequence[Any]] = []
    expected: list[Any] = []

    def pair() -> None:
        of.begin(shape[0])
        with one.together(recorders[1:]):
            found.extend(together())
            of.end()

    def single() -> None:
        expected.extend(alone())

    plan, plan_alone = one.record(pair), one.record(single)
    plans = Plans(devices[0], one)
    for each in (plan, plan_alone):
        plans.capture(each)
    plans.start_whole(plan_alone)

    def read(value: Any, device: Any) -> list[bytes]:
        parts = [device.read(x.address, x.shape, x.dtype) for x in ([value] if isinstance(value, Tensor) else value)]
        return [x.tobytes() for x in (parts if len(parts) == 1 else activations(unit, *shape, *parts))]

    wanted = [read(value, devices[0]) for value in expected]
    for _ in range(2):
        plans.start_whole(plan)
        check_owners(devices, found, wanted, read)
        check_cleared(of)


def check_cleared(of: PacketGathering) -> None:
    """No owner has a packet of the pass any more."""
    for device, memory in of.cleared:
        assert not device.read(memory.address, (memory.n_bytes,), np.uint8).any()


def check_owners(
    devices: Sequence[Any],
    found: Sequence[Sequence[Any]],
    wanted: Sequence[list[bytes]],
    read: Callable[[Any, Any], list[bytes]],
) -> None:
    """When all devices have ended, each has the wanted bytes of every value; read: the bytes of a value of a device."""
    for device in devices:
        device.synchronize()
    for values, want in zip(found, wanted, strict=True):
        for device, value in zip(devices, values, strict=True):
            assert read(value, device) == want


def as_int8(recorders: Sequence[Recorder], values: Sequence[Any], unit: int) -> list[Any]:
    return [quantized(recorder, value, unit) for recorder, value in zip(recorders, values, strict=True)]


@pytest.mark.parametrize("kind", KINDS, ids=["events", "waits"])
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

    def together() -> list[Sequence[Any]]:
        ups = [each[1] for each in own]
        assert of.takes(2, cut)
        found: list[Sequence[Any]] = [of.arrays(ups, cut)]
        several: list[Callable[[], Sequence[Deferred]]] = [
            lambda: of.inputs(ups, cut),
            lambda: of.inputs([Gated(gate, up, SWIGLU) for gate, up in own], cut),
            lambda: of.normalized(ups, cut, weights, 1e-5),
        ]
        for values in several:
            given = values()
            assert all(x.shape == (2, cut.size) for x in given)
            found.append(as_int8(recorders, given, 32))
        return found

    def alone() -> list[Any]:
        values = whole[1], Gated(whole[0], whole[1], SWIGLU), Normalized(whole[1], weights[0], 1e-5)
        return [whole[1], *(quantized(recorders[0], x, 32) for x in values)]

    same_everywhere(of, recorders, together, alone, (2, cut.size), 32)


def heads_come_together(
    of: PacketGathering, recorders: Sequence[Recorder], cut: Cut, owned: Sequence[Deferred], whole: Deferred, unit: int
) -> None:
    """The outputs of the heads of all owners are quantized as ``whole`` is by one of them."""
    rows = whole.shape[0]
    assert of.takes(rows, cut)
    same_everywhere(
        of,
        recorders,
        lambda: [as_int8(recorders, of.inputs(owned, cut), unit)],
        lambda: as_int8(recorders[:1], [whole], unit),
        (rows, cut.size),
        unit,
    )


@pytest.mark.parametrize(
    ("n", "n_head", "d_v", "unit", "cache", "n_partials", "gated", "sunk", "kind"),
    [
        (2, 5, 64, 32, "f16", 9, True, False, WaitingDevice),
        (2, 5, 64, 32, "f16", 9, True, False, SimulatedDevice),
        (3, 8, 64, 256, "i8", 129, False, True, WaitingDevice),
        (2, 6, 32, 32, "i8", 9, True, True, WaitingDevice),
        (2, 2, 128, 256, "f16", 129, False, True, WaitingDevice),
    ],
)
def test_heads_come_together(
    n: int,
    n_head: int,
    d_v: int,
    unit: int,
    cache: str,
    n_partials: int,
    gated: bool,
    sunk: bool,
    kind: type[SimulatedDevice],
) -> None:
    """Attention whose chunks are not joined yet: some units have heads of several owners, and many chunks of one row are
    joined by two kernels, rotated or not."""
    rows = 1 if n_partials > attention.FEW_PARTIALS else 2
    cut = HeadRows(n_head, (n_head * d_v,)).cut(n)
    recorders = connected(kind, n)
    of = PacketGathering(recorders)
    random = np.random.default_rng(n_partials)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    mass, values = normal(rows, n_head, n_partials, 2), normal(rows, n_head, n_partials, d_v)
    mass[..., 1] = np.exp(mass[..., 1])
    gate, sinks = normal(rows, n_head, 2, d_v), normal(n_head)
    positions = np.array([CHUNK * 8 + 5, 70][:rows], np.int32)

    def attended(recorder: Recorder, first: int, last: int) -> Attended:
        device, own = recorder.device, slice(first // d_v, last // d_v)
        size, options = last // d_v - first // d_v, {"gated": gated, "sinks": sunk, "early": True}
        if cache == "f16":
            shape = attention.geometry(rows, size, size, d_v, d_v, True, n_partials, 3, **options)
        else:
            shape = integer_steps.geometry(rows, size, size, d_v, d_v, cache, n_partials, 3, 0, **options)
        parts, opening = [uploaded(device, x[:, own]) for x in (mass, values)], uploaded(device, gate[:, own])
        at, sink = uploaded(device, positions), uploaded(device, sinks[own])
        return Attended(parts[0], parts[1], at, opening, sink, shape, n_partials, 0, last - first)

    owned = [attended(recorder, *runs[0]) for recorder, runs in zip(recorders, cut.runs, strict=True)]
    whole = attended(recorders[0], 0, cut.size)
    heads_come_together(of, recorders, cut, owned, whole, unit)


@pytest.mark.parametrize(
    ("cut", "d", "unit", "swish"),
    [(HeadRows(3, (96, 96)).cut(3), 32, 32, False), (HeadRows(2, (128, 128)).cut(2), 64, 256, True)],
    ids=["segments", "a unit of two owners"],
)
def test_normalized_heads_come_together(cut: Cut, d: int, unit: int, swish: bool) -> None:
    """Heads of delta nets, which are normalized and gated."""
    recorders = connected(WaitingDevice, len(cut.runs))
    of, random, rows = PacketGathering(recorders), np.random.default_rng(d), 2
    x, gate = (random.standard_normal((rows, cut.size)).astype(np.float32) for _ in range(2))
    weight = random.standard_normal(d).astype(np.float32)

    def normalized(recorder: Recorder, columns: np.ndarray) -> GatedNormalized:
        own, factor, opening = (uploaded(recorder.device, a) for a in (x[:, columns], weight, gate[:, columns]))
        return GatedNormalized(own, factor, opening, 1e-6, swish)

    columns = [np.concatenate([np.arange(*run) for run in runs]) for runs in cut.runs]
    owned = [normalized(recorder, own) for recorder, own in zip(recorders, columns, strict=True)]
    whole = normalized(recorders[0], np.arange(cut.size))
    heads_come_together(of, recorders, cut, owned, whole, unit)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The arguments of ``engine.load`` for a model whose layers two GPUs share, which wait for each other."""
    use_simulated(monkeypatch)
    monkeypatch.setattr(backend, "Device", WaitingDevice)
    path = make_model(tmp_path / "m.gguf", replace(SHAPE, n_ff=128), "Q4_0")
    return {"path_or_name": path, "n_ctx": 16, "n_threads": 1, "device": "cuda:0,cuda:1", "split_mode": "tensor"}


OPTIONS: dict[str, Any] = {"max_tokens": 2, "temperature": 0}


def test_gpus_that_wait_for_each_other(shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of the CPU.  An exchange is a part of a kernel that one GPU runs, too.  If packets do not come, one sentence
    says so to all answers under way, none of which has a wrong token, and later answers are right."""
    one = {"device": "cpu", "split_mode": "layer"}
    cpu, llm = engine.load(**shared | one), engine.load(**shared, parallel=2)
    expected = cpu.complete(PROMPT, **OPTIONS | {"max_tokens": 10}).ids
    group: Any = llm.model.ops
    devices = [owner.device for owner in group.owners]
    assert group._gathering.waits
    for _ in range(2):  # the second time, most of the prompt has been read
        assert llm.complete(PROMPT, **OPTIONS).ids == expected[:2]
    plan = next(each for key, each in group.lead.plans.kept.items() if key[1] == 1)
    names = Counter(launch.kernel.kernel.name for launch in plan.launches if launch.device)
    assert names["gather_combine_quantize"] == names["take_quantize"] == 1 and names["gather_norm_quantize"] == 2
    assert names["matmul_give"] == 3  # the results of the output matrix, of gate and up, and of down
    assert names["quantize"] == names["activate"] == names["combine"] == 0
    assert names["maxima"] == names["gather"] == 1  # of a greedy step, only the largest logits come together
    assert all(launch.kernel.kernel.name != "place_columns" for launch in plan.launches)
    missing = devices[1].launch

    def drop(specialization: Any, grid: Any, block: int, arguments: Any) -> None:
        # The product with the third exchange, some of whose packets the first one does not overwrite.
        if specialization.kernel.name != "matmul_give" or arguments[20] != 3:
            missing(specialization, grid, block, arguments)

    for most in (2, 10):  # the first ones capture a step of both
        requests = [request_of(llm.generate(PROMPT, **OPTIONS | {"max_tokens": most})) for _ in range(2)]
        for request in requests:
            llm.core.submit(request)
        while sum(len(request.items) for request in requests) < 4:
            llm.core.step()
    with monkeypatch.context() as patch:
        patch.setattr(devices[1], "launch", drop)
        patch.setattr(devices[1], "capturing", None)
        with pytest.raises(DeviceError, match=r"^simulated GPU has waited too long for another GPU; run again, and"):
            deque(iter(llm.core.step, False))
    deque(iter(llm.core.step, False))  # hands out what is left
    for request in requests:
        assert [token for token, _ in request.items] == expected[: len(request.items)]
        assert request.done and isinstance(request.error, DeviceError)
    assert llm.complete(PROMPT, **OPTIONS).ids == expected[:2]


def test_a_trial_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs whose packets do not come do not wait for each other."""
    recorders = connected(WaitingDevice, 2)
    device: Any = recorders[1].device
    monkeypatch.setattr(device, "launch", lambda *given: None)
    assert not PacketGathering(recorders).waits
    for recorder in recorders:
        recorder.device.synchronize()
