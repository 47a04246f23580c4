"""engine/cuda/delta_net.py in the simulator: the bits of engine/cpu/delta_net.py."""

from typing import Any

import numpy as np
import pytest

from engine.arrays import Pass
from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from engine.cache.recurrent import RecurrentLayer, RecurrentShape
from engine.cache.types import F32
from engine.cuda import backend, delta_net
from engine.cuda.runtime.simulator import run
from engine.gguf.quants import FORMATS
from engine.models.delta_net import DeltaNet
from engine.models.weights import Weight
from engine.synthetic.model import _random, random_blocks
from engine.verify.lockstep import Check, Difference, Lockstep, Pair, join
from tests.cuda.simulated.device import SimulatedDevice
from tests.mirror import Mirror as CPU
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


def agree(net: DeltaNet, passes: list[int], slots: int, start: int = 0, seed: int | None = None) -> None:
    """One pass after another, on both; rows in memory that have never been written are NaN."""
    rng = np.random.default_rng(sum(passes) + slots + start)
    length = max(*passes, slots) + net.n_conv - 1
    d, n_v = net.state_size, net.n_v
    memory = RecurrentLayer(np.full((length, net.n_channels), np.nan, F), np.full((slots, n_v, d, d), np.nan, F))
    if start:
        for position in range(max(0, start - net.n_conv + 1), start):
            memory.conv[position % length] = rng.standard_normal(net.n_channels)
        memory.states[(start - 1) % slots] = rng.standard_normal((n_v, d, d))
    ours = RecurrentLayer(memory.conv.copy(), memory.states.copy())
    for rows in passes:
        positions = np.arange(start, start + rows, dtype=np.int32)
        x, alpha, beta = (rng.standard_normal((rows, n)).astype(F) for n in (net.n_channels, n_v, n_v))
        # One that softplus returns unchanged, and one whose exponential vanishes beside 1.
        alpha[0, 0], alpha[-1, -1] = 25.0, -40.0
        expected = cpu.delta_net(net, x, [alpha, beta], memory, Pass(positions, positions))
        out = np.full((rows, n_v * d), np.nan, F)
        most = 1 if rows == 1 else -(-rows // 8) * 8
        numbers = (EPS, 1.0 / d**0.5, net.n_k, rows, length, slots)
        arguments = [x, alpha, beta, n_v, net.conv1d, net.a, net.dt, positions, *numbers, ours.conv, ours.states, out]
        kernel = delta_net.delta_net(d, net.n_conv, most, net.grouped)
        run(kernel, delta_net.grid(d, n_v), delta_net.THREADS, arguments, seed=seed)
        assert np.isfinite(expected).all()
        assert out.tobytes() == expected.tobytes()
        assert ours.conv.tobytes() == memory.conv.tobytes()
        assert ours.states.tobytes() == memory.states.tobytes()
        start += rows


@pytest.mark.parametrize(
    ("passes", "slots", "start"),
    [([1, 3, 1], 4, 0), ([5, 2], 4, 2), ([9, 1], 3, 1), ([1, 1], 1, 31)],
)
def test_passes(passes: list[int], slots: int, start: int) -> None:
    """Fewer rows than slots and more; a batch of four tokens and the next; the first eight values of a row and the ninth."""
    agree(random_net(1, 1, 32, 4, np.random.default_rng(0)), passes, slots, start)


@pytest.mark.parametrize(
    ("n_k", "n_v", "d", "n_conv", "rows"), [(2, 4, 32, 2, 2), (1, 1, 96, 3, 1), (1, 2, 64, 1, 1), (1, 1, 128, 5, 2)]
)
def test_sizes(n_k: int, n_v: int, d: int, n_conv: int, rows: int) -> None:
    agree(random_net(n_k, n_v, d, n_conv, np.random.default_rng(1)), [rows], 2, start=3)


def test_neighbouring_heads_share_a_key() -> None:
    agree(random_net(2, 6, 32, 3, np.random.default_rng(5), grouped=True), [1, 2], 2, start=3)


def test_the_order_of_threads_does_not_show() -> None:
    agree(random_net(1, 1, 32, 4, np.random.default_rng(2)), [6], 2, start=7, seed=1)


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
    memory = RecurrentLayer(
        rng.standard_normal((9, net.n_channels)).astype(F), rng.standard_normal((6, 2, 32, 32)).astype(F)
    )
    device_memory = RecurrentLayer(gpu.upload(memory.conv), gpu.upload(memory.states))
    vectors: Any = {name: gpu.upload(getattr(net, name)) for name in ("conv1d", "a", "dt", "norm")}
    device_net = replace(net, **vectors)
    inputs, places = gpu.upload(x), gpu.upload(positions)
    # From two matrices, or from one.
    gates = [alpha, beta] if apart else [np.concatenate([alpha, beta], axis=1)]
    given = [gpu.upload(gate) for gate in gates]
    ours = computed(gpu, lambda: gpu.delta_net(device_net, inputs, given, device_memory, Pass(places, places)))
    assert ours.tobytes() == cpu.delta_net(net, x, gates, memory, Pass(positions, positions)).tobytes()
    assert gpu.download(device_memory.conv).tobytes() == memory.conv.tobytes()
    assert gpu.download(device_memory.states).tobytes() == memory.states.tobytes()


@pytest.mark.parametrize(
    ("sizes", "grouped", "passes", "slots", "start"),
    few(
        [
            # More than the ring holds; from the beginning, and from what a step left.
            ((1, 2, 32, 4), False, [21, 2, 19], 3, 0),
            ((2, 4, 32, 2), True, [17], 20, 5),  # fewer rows than slots
            ((1, 1, 96, 1), False, [24], 1, 9),  # whole stages; no ring
        ],
        2,
    ),
)
def test_wide_passes_are_single_steps(
    gpu: backend.Backend, sizes: tuple[int, int, int, int], grouped: bool, passes: list[int], slots: int, start: int
) -> None:
    rng = np.random.default_rng(start)
    net = random_net(*sizes, rng, grouped)
    n_v, d = net.n_v, net.state_size
    shape = RecurrentShape(net.n_channels, net.n_conv, n_v, d, slots)
    memory = shape.layer(64, 40, F32, np.zeros)
    memory.conv[:], memory.states[:] = rng.standard_normal(memory.conv.shape), rng.standard_normal(memory.states.shape)
    device_memory = RecurrentLayer(gpu.upload(memory.conv), gpu.upload(memory.states))
    vectors: Any = {name: gpu.upload(getattr(net, name)) for name in ("conv1d", "a", "dt", "norm")}
    device_net = replace(net, **vectors)
    for rows in passes:
        positions = np.arange(start, start + rows, dtype=np.int32)
        x, gates = (rng.standard_normal((rows, n)).astype(F) for n in (net.n_channels, 2 * n_v))
        gates[0, 0], gates[-1, -1] = 25.0, -40.0
        batch = Pass(positions, positions)
        each = [slice(t, t + 1) for t in range(rows)]
        law = [cpu.delta_net(net, x[row], [gates[row]], memory, batch.part(row)) for row in each]
        inputs, places, given = gpu.upload(x), gpu.upload(positions), [gpu.upload(gates)]
        ours = computed(gpu, partial(gpu.delta_net, device_net, inputs, given, device_memory, Pass(places, places)))
        assert ours.tobytes() == np.concatenate(law).tobytes()
        # Every slot and row that a later pass may read.
        for ring, mine, count in (
            (device_memory.conv, memory.conv, net.n_conv - 1 + slots),
            (device_memory.states, memory.states, slots),
        ):
            at = [p % len(mine) for p in range(max(start, start + rows - count), start + rows)]
            assert gpu.download(ring)[at].tobytes() == mine[at].tobytes()
        start += rows


@pytest.mark.parametrize(
    ("kernel", "place", "what"),
    [
        ("", 0, ""),
        ("convolve", -2, "convolved and normalized"),
        ("convolve", -1, "decay and rate"),
        ("delta_rule", -1, "result"),
    ],
)
def test_a_wide_pass_beside_the_cpu(gpu: backend.Backend, kernel: str, place: int, what: str) -> None:
    """A fault is located kernel by kernel: the faulty one is named, even if the pass has overwritten its own inputs."""
    rng = np.random.default_rng(4)
    rows, net, shape = 22, random_net(1, 1, 32, 4, rng), RecurrentShape(96, 4, 1, 32, 2)
    memory = shape.layer(64, 40, F32, np.zeros)
    memory.conv[:], memory.states[:] = rng.standard_normal(memory.conv.shape), rng.standard_normal(memory.states.shape)
    vectors: Any = {name: gpu.upload(getattr(net, name)) for name in ("conv1d", "a", "dt", "norm")}
    device_memory = RecurrentLayer(gpu.upload(memory.conv), gpu.upload(memory.states))

    def damage(device: SimulatedDevice, launched: Any, arguments: Any) -> None:
        if launched.kernel.name == kernel:
            device.at(arguments[place])[12] ^= 1

    device: Any = gpu.device
    device.damage = damage
    notes: list[Check] = []
    of_cpu, of_gpu = (SimpleNamespace(ops=ops, mtp=None) for ops in (cpu, gpu))
    both = Lockstep(of_cpu, of_gpu, lambda site, check: notes.append(check))
    arrays = [rng.standard_normal((rows, n)).astype(F) for n in (96, 2)] + [np.arange(9, 9 + rows, dtype=np.int32)]
    x, gates, positions = (Pair(array, gpu.upload(array)) for array in arrays)
    given = join(net, replace(net, **vectors)), x, [gates], join(memory, device_memory), Pass[Any](positions, positions)
    if kernel:
        with pytest.raises(Difference, match=f"the kernel {kernel}.* differs in the same way") as caught:
            both.delta_net(*given)
        assert caught.value.check.what == what
        return
    both.delta_net(*given)
    whats = ["convolved and normalized", "decay and rate", "kept state", "result", "kept input"]
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
