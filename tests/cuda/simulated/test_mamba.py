"""engine/cuda/mamba.py in the simulator: the bits of engine/cpu/mamba.py."""

from typing import Any

import numpy as np
import pytest

from engine.arrays import Batch
from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from dataclasses import replace
from types import SimpleNamespace

from engine.cache.mamba import MambaCache
from engine.cuda import backend
from engine.ops.mamba import Mamba
from engine.verify.check import Check, Difference
from engine.verify.lockstep import Lockstep, Pair, join
from tests.batches import one_sequence
from tests.cpu.test_mamba import Inputs, bytes_of, empty_memory, inputs, random_net
from tests.cuda.simulated.device import SimulatedDevice
from tests.cuda.simulated.test_delta_net import computed, cpu, gpu, rows_of
from tests.pages import no_pages
from tests.tiers import few

assert gpu


def filled(net: Mamba, places: list[tuple[int, int]], n_sequences: int) -> MambaCache:
    """A memory in which passes of sequences at places (slot, position) find random numbers, and NaN elsewhere."""
    rng = np.random.default_rng(net.n)
    memory = empty_memory(net, 1, n_sequences=n_sequences)
    for slot, position in places:
        for rows in memory.needed(slot, position, no_pages):
            for part in rows.runs():
                rows.ring[part] = rng.uniform(-0.9, 0.9, rows.ring[part].shape)
    return memory


def uploaded(gpu: backend.Backend, memory: MambaCache) -> MambaCache:
    inputs, states, tokens = (gpu.upload(array) for array in (memory.inputs, memory.states, memory.tokens))
    return MambaCache(inputs, states, tokens, memory.taps)


def weights_of(gpu: backend.Backend, net: Mamba) -> Mamba:
    conv, bias, dt, a, skip = (gpu.upload(array) for array in (net.conv, net.conv_bias, net.dt, net.a, net.skip))
    return replace(net, conv=conv, conv_bias=bias, dt=dt, a=a, skip=skip)


def stored(gpu: backend.Backend, memory: MambaCache) -> list[bytes]:
    return [gpu.download(array).tobytes() for array in (memory.inputs, memory.states, memory.tokens)]


@pytest.mark.parametrize(
    ("sizes", "passes", "start"),
    few(
        [
            # Passes that the rings have no room for, which go round them; a rollback; a step.
            ((2, 16, 32, 1, 3), [19, -9, 1, 9, 36, 1], 0),
            ((2, 32, 64, 2, 4), [1, 2], 14),  # two groups, two blocks of a head; the end of a segment
            ((4, 16, 32, 2, 2), [5, -1, 1], 100),
        ]
    ),
)
def test_passes(gpu: backend.Backend, sizes: tuple[int, ...], passes: list[int], start: int) -> None:
    """One pass after another, on both; a negative number rolls that many tokens back."""
    net = random_net(*sizes)
    memory = filled(net, [(0, start)], 1)
    theirs, of_gpu = uploaded(gpu, memory), weights_of(gpu, net)
    for number, rows in enumerate(passes):
        if rows < 0:
            start += rows
            continue
        positions, given = np.arange(start, start + rows, dtype=np.int32), inputs(net, rows, number)
        u, z, batch = gpu.upload(given.u), gpu.upload(given.z), one_sequence(positions, gpu)
        ours = computed(gpu, lambda u=u, z=z, batch=batch: gpu.mamba(of_gpu, u, z, theirs, batch))
        assert ours.tobytes() == cpu.mamba(net, given.u, given.z, memory, one_sequence(positions)).tobytes()
        start += rows
        both = (bytes_of_needed(part, start) for part in (memory, downloaded(gpu, theirs)))
        assert next(both) == next(both) and np.isfinite(ours).all()


def downloaded(gpu: backend.Backend, memory: MambaCache) -> MambaCache:
    inputs, states, tokens = (gpu.download(array) for array in (memory.inputs, memory.states, memory.tokens))
    return MambaCache(inputs, states, tokens, memory.taps)


def bytes_of_needed(memory: MambaCache, end: int) -> list[bytes]:
    """What passes at each position that tokens may be rolled back to read."""
    found = []
    for position in range(max(0, end - 1), end + 1):
        for rows in memory.needed(0, position, no_pages):
            found += [rows.ring[part].tobytes() for part in rows.runs()]
    return found


RUNS = [(2, 14, 3), (0, 0, 1), (1, 31, 1), (3, 2, 2)]
"""Runs (slot, position, rows)."""


