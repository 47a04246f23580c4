"""Columns of many rows that simulated GPUs bring together by packets have the bits of one array on one GPU."""

from collections import Counter
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
from engine.cpu.runtime.flags import EXPIRED
from engine.cuda import backend, gather
from engine.cuda.attention import attend as attention
from engine.cuda.products.quantize import block_parts
from engine.cuda.products.warpgroup_chain import TileShape
from engine.cuda.products.warpgroup_matmul import chains_grid, matmul_chains
from engine.cuda.runtime import gathering, wide_gathering
from engine.cuda.runtime.gathering import PacketGathering
from engine.cuda.runtime.plans import Plans
from engine.cuda.runtime.recorder import Chains, Recorder
from engine.cuda.runtime.tensor import Tensor
from engine.cuda.runtime.values import Attended, AttendedParts, Gated, Normalized, quantized
from engine.cuda.runtime.wide_gathering import WideGathering
from engine.errors import DeviceError
from engine.ops.activation import SWIGLU
from engine.shares import Cut, HeadRows, even_cut
from engine.synthetic.model import make_model
from tests.cuda.simulated.device import WaitingDevice, use_simulated
from tests.cuda.simulated.test_gathering import check_cleared, check_owners, connected, uploaded
from tests.cuda.simulated.test_group import SHAPE

