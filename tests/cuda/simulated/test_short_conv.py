"""engine/cuda/short_conv.py in the simulator: the bits of engine/cpu/short_conv.py."""

from typing import Any

import numpy as np
import pytest

from engine.arrays import Batch
from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from dataclasses import replace
from types import SimpleNamespace

from engine.cache.short_conv import ShortConvCache, ShortConvCacheSpec
from engine.cache.types import F32
from engine.cuda import backend
from engine.verify.check import Check, Difference
from engine.verify.lockstep import Lockstep, Pair, join
from tests.batches import one_sequence
from tests.cuda.simulated.device import SimulatedDevice
from tests.cuda.simulated.test_delta_net import computed, cpu, gpu, rows_of
from tests.pages import layer_of, no_pages
from tests.tiers import few

F = np.float32
assert gpu


def filled(
    n: int, taps: int, rewind: int, places: list[tuple[int, int]], n_sequences: int, rng: np.random.Generator
) -> ShortConvCache:
    """A memory in which passes of sequences at places (slot, position) find random numbers, and NaN elsewhere."""
    spec = ShortConvCacheSpec(n, taps, rewind)
    memory: ShortConvCache = layer_of(
        spec, 0, 64, F32, lambda size, dtype: np.full(size, np.nan, dtype), n_sequences=n_sequences
    )
    for slot, position in places:
        for rows in memory.needed(slot, position, no_pages):
            for part in rows.runs():
                rows.ring[part] = rng.standard_normal(rows.ring[part].shape)
    return memory


@pytest.mark.parametrize(
    ("n", "taps", "passes", "start"),
    few(
        [
            # Passes that the ring has no room for, which go round it; a rollback; a step.
            (40, 3, [19, -9, 1, 9, 24, 3], 0),
            (300, 4, [1, 2], 2),  # more elements than a block has threads; before position 0 there is nothing
            (33, 2, [5, -1, 1], 100),
        ]
    ),
)
def test_passes(gpu: backend.Backend, n: int, taps: int, passes: list[int], start: int) -> None:
    """One pass after another, on both; a negative number rolls that many tokens back."""
    rng = np.random.default_rng(n)
    memory = filled(n, taps, 9, [(0, start)], 1, rng)
    weight = rng.standard_normal((n, taps)).astype(F)
    theirs = replace(memory, inputs=gpu.upload(memory.inputs))
    a = gpu.upload(weight)
    for rows in passes:
        if rows < 0:
            start += rows
            continue
        positions, bcx = np.arange(start, start + rows, dtype=np.int32), rng.standard_normal((rows, 3 * n)).astype(F)
        given, batch = gpu.upload(bcx), one_sequence(positions, gpu)
        ours = computed(gpu, lambda given=given, batch=batch: gpu.short_conv(a, given, theirs, batch))
        assert ours.tobytes() == cpu.short_conv(weight, bcx, memory, one_sequence(positions)).tobytes()
        assert gpu.download(theirs.inputs).tobytes() == memory.inputs.tobytes() and np.isfinite(ours).all()
        start += rows


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
    rng = np.random.default_rng(6)
    memory = filled(40, 4, 1, [run[:2] for run in runs], 4, rng)
    theirs = replace(memory, inputs=gpu.upload(memory.inputs))
    sequences, positions = rows_of(runs)
    weight, bcx = (rng.standard_normal(shape).astype(F) for shape in ((40, 4), (len(positions), 120)))
    expected, first = [], 0
    for _, _, rows in runs:
        part = slice(first, first + rows)
        batch = Batch(positions[part], positions[part], sequences[part])
        expected.append(cpu.short_conv(weight, bcx[part], memory, batch))
        first += rows
    places, slots = gpu.upload(positions[copied]), gpu.upload(sequences[copied])
    a, given, mixed = gpu.upload(weight), gpu.upload(bcx[copied]), Batch(places, places, slots, True)
    ours = computed(gpu, lambda: gpu.short_conv(a, given, theirs, mixed))
    assert ours.tobytes() == np.concatenate(expected)[copied].tobytes() and np.isfinite(ours).all()
    assert gpu.download(theirs.inputs).tobytes() == memory.inputs.tobytes()


@pytest.mark.parametrize(
    ("rows", "kernel", "place", "what"),
    [
        (3, "", 0, ""),
        (30, "", 0, ""),
        (3, "short_conv", -1, "result"),
        (3, "short_conv", -2, "kept inputs"),
        (30, "short_conv", -1, "result"),
        (30, "keep_inputs", -1, "kept inputs"),
    ],
)
def test_a_pass_beside_the_cpu(gpu: backend.Backend, rows: int, kernel: str, place: int, what: str) -> None:
    """A fault is located kernel by kernel: the faulty one is named, even if the pass has overwritten its own inputs."""
    rng = np.random.default_rng(4)
    memory, weight = filled(40, 3, 1, [(0, 18)], 1, rng), rng.standard_normal((40, 3)).astype(F)

    def damage(device: SimulatedDevice, launched: Any, arguments: Any) -> None:
        if launched.kernel.name == kernel:
            device.at(arguments[place])[12] ^= 1

    device: Any = gpu.device
    device.damage = damage
    notes: list[Check] = []
    config = SimpleNamespace(n_layer=0)
    of_cpu, of_gpu = (SimpleNamespace(ops=ops, drafter=None, config=config) for ops in (cpu, gpu))
    both = Lockstep(of_cpu, of_gpu, lambda site, check: notes.append(check))
    arrays = [weight, rng.standard_normal((rows, 120)).astype(F)]
    arrays += [np.arange(18, 18 + rows, dtype=np.int32), np.zeros(rows, np.int32)]
    a, bcx, positions, slots = (Pair(array, gpu.upload(array)) for array in arrays)
    theirs = replace(memory, inputs=gpu.upload(memory.inputs))
    given = a, bcx, join(memory, theirs), Batch[Any](positions, positions, slots)
    if kernel:
        with pytest.raises(Difference, match=f"the kernel {kernel}.* differs in the same way") as caught:
            both.short_conv(*given)
        assert caught.value.check.what == what
        return
    both.short_conv(*given)
    assert sorted(check.what for check in notes) == ["kept inputs", "result"]
