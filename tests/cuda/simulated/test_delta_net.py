"""engine/cuda/delta_net.py in the simulator: the bits of engine/cpu/delta_net.py."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine.arrays import Batch
from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from engine.cache.recurrent import RecurrentCache, RecurrentCacheSpec
from engine.cache.types import F32
from engine.cuda import backend, delta_net
from engine.cuda.runtime.simulator import run
from engine.gguf.quants import FORMATS
from engine.ops.delta_net import DeltaNet
from engine.ops.weight import Weight
from engine.synthetic.model import _random, random_blocks
from engine.verify.check import Check, Difference
from engine.verify.lockstep import Lockstep, Pair, join
from tests.batches import one_sequence
from tests.cuda.simulated.device import SimulatedDevice
from tests.mirror import Mirror as CPU
from tests.pages import arrays_of, layer_of, no_pages
from tests.tiers import few

F = np.float32
EPS = 1e-6
cpu = CPU(1)


def random_net(n_k: int, n_v: int, d: int, n_conv: int, rng: np.random.Generator, grouped: bool = False) -> DeltaNet:
    channels = (2 * n_k + n_v) * d
    return DeltaNet(
        n_k,
        n_v,
        d,
        n_conv,
        EPS,
        conv1d=(rng.standard_normal((channels, n_conv)) * n_conv**-0.5).astype(F),
        a=-np.exp(rng.uniform(-2, 2, n_v)).astype(F),
        dt=rng.uniform(-5, 2, n_v).astype(F),
        norm=rng.uniform(0.5, 1.5, d).astype(F),
        grouped=grouped,
    )


def shape_of(net: DeltaNet, rewind: int) -> RecurrentCacheSpec:
    return RecurrentCacheSpec(net.n_channels, net.n_conv, net.n_k, net.n_v, net.state_size, rewind)


def random_memory(net: DeltaNet, rewind: int, position: int, rng: np.random.Generator, slot: int = 0) -> RecurrentCache:
    """A memory in which a pass of the sequence in ``slot`` at ``position`` finds random numbers, and NaN wherever it must not
    look."""
    return filled(net, rewind, [(slot, position)], slot + 1, rng)


def filled(
    net: DeltaNet, rewind: int, places: list[tuple[int, int]], n_sequences: int, rng: np.random.Generator
) -> RecurrentCache:
    """A memory in which passes of sequences at places (slot, position) find random numbers, and NaN elsewhere."""
    memory: RecurrentCache = layer_of(
        shape_of(net, rewind), 0, 64, F32, lambda size, dtype: np.full(size, np.nan, dtype), n_sequences=n_sequences
    )
    for slot, position in places:
        for rows in memory.needed(slot, position, no_pages):
            for part in rows.runs():
                values = rng.standard_normal(rows.ring[part].shape)
                rows.ring[part] = np.abs(values) % 1 if rows.name == "decays" else values
    return memory


def copy(memory: RecurrentCache, of: Callable[[Any], Any] = np.copy) -> RecurrentCache:
    return replace(memory, **{name: of(array) for name, array in vars(memory).items() if name != "n_conv"})


def same(mine: RecurrentCache, its: RecurrentCache, first: int, end: int, slot: int = 0) -> None:
    """What a pass over [first, end) stored is the same, as far as the rings hold it."""
    for a, b in zip(mine.written(slot, first, end), its.written(slot, first, end), strict=True):
        a.first = b.first = max(a.first, a.end - len(a.ring))
        for part in a.runs():
            assert a.ring[part].tobytes() == b.ring[part].tobytes(), a.name


def agree(
    net: DeltaNet, passes: list[int], start: int = 0, rewind: int = 1, seed: int | None = 1, slot: int = 0
) -> None:
    """One pass after another, on both; a negative number rolls that many tokens back."""
    rng = np.random.default_rng(sum(passes) + start)
    d, n_v = net.state_size, net.n_v
    memory = random_memory(net, rewind, start, rng, slot)
    ours, length, segments = copy(memory), memory.conv.shape[1], memory.states.shape[1]
    for rows in passes:
        if rows < 0:
            start += rows
            continue
        positions, sequences = np.arange(start, start + rows, dtype=np.int32), np.full(rows, slot, np.int32)
        x, alpha, beta = (rng.standard_normal((rows, n)).astype(F) for n in (net.n_channels, n_v, n_v))
        # One that softplus returns unchanged, and one whose exponential vanishes beside 1.
        alpha[0, 0], alpha[-1, -1] = 25.0, -40.0
        expected = cpu.delta_net(net, x, [alpha, beta], memory, Batch(positions, positions, sequences))
        out = np.full((rows, n_v * d), np.nan, F)
        most = 1 if rows == 1 else -(-rows // 8) * 8
        numbers = (EPS, 1.0 / d**0.5, net.n_k, rows, length, segments)
        given = [x, alpha, beta, n_v, net.conv1d, net.a, net.dt, positions, sequences, *numbers]
        kernel = delta_net.delta_net(d, net.n_conv, most, net.grouped)
        run(kernel, delta_net.grid(d, n_v), delta_net.THREADS, [*given, *arrays_of(ours).values(), out], seed=seed)
        assert np.isfinite(expected).all()
        assert out.tobytes() == expected.tobytes()
        same(memory, ours, start, start + rows, slot)
        start += rows


@pytest.mark.parametrize(
    ("passes", "start"),
    few(
        [
            ([1, 5, 9, 2], 0),  # from position 0; two batches of four and one more; beyond the first segment
            ([1, 1, 1], 30),  # the last token of a segment, and the first of the next
            ([8], 43),  # odd numbers of tokens in both segments, as many rows as the kernel takes
            ([9, -7, 5], 27),  # rolled back into the segment before, which ends again
            ([16, -16, 16, 16, -4, 7], 48),  # whole segments; rolled back within one
        ],
        3,
    ),
)
def test_passes(passes: list[int], start: int) -> None:
    agree(random_net(1, 1, 32, 4, np.random.default_rng(0)), passes, start)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_passes_and_rollbacks_anywhere(seed: int) -> None:
    rng = np.random.default_rng(seed)
    start = int(rng.integers(0, 70))
    passes: list[int] = []
    at = most = start
    for _ in range(4):
        passes.append(int(rng.integers(1, 17)))
        at += passes[-1]
        most = max(most, at)
        if back := int(rng.integers(0, at - max(start, most - 16) + 1)):
            passes.append(-back)
            at -= back
    agree(random_net(1, 1, 32, 4, rng), passes, start, rewind=16)


@pytest.mark.parametrize(
    ("n_k", "n_v", "d", "n_conv", "rows"), [(2, 4, 32, 2, 2), (1, 1, 96, 3, 1), (1, 1, 64, 1, 1), (1, 1, 128, 5, 1)]
)
def test_sizes(n_k: int, n_v: int, d: int, n_conv: int, rows: int) -> None:
    agree(random_net(n_k, n_v, d, n_conv, np.random.default_rng(1)), [rows], start=31, slot=rows)


def test_neighbouring_heads_share_a_key() -> None:
    agree(random_net(2, 4, 32, 3, np.random.default_rng(5), grouped=True), [2], start=30)


def test_the_order_of_threads_does_not_show() -> None:
    agree(random_net(1, 1, 32, 4, np.random.default_rng(2)), [6], start=27, seed=1)


RUNS = [(2, 14, 3), (0, 0, 1), (1, 31, 1), (3, 20, 2)]
"""Runs (slot, position, rows): over the end of a segment, the first token, the last of a segment, within one."""


def rows_of(runs: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """The sequences and positions of the rows of runs."""
    sequences = np.concatenate([np.full(rows, slot, np.int32) for slot, _, rows in runs])
    return sequences, np.concatenate([np.arange(first, first + rows, dtype=np.int32) for _, first, rows in runs])


@pytest.mark.parametrize(
    ("runs", "copied"),
    few(
        [
            # Copies of the last row of a run behind it, and of first rows elsewhere.
            (RUNS[:3], [0, 1, 2, 2, 3, 4, 4, 4, 0, 3]),
            # More rows than an answer has, and a run of more than 8.
            ([(0, 3, 13), (1, 16, 1), (2, 14, 3)], [*range(17)]),
            # The most rows of an answer, from the beginning of a segment and over the end of one.
            ([(1, 16, 16), (0, 25, 16)], [*range(32), 31, 31]),
            (RUNS, [0, 1, 2, 3, 4, 5, 6]),
            # More answers than have drafts, and copies of the last one.
            ([(slot, at, 1) for slot, at in enumerate([15, 16, 0, 31, *range(1, 15)])], [*range(18), 17, 17]),
        ],
        2,
    ),
)
def test_rows_of_several_sequences(gpu: backend.Backend, runs: list[tuple[int, int, int]], copied: list[int]) -> None:
    """A mixed pass is each run alone on the CPU: results, and all that is stored for all sequences."""
    rng = np.random.default_rng(6)
    net = random_net(1, 2, 32, 4, rng)
    memory = filled(net, 1, [run[:2] for run in runs], max(4, len(runs)), rng)
    device_memory = copy(memory, gpu.upload)
    vectors: Any = {name: gpu.upload(getattr(net, name)) for name in ("conv1d", "a", "dt", "norm")}
    device_net = replace(net, **vectors)
    sequences, positions = rows_of(runs)
    x, gates = (rng.standard_normal((len(positions), n)).astype(F) for n in (net.n_channels, 4))
    expected, first = [], 0
    for _, _, rows in runs:
        part = slice(first, first + rows)
        batch = Batch(positions[part], positions[part], sequences[part])
        expected.append(cpu.delta_net(net, x[part], [gates[part]], memory, batch))
        first += rows
    places, slots = gpu.upload(positions[copied]), gpu.upload(sequences[copied])
    inputs, given = gpu.upload(x[copied]), [gpu.upload(gates[copied])]
    mixed = Batch(places, places, slots, True)
    ours = computed(gpu, lambda: gpu.delta_net(device_net, inputs, given, device_memory, mixed))
    assert ours.tobytes() == np.concatenate(expected)[copied].tobytes() and np.isfinite(ours).all()
    # Before position 0 the state is 0; the CPU writes that down, the GPU does not.
    for slot, position, _ in runs:
        if position < 16:
            memory.states[slot, 0] = np.nan
    for name, array in arrays_of(copy(device_memory, gpu.download)).items():
        assert array.tobytes() == vars(memory)[name].tobytes(), name


# --- through the backend ---------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> backend.Backend:
    monkeypatch.setattr(backend, "Device", SimulatedDevice)
    return backend.Backend()


def computed(gpu: backend.Backend, operation: Any) -> np.ndarray:
    plan: Any = gpu.record(operation)
    gpu.start(plan)
    return gpu.download(plan.result)


@pytest.mark.parametrize("apart", [True, False])
def test_the_operation(gpu: backend.Backend, apart: bool) -> None:
    rng = np.random.default_rng(3)
    net = random_net(1, 2, 32, 4, rng)
    positions = np.arange(5, 8, dtype=np.int32)
    x, alpha, beta = (rng.standard_normal((3, n)).astype(F) for n in (net.n_channels, 2, 2))
    memory = random_memory(net, 1, 5, rng)
    device_memory = copy(memory, gpu.upload)
    vectors: Any = {name: gpu.upload(getattr(net, name)) for name in ("conv1d", "a", "dt", "norm")}
    device_net = replace(net, **vectors)
    inputs, batch = gpu.upload(x), one_sequence(positions, gpu)
    # From two matrices, or from one.
    gates = [alpha, beta] if apart else [np.concatenate([alpha, beta], axis=1)]
    given = [gpu.upload(gate) for gate in gates]
    ours = computed(gpu, lambda: gpu.delta_net(device_net, inputs, given, device_memory, batch))
    assert ours.tobytes() == cpu.delta_net(net, x, gates, memory, one_sequence(positions)).tobytes()
    same(memory, copy(device_memory, gpu.download), 5, 8)


@pytest.mark.parametrize(
    ("sizes", "grouped", "passes", "rewind", "start"),
    few(
        [
            # More segments than the ring has, so that the first is overwritten; then a step.
            ((1, 2, 32, 4), False, [29, 2], 1, 21),
            ((2, 4, 32, 2), True, [17], 20, 0),
            ((1, 1, 96, 1), False, [37, 2, 19], 1, 15),
            ((1, 1, 128, 4), False, [17], 1, 31),
        ],
        2,
    ),
)
def test_wide_passes_are_single_steps(
    gpu: backend.Backend, sizes: tuple[int, int, int, int], grouped: bool, passes: list[int], rewind: int, start: int
) -> None:
    rng, slot = np.random.default_rng(start), len(passes) - 1
    net = random_net(*sizes, rng, grouped)
    memory = random_memory(net, rewind, start, rng, slot)
    device_memory = copy(memory, gpu.upload)
    vectors: Any = {name: gpu.upload(getattr(net, name)) for name in ("conv1d", "a", "dt", "norm")}
    device_net = replace(net, **vectors)
    for rows in passes:
        positions = np.arange(start, start + rows, dtype=np.int32)
        x, gates = (rng.standard_normal((rows, n)).astype(F) for n in (net.n_channels, 2 * net.n_v))
        gates[0, 0], gates[-1, -1] = 25.0, -40.0
        sequences = np.full(rows, slot, np.int32)
        batch = Batch(positions, positions, sequences)
        each = [slice(t, t + 1) for t in range(rows)]
        law = [cpu.delta_net(net, x[row], [gates[row]], memory, batch.part(row)) for row in each]
        inputs, places, given = gpu.upload(x), gpu.upload(positions), [gpu.upload(gates)]
        of_gpu = Batch(places, places, gpu.upload(sequences))
        ours = computed(gpu, partial(gpu.delta_net, device_net, inputs, given, device_memory, of_gpu))
        assert ours.tobytes() == np.concatenate(law).tobytes()
        same(memory, copy(device_memory, gpu.download), start, start + rows, slot)
        start += rows


@pytest.mark.parametrize(
    ("kernel", "place", "what"),
    [
        ("", 0, ""),
        ("convolve", -2, "convolved and normalized"),
        ("convolve", -1, "decay and rate"),
        ("couple", -1, "weights of the tokens of a segment"),
        ("delta_rule", -1, "result"),
    ],
)
def test_a_wide_pass_beside_the_cpu(gpu: backend.Backend, kernel: str, place: int, what: str) -> None:
    """A fault is located kernel by kernel: the faulty one is named, even if the pass has overwritten its own inputs."""
    rng = np.random.default_rng(4)
    rows, net = 22, random_net(1, 1, 32, 4, rng)
    # Of tokens before the pass, not everything that a kernel copies is used.
    first = 16 if kernel in ("convolve", "couple") else 9
    memory = random_memory(net, 1, first, rng)
    vectors: Any = {name: gpu.upload(getattr(net, name)) for name in ("conv1d", "a", "dt", "norm")}
    device_memory = copy(memory, gpu.upload)

    def damage(device: SimulatedDevice, launched: Any, arguments: Any) -> None:
        if launched.kernel.name == kernel:
            device.at(arguments[place])[12] ^= 1

    device: Any = gpu.device
    device.damage = damage
    notes: list[Check] = []
    config = SimpleNamespace(n_layer=0)
    of_cpu, of_gpu = (SimpleNamespace(ops=ops, drafter=None, config=config) for ops in (cpu, gpu))
    both = Lockstep(of_cpu, of_gpu, lambda site, check: notes.append(check))
    arrays = [rng.standard_normal((rows, n)).astype(F) for n in (96, 2)]
    arrays += [np.arange(first, first + rows, dtype=np.int32), np.zeros(rows, np.int32)]
    x, gates, positions, slots = (Pair(array, gpu.upload(array)) for array in arrays)
    given = (
        join(net, replace(net, **vectors)),
        x,
        [gates],
        join(memory, device_memory),
        Batch[Any](positions, positions, slots),
    )
    if kernel:
        with pytest.raises(Difference, match=f"the kernel {kernel}.* differs in the same way") as caught:
            both.delta_net(*given)
        assert caught.value.check.what == what
        return
    both.delta_net(*given)
    whats = [
        "convolved and normalized",
        "decay and rate",
        "weights of the tokens of a segment",
        "kept keys",
        "kept decays",
    ]
    whats += ["kept state", "kept deltas", "result", "kept inputs"]
    assert [check.what for check in notes] == whats and notes[-1].cpu.shape == (19, 96)


@pytest.mark.parametrize(
    ("name", "columns", "d"), [("Q4_K", 256, 128), ("Q8_0", 288, 96), ("Q8_0", 64, 32), ("F32", 128, 64)]
)
def test_gated_norm(gpu: backend.Backend, name: str, columns: int, d: int) -> None:
    """The norm quantized to int8 with both units, and as float32; with runs that end within a block of 256."""
    rng = np.random.default_rng(columns)
    entry = next(e for e in FORMATS.values() if e.name == name)
    if entry.quantized:
        blocks = random_blocks(entry.type, 3 * columns // entry.block, 0.1, _random(1, name))
        w = Weight("w", entry, columns, blocks.reshape(3, entry.row_bytes(columns)))
    else:
        w = Weight("w", entry, columns, rng.standard_normal((3, columns)).astype(F).view(np.uint8))
    x, gate, residual = (rng.standard_normal((2, n)).astype(F) for n in (columns, columns, 3))
    norm = rng.uniform(0.5, 1.5, d).astype(F)
    expected = cpu.gated_norm(x, norm, gate, EPS)
    a, b, g, r = (gpu.upload(array) for array in (x, norm, gate, residual))
    device_weight = gpu.weight(w)
    assert computed(gpu, lambda: gpu.plain(gpu.gated_norm(a, b, g, EPS))).tobytes() == expected.tobytes()
    ours = computed(gpu, lambda: gpu.matmul_add(r, gpu.gated_norm(a, b, g, EPS), device_weight))
    assert ours.tobytes() == cpu.matmul_add(residual, expected, w).tobytes()
