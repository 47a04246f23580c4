"""engine/cuda/kda.py in the simulator: the bits of engine/cpu/kda.py."""

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
from engine.ops.kda import KDA
from engine.verify.check import Check, Difference
from engine.verify.lockstep import Lockstep, Pair, join
from tests.batches import one_sequence
from tests.cpu.test_kda import Inputs, empty_memory, inputs, random_net
from tests.cpu.test_mamba import bytes_of
from tests.cuda.simulated.device import SimulatedDevice
from tests.cuda.simulated.test_delta_net import computed, cpu, gpu, rows_of
from tests.cuda.simulated.test_mamba import bytes_of_needed, downloaded, stored, uploaded
from tests.pages import no_pages
from tests.tiers import few

assert gpu


def filled(net: KDA, places: list[tuple[int, int]], n_sequences: int) -> MambaCache:
    """A memory in which passes of sequences at places (slot, position) find random numbers, and NaN elsewhere."""
    rng = np.random.default_rng(net.d)
    memory = empty_memory(net, 1, n_sequences=n_sequences)
    for slot, position in places:
        for rows in memory.needed(slot, position, no_pages):
            for part in rows.runs():
                rows.ring[part] = rng.uniform(-0.3, 0.3, rows.ring[part].shape)
    return memory


def weights_of(gpu: backend.Backend, net: KDA) -> KDA:
    conv, a, dt = (gpu.upload(array) for array in (net.conv, net.a, net.dt))
    return replace(net, conv=conv, a=a, dt=dt)


def taken(given: Inputs, rows: list[int]) -> Inputs:
    return Inputs(*(array[rows] for array in given.arrays))


@pytest.mark.parametrize(
    ("sizes", "passes", "start"),
    few(
        [
            # Passes that the rings have no room for, which go round them; a rollback; a step.
            ((4, 32, 3), [19, -9, 1, 9, 36, 1], 0),
            ((4, 64, 4), [1, 2], 14),  # the end of a segment
            ((4, 32, 2), [5, -1, 1], 100),
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
        arguments: Any = [*(gpu.upload(array) for array in given.arrays), theirs, one_sequence(positions, gpu)]
        ours = computed(gpu, lambda arguments=arguments: gpu.kda(of_gpu, *arguments))
        assert ours.tobytes() == cpu.kda(net, *given.arrays, memory, one_sequence(positions)).tobytes()
        start += rows
        both = (bytes_of_needed(part, start) for part in (memory, downloaded(gpu, theirs)))
        assert next(both) == next(both) and np.isfinite(ours).all()


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
    net = random_net(4, 32, 4)
    memory = filled(net, [run[:2] for run in runs], 4)
    theirs, of_gpu = uploaded(gpu, memory), weights_of(gpu, net)
    sequences, positions = rows_of(runs)
    given = inputs(net, len(positions))
    expected, first = [], 0
    for _, _, rows in runs:
        part = slice(first, first + rows)
        batch = Batch(positions[part], positions[part], sequences[part])
        expected.append(cpu.kda(net, *given[part].arrays, memory, batch))
        first += rows
    places, slots = gpu.upload(positions[copied]), gpu.upload(sequences[copied])
    arrays = [gpu.upload(array) for array in taken(given, copied).arrays]
    arguments: Any = [*arrays, theirs, Batch(places, places, slots, True)]
    ours = computed(gpu, lambda: gpu.kda(of_gpu, *arguments))
    assert ours.tobytes() == np.concatenate(expected)[copied].tobytes() and np.isfinite(ours).all()
    assert stored(gpu, theirs) == bytes_of(memory)


@pytest.mark.parametrize(
    ("rows", "kernel", "place", "what"),
    [
        (3, "", 0, ""),
        (30, "", 0, ""),
        (3, "kda_conv", -1, "convolved"),
        (3, "kda_conv", -2, "kept tokens"),
        (3, "kda_conv", -3, "kept inputs"),
        (3, "kda_scan", -1, "result"),
        (3, "kda_scan", -2, "kept state"),
        (30, "kda_keep", -1, "kept tokens"),
        (30, "kda_keep", -2, "kept inputs"),
    ],
)
def test_a_pass_beside_the_cpu(gpu: backend.Backend, rows: int, kernel: str, place: int, what: str) -> None:
    """A fault is located kernel by kernel: the faulty one is named, even if the pass has overwritten its own inputs."""
    net = random_net(4, 32, 3)
    memory = filled(net, [(0, 14)], 1)
    theirs, weights = uploaded(gpu, memory), weights_of(gpu, net)

    def damage(device: SimulatedDevice, launched: Any, arguments: Any) -> None:
        if launched.kernel.name == kernel:
            wrong = device.at(arguments[place])
            # An element of what the pass stores: of the state of segment 1, of row 14 of a ring.
            row = {"kept state": 4 * 32 * 32, "kept tokens": 14 * net.width, "kept inputs": 14 * net.n_channels}
            wrong[4 * row.get(what, 0) + 12] ^= 1

    device: Any = gpu.device
    device.damage = damage
    notes: list[Check] = []
    config = SimpleNamespace(n_layer=0)
    of_cpu, of_gpu = (SimpleNamespace(ops=ops, drafter=None, config=config) for ops in (cpu, gpu))
    both = Lockstep(of_cpu, of_gpu, lambda site, check: notes.append(check))
    given: Inputs = inputs(net, rows)
    arrays = [*given.arrays, np.arange(14, 14 + rows, dtype=np.int32), np.zeros(rows, np.int32)]
    *pairs, positions, slots = (Pair(array, gpu.upload(array)) for array in arrays)
    arguments = join(net, weights), *pairs, join(memory, theirs), Batch[Any](positions, positions, slots)
    if kernel:
        with pytest.raises(Difference, match=f"the kernel {kernel}.* differs in the same way") as caught:
            both.kda(*arguments)
        assert caught.value.check.what == what
        return
    both.kda(*arguments)
    assert sorted(check.what for check in notes) == ["convolved", "kept inputs", "kept state", "kept tokens", "result"]
