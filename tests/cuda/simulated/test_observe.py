"""The masses of chunks, and places, in the simulator: the bits of the mirror."""

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cpu import observe as mirror
from engine.cuda import backend, observe
from engine.cuda.runtime.simulator import run
from tests.batches import one_sequence
from tests.cuda.simulated.test_operations import computed, cpu, gpu, same

assert gpu

CHUNKS = 45
"""More than a warp has lanes."""


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("n_head", "places"), [(3, [62, 63, 64]), (9, [2700, 2701]), (1, [1983])])
def test_masses(n_head: int, places: list[int], sinks: bool) -> None:
    """Chunks that a row does not see are not read; masses are added to those of earlier layers."""
    rng = np.random.default_rng(n_head)
    rows, at = len(places), np.array(places, np.int32)
    parts = rng.uniform(-20, 4, (rows, n_head, CHUNKS, 2)).astype(np.float32)
    parts[..., 1] = rng.uniform(1, 64, parts.shape[:3]).astype(np.float32)
    for t, place in enumerate(places):
        parts[t, :, place // 64 + 1 :] = np.nan
    sink = rng.normal(size=n_head).astype(np.float32) if sinks else np.zeros(0, np.float32)
    slots = np.array([1] + [77] * (rows - 1), np.int32)
    expected = rng.integers(0, 100, (3 * 64, CHUNKS + 2)).astype(np.int32)
    found, before = expected.copy(), expected.copy()
    mirror.observe(parts, at, np.ones(rows, np.int32), sink, expected, 0, rows)
    arguments = parts, at, slots, sink, found, CHUNKS, CHUNKS + 2
    run(observe.observe(n_head, sinks), (rows,), observe.THREADS, arguments)
    assert found.tobytes() == expected.tobytes()
    added = (found - before)[64:128].sum(1)
    assert (added[np.array(places) % 64] > 0).all() and (added > 0).sum() == rows
    # The squares of the parts of a softmax, which a single chunk has alone.
    assert (added <= (n_head << 17) + n_head * CHUNKS).all()
    assert sinks or places[0] >= 64 or added[places[0]] == n_head << 17


@pytest.mark.parametrize("rows", [1, 16])
def test_places(gpu: backend.Backend, rows: int) -> None:
    positions, dropped = np.arange(200, 200 + rows, dtype=np.int32), np.array([128, 0], np.int32)
    a, b, batch = gpu.upload(positions), gpu.upload(dropped), one_sequence(positions, gpu)
    (ours,) = computed(gpu, lambda: gpu.places(a, batch, b))
    same(ours, cpu.places(positions, one_sequence(positions), dropped))
    same(ours, positions - 128)