@pytest.mark.parametrize(
    ("runs", "copied"),
    few(
        [
            # Copies of the last row of a run behind it, and of first rows elsewhere.
            (RUNS[:3], [0, 1, 2, 2, 3, 4, 4, 4, 0, 3]),
            (RUNS, [0, 1, 2, 3, 4, 5, 6]),
            ([(1, 7, 30), (0, 0, 24)], list(range(54))),  # more rows than the rings have
        ]
    ),
)
def test_rows_of_several_sequences(gpu: backend.Backend, runs: list[tuple[int, int, int]], copied: list[int]) -> None:
    """A mixed pass is each run alone on the CPU: results, and all that is stored for all sequences."""
    net = random_net(2, 16, 32, 1, 4)
    memory = filled(net, [run[:2] for run in runs], 4)
    theirs, of_gpu = uploaded(gpu, memory), weights_of(gpu, net)
    sequences, positions = rows_of(runs)
    given = inputs(net, len(positions))
    expected, first = [], 0
    for _, _, rows in runs:
        part = slice(first, first + rows)
        batch = Batch(positions[part], positions[part], sequences[part])
        expected.append(cpu.mamba(net, given.u[part], given.z[part], memory, batch))
        first += rows
    places, slots = gpu.upload(positions[copied]), gpu.upload(sequences[copied])
    u, z, mixed = gpu.upload(given.u[copied]), gpu.upload(given.z[copied]), Batch(places, places, slots, True)
    ours = computed(gpu, lambda: gpu.mamba(of_gpu, u, z, theirs, mixed))
    assert ours.tobytes() == np.concatenate(expected)[copied].tobytes() and np.isfinite(ours).all()
    assert stored(gpu, theirs) == bytes_of(memory)


@pytest.mark.parametrize(
    ("rows", "kernel", "place", "what"),
    [
        (3, "", 0, ""),
        (30, "", 0, ""),
        (3, "mamba_conv", -1, "convolved"),
        (3, "mamba_conv", -2, "kept tokens"),
        (3, "mamba_conv", -3, "kept inputs"),
        (3, "mamba_scan", -1, "result"),
        (3, "mamba_scan", -2, "kept state"),
        (30, "keep_tokens", -1, "kept tokens"),
        (30, "keep_tokens", -2, "kept inputs"),
    ],
)
def test_a_pass_beside_the_cpu(gpu: backend.Backend, rows: int, kernel: str, place: int, what: str) -> None:
    """A fault is located kernel by kernel: the faulty one is named, even if the pass has overwritten its own inputs."""
    net = random_net(2, 16, 32, 1, 3)
    memory = filled(net, [(0, 14)], 1)
    theirs, weights = uploaded(gpu, memory), weights_of(gpu, net)

    def damage(device: SimulatedDevice, launched: Any, arguments: Any) -> None:
        if launched.kernel.name == kernel:
            wrong = device.at(arguments[place])
            # An element of what the pass stores: of the state of segment 1, of row 14 of a ring.
            row = {"kept state": 2 * 16 * 32, "kept tokens": 14 * net.width, "kept inputs": 14 * net.n_channels}
            wrong[4 * row.get(what, 0) + 12] ^= 1

    device: Any = gpu.device
    device.damage = damage
    notes: list[Check] = []
    config = SimpleNamespace(n_layer=0)
    of_cpu, of_gpu = (SimpleNamespace(ops=ops, drafter=None, config=config) for ops in (cpu, gpu))
    both = Lockstep(of_cpu, of_gpu, lambda site, check: notes.append(check))
    given: Inputs = inputs(net, rows)
    arrays = [given.u, given.z, np.arange(14, 14 + rows, dtype=np.int32), np.zeros(rows, np.int32)]
    u, z, positions, slots = (Pair(array, gpu.upload(array)) for array in arrays)
    arguments = join(net, weights), u, z, join(memory, theirs), Batch[Any](positions, positions, slots)
    if kernel:
        with pytest.raises(Difference, match=f"the kernel {kernel}.* differs in the same way") as caught:
            both.mamba(*arguments)
        assert caught.value.check.what == what
        return
    both.mamba(*arguments)
    assert sorted(check.what for check in notes) == ["convolved", "kept inputs", "kept state", "kept tokens", "result"]


@pytest.mark.parametrize(("n_group", "n"), [(3, 96), (2, 600)])
def test_a_norm_of_groups(gpu: backend.Backend, n_group: int, n: int) -> None:
    rng = np.random.default_rng(n)
    x, weight = (
        rng.standard_normal((2, n_group * n)).astype(np.float32),
        rng.uniform(0.5, 2, n_group * n).astype(np.float32),
    )
    a, w = gpu.upload(x), gpu.upload(weight)
    ours = computed(gpu, lambda: gpu.grouped_norm(a, w, n_group, 1e-6))
    assert ours.tobytes() == cpu.grouped_norm(x, weight, n_group, 1e-6).tobytes()