ROWS = 17


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials and waits are short, and rows come together in several exchanges."""
    for module, name, value in ((gathering, "TRIAL", 3), (gathering, "TRIAL_POLLS", 3), (gather, "POLLS", 3)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(WaitingDevice, "multiprocessors", 10)


def rows_of(words: np.ndarray, units: int, tiles: int) -> list[bytes]:
    """The integers, scales and sums of the rows of a block, which is not full."""
    scales_at, sums_at, size = block_parts(tiles)
    unit = words.reshape(units, size)
    q = unit[:, :scales_at].reshape(units, tiles, 16, 8, 4).transpose(0, 1, 3, 2, 4)
    d = unit[:, scales_at:sums_at].reshape(units, tiles * 8)
    sums = unit[:, sums_at:].reshape(units, tiles, 2, 8, 4).transpose(0, 1, 3, 2, 4)
    parts = q.reshape(units, tiles * 8, -1), d, sums.reshape(units, tiles * 8, -1)
    return [part[:, :ROWS].tobytes() for part in parts]


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        pytest.param(even_cut(512, 2), 512, id="a run"),
        pytest.param(even_cut(192, 2), 64, id="several exchanges"),
        pytest.param(HeadRows(2, (512, 512)).cut(2), 1024, id="segments", marks=pytest.mark.thorough),
    ],
)
def test_columns_come_together(cut: Cut, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rows, as int8 for two kinds of products, with and without an activation, and normalized; more exchanges than there
    are places."""
    monkeypatch.setattr(wide_gathering, "WORDS", words)
    recorders = connected(WaitingDevice, len(cut.runs))
    of = WideGathering(PacketGathering(recorders), recorders)
    random, n = np.random.default_rng(3), cut.size
    gate, up = (random.standard_normal((ROWS, n)).astype(np.float32) for _ in range(2))
    weight = random.standard_normal(n).astype(np.float32)
    columns = [np.concatenate([np.arange(*run) for run in runs]) for runs in cut.runs]
    devices: list[Any] = [recorder.device for recorder in recorders]
    weights = [uploaded(device, weight) for device in devices]
    own = [[uploaded(d, x[:, chosen]) for x in (gate, up)] for d, chosen in zip(devices, columns, strict=True)]
    whole = [uploaded(devices[0], x) for x in (gate, up)]
    kinds = [(32, False)] * 3 if n % 256 else [(32, False), (256, True), (256, True)]
    found: list[list[Any]] = []

    def forward() -> Tensor:
        of.begin(ROWS)
        with recorders[0].together(recorders[1:]):
            ups = [each[1] for each in own]
            assert of.takes(ROWS, cut)
            found.append(of.arrays(ups, cut))
            several: list[Callable[[], Sequence[Any]]] = [
                lambda: of.inputs(ups, cut),
                lambda: of.inputs([Gated(gate, up, SWIGLU) for gate, up in own], cut),
                lambda: of.normalized(ups, cut, weights, 1e-5),
            ]
            for values, (unit, warpgroups) in zip(several, kinds, strict=True):
                pairs = list(zip(recorders, values(), strict=True))
                assert all(x.shape == (ROWS, n) for _, x in pairs)
                found.append([quantized(recorder, x, unit, layout=4 if warpgroups else None) for recorder, x in pairs])
            of.end()
        return whole[0]

    expected: list[Any] = []

    def single() -> Tensor:
        one = recorders[0]
        values: tuple[Any, ...] = whole[1], Gated(whole[0], whole[1], SWIGLU), Normalized(whole[1], weights[0], 1e-5)
        for x, (unit, warpgroups) in zip(values, kinds, strict=True):
            expected.append(quantized(one, x, unit, layout=4 if warpgroups else None))
        return whole[1]

    plan, alone = recorders[0].record(forward), recorders[0].record(single)
    names = {launch.kernel.kernel.name for launch in plan.launches}
    assert {"wide_gather_norm_quantize", "wide_gather_quantize"} <= names or words < n
    assert "place_columns" not in names
    plans = Plans(devices[0], recorders[0])
    for each in (plan, alone):
        plans.capture(each)
    plans.start_whole(alone)

    def read(value: Any, device: Any) -> list[bytes]:
        if isinstance(value, Tensor):
            return [device.read(value.address, value.shape, value.dtype).tobytes()]
        q, d, sums = (device.read(x.address, x.shape, x.dtype) for x in value)
        if value.q is value.scales:
            return rows_of(q, n // 256, 4)
        units, tiles = n // 32, -(-ROWS // 8)
        parts = q.reshape(tiles, units, 8, 8), d.reshape(tiles, units, 8, 1), sums.reshape(tiles, units, 8, 1)
        return [part.transpose(0, 2, 1, 3).reshape(tiles * 8, -1)[:ROWS].tobytes() for part in parts]

    wanted = [[up.tobytes()], *(read(value, devices[0]) for value in expected)]
    for _ in range(2):
        plans.start_whole(plan)
        check_owners(devices, found, wanted, read)
        check_cleared(of.narrow)


def heads(
    recorders: Sequence[Recorder], cut: Cut, d_v: int, gated: bool = False, sunk: bool = False
) -> tuple[list[AttendedParts], AttendedParts]:
    """The outputs of the heads of each owner, and of all heads at the first one."""
    n_head, n_partials, random = cut.size // d_v, 3, np.random.default_rng(len(recorders))

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    mass, values = normal(ROWS, n_head, n_partials, 2), normal(ROWS, n_head, n_partials, d_v)
    mass[..., 1] = np.exp(mass[..., 1])
    gate, sinks = normal(ROWS, n_head, 2, d_v), normal(n_head)
    positions = np.arange(ROWS, dtype=np.int32) * 9 % (CHUNK * n_partials)

    def attended(recorder: Recorder, first: int, last: int) -> Attended:
        device, own, size = recorder.device, slice(first // d_v, last // d_v), (last - first) // d_v
        options = {"gated": gated, "sinks": sunk, "early": True}
        shape = attention.geometry(ROWS, size, size, d_v, d_v, True, n_partials, 3, **options)
        parts, opening = [uploaded(device, x[:, own]) for x in (mass, values)], uploaded(device, gate[:, own])
        at, sink = uploaded(device, positions), uploaded(device, sinks[own])
        return Attended(parts[0], parts[1], at, opening, sink, shape, n_partials, 0, last - first)

    def parts(recorder: Recorder, first: int, last: int) -> AttendedParts:
        part = attended(recorder, first, last)
        return AttendedParts(lambda _: part, [slice(0, ROWS)], last - first)

    owned = [parts(recorder, *runs[0]) for recorder, runs in zip(recorders, cut.runs, strict=True)]
    return owned, parts(recorders[0], 0, cut.size)


@pytest.mark.parametrize(
    ("n", "d_v", "gated", "sunk"),
    [(2, 128, True, True), pytest.param(3, 64, False, False, marks=pytest.mark.thorough)],
)
def test_heads_come_together(n: int, d_v: int, gated: bool, sunk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention whose chunks are joined by the launch that gives, with more blocks than take."""
    monkeypatch.setattr(wide_gathering, "WORDS", 128 * n)
    monkeypatch.setattr(WaitingDevice, "multiprocessors", 3)
    recorders = connected(WaitingDevice, n)
    cut = HeadRows(256 * n // d_v, (256 * n,)).cut(n)
    of = WideGathering(PacketGathering(recorders), recorders)
    owned, whole = heads(recorders, cut, d_v, gated, sunk)
    devices = [cast(Any, recorder.device) for recorder in recorders]
    found: list[Any] = []
    expected: list[Any] = []

    def forward() -> None:
        of.begin(ROWS)
        with recorders[0].together(recorders[1:]):
            pairs = zip(recorders, of.inputs(owned, cut), strict=True)
            found.extend(quantized(recorder, x, 256, layout=4) for recorder, x in pairs)
            of.end()

    def single() -> None:
        expected.append(quantized(recorders[0], whole, 256, layout=4))

    plan, alone = recorders[0].record(forward), recorders[0].record(single)
    assert [launch.kernel.kernel.name for launch in plan.launches] == [
        "wide_gather_combine_quantize",
        "clear_packets",
    ] * n
    plans = Plans(devices[0], recorders[0])
    for each in (alone, plan):
        plans.capture(each)
        plans.start_whole(each)

    def read(x: Any, device: Any) -> list[bytes]:
        return rows_of(device.read(x.q.address, x.q.shape, x.q.dtype), n, 4)

    check_owners(devices, [found], [read(expected[0], devices[0])], read)
    check_cleared(of.narrow)


@pytest.mark.parametrize(
    ("rows", "cut", "n_chains", "add"),
    [
        pytest.param(ROWS, even_cut(512, 2), 8, True, id="units of one owner"),
        pytest.param(40, Cut((((0, 40),), ((40, 64),))), 5, False, id="blocks and tiles that are not full"),
    ],
)
def test_chains_come_together(rows: int, cut: Cut, n_chains: int, add: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch that normalizes the residual stream also adds the chains of the product that computes it."""
    monkeypatch.setattr(wide_gathering, "WORDS", cut.size)
    monkeypatch.setattr(WaitingDevice, "multiprocessors", rows)
    recorders, unit = connected(WaitingDevice, 2), 256 if rows == ROWS else 32
    of, random = WideGathering(PacketGathering(recorders), recorders), np.random.default_rng(5)
    shape, devices, blocks = TileShape(4, 2, 4), [recorder.device for recorder in recorders], -(-rows // 32)
    strips = [-(-count // 16) for count in cut.counts]
    # Of each tile of 16 columns and 8 chains: tiles of 8 rows, and the lanes' four results.
    chains = [random.standard_normal((blocks, n, 8, 4, 8, 4, 2, 2)).astype(np.float32) for n in strips]
    for own in chains:
        own[:, :, n_chains:] = np.nan
    residual = [random.standard_normal((rows, count)).astype(np.float32) for count in cut.counts]
    weight = random.standard_normal(cut.size).astype(np.float32)
    given = [
        [uploaded(d, x) for x in each] for d, each in zip(devices, zip(chains, residual, strict=True), strict=True)
    ]
    weights = [uploaded(device, weight) for device in devices]
    found: list[Any] = []
    parts: list[Tensor] = []

    def forward() -> Tensor:
        of.begin(rows)
        with recorders[0].together(recorders[1:]):
            for recorder, (own, rest), n, count in zip(recorders, given, strips, cut.counts, strict=True):
                out, added = recorder.empty((rows, count)), rest if add else None
                arguments = (own, out, out, out, added or 0, add, n, n, n, count, 0, 0, n_chains, rows)
                grid = chains_grid(shape, rows, n)
                recorder.add_chains(matmul_chains(4), grid, arguments, Chains(own, n_chains, 4, added), result=out)
                parts.append(out)
            values = of.normalized(parts, cut, weights, 1e-5)
            pairs = zip(recorders, values, strict=True)
            found.extend(quantized(recorder, x, unit, layout=4 if unit == 256 else None) for recorder, x in pairs)
        return parts[0]

    plan = recorders[0].record(forward)
    names = [launch.kernel.kernel.name for launch in plan.launches if launch.device == 0]
    assert names[-1] == "wide_gather_norm_quantize" and "matmul_chains" not in names
    plans = Plans(devices[0], recorders[0])
    plans.capture(plan)
    plans.start_whole(plan)
    for device in devices:
        device.synchronize()
    sums = []
    for own, rest in zip(chains, residual, strict=True):
        total = np.zeros_like(own[:, :, 0])
        for c in range(n_chains):
            total += own[:, :, c]
        whole_tiles = total.transpose(0, 2, 4, 6, 1, 5, 3).reshape(32 * blocks, -1)[:rows, : rest.shape[1]]
        sums.append(whole_tiles + rest if add else whole_tiles)
    for device, part, want in zip(devices, parts, sums, strict=True):
        assert device.read(part.address, part.shape, part.dtype).tobytes() == want.tobytes()
    whole = uploaded(devices[0], np.concatenate(sums, axis=1))
    expected: list[Any] = []

    def single() -> Tensor:
        layout = 4 if unit == 256 else None
        expected.append(quantized(recorders[0], Normalized(whole, weights[0], 1e-5), unit, layout=layout))
        return whole

    alone = recorders[0].record(single)
    plans.capture(alone)
    plans.start_whole(alone)

    def read(value: Any, device: Any) -> list[bytes]:
        words = [device.read(x.address, x.shape, x.dtype) for x in value]
        return rows_of(words[0], 2, 4) if unit == 256 else [x.tobytes() for x in words]

    check_owners(devices, [found], [read(x, devices[0]) for x in expected], read)


@pytest.mark.parametrize("late", [1, pytest.param(0, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "name", ["gather_words", "wide_gather_quantize", "wide_gather_combine_quantize", "wide_gather_norm_quantize"]
)
def test_packets_that_do_not_come(name: str, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of the other owner notes it and ends, one sentence says so, and the same pass is right after that."""
    monkeypatch.setattr(wide_gathering, "WORDS", 512)
    recorders, cut = connected(WaitingDevice, 2), even_cut(512, 2)
    assert cut is not None
    of, random = WideGathering(PacketGathering(recorders), recorders), np.random.default_rng(7)
    devices: list[Any] = [recorder.device for recorder in recorders]
    x, weight = (random.standard_normal(shape).astype(np.float32) for shape in ((ROWS, 512), 512))
    own = [uploaded(device, x[:, first:last]) for device, ((first, last),) in zip(devices, cut.runs, strict=True)]
    weights, parts = [uploaded(device, weight) for device in devices], heads(recorders, cut, 128)[0]
    found: list[Tensor] = []

    def forward() -> None:
        of.begin(ROWS)
        with recorders[0].together(recorders[1:]):
            if name == "gather_words":
                found.extend(of.arrays(own, cut))
            else:
                if name == "wide_gather_norm_quantize":
                    values = of.normalized(own, cut, weights, 1e-5)
                else:
                    values = of.inputs(own if name == "wide_gather_quantize" else parts, cut)
                pairs = zip(recorders, values, strict=True)
                found.extend(quantized(recorder, value, 256, layout=4).q for recorder, value in pairs)
            of.end()

    plan = recorders[0].record(forward)
    assert [launch.kernel.kernel.name for launch in plan.launches] == [name, "clear_packets"] * 2
    plans, waiting = Plans(devices[0], recorders[0]), 1 - late
    plans.capture(plan)

    def result(i: int) -> bytes:
        return b"".join(devices[i].at(found[i].address, found[i].size * 4))

    plans.start_whole(plan)
    expected, states, launch = [result(i) for i in range(2)], list[int](), devices[late].launch

    def drop(specialization: Any, *others: Any) -> None:
        if specialization.kernel.name != name:
            launch(specialization, *others)

    def note(device: Any, *given: Any) -> None:
        states.append(int(device.at(of._states[waiting].address, 4).view(np.int32)[0]))

    with monkeypatch.context() as patch:
        patch.setattr(devices[late], "launch", drop)
        patch.setattr(devices[waiting], "damage", note)
        plans.start_whole(plan)
    assert states == [0, EXPIRED, 0]  # it has given, it has waited, and the pass has ended
    assert result(waiting) != expected[waiting]
    with pytest.raises(DeviceError, match="^simulated GPU has waited too long for another GPU; run again, and"):
        devices[0].synchronize()
    plans.start_whole(plan)
    assert [result(i) for i in range(2)] == expected
    for device in devices:
        device.synchronize()
    check_cleared(of.narrow)


@pytest.mark.thorough
def test_a_step_of_many_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of more rows than narrow kernels take has the bits of the CPU, and no launch copies columns of another GPU but
    those of logits."""
    use_simulated(monkeypatch)
    monkeypatch.setattr(backend, "Device", WaitingDevice)
    monkeypatch.setattr(WaitingDevice, "multiprocessors", 16)
    monkeypatch.setattr(wide_gathering, "WORDS", 128)
    path = make_model(tmp_path / "m.gguf", replace(SHAPE, n_ff=128), "Q4_0")
    given: dict[str, Any] = {"path_or_name": path, "n_ctx": 16, "n_threads": 1, "parallel": ROWS}
    cpu = engine.load(**given, device="cpu")
    llm = engine.load(**given, device="cuda:0,cuda:1", split_mode="tensor")
    expected, found = ([x.tobytes() for x in each.model.step(rows_in(each))] for each in (cpu, llm))
    assert found == expected
    group: Any = llm.model.ops
    (plan,) = (each for key, each in group.lead.plans.kept.items() if key[1] >= ROWS)
    names = Counter(launch.kernel.kernel.name for launch in plan.launches if launch.device == 1)
    assert names["wide_gather_norm_quantize"] == names["gather_words"] == 2
    assert names["place_columns"] == 0


def rows_in(llm: engine.LLM) -> list[tuple[Any, list[int]]]:
    """A token for each sequence of a model."""
    return [(sequence, [3 * i + 5]) for i, sequence in enumerate(llm.model.sequences)]
