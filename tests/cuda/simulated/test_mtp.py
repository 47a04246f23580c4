"""What multi-token prediction needs beside a layer, in the simulator: the bits of the mirror."""

from dataclasses import replace

import numpy as np
import pytest

from engine.arrays import Batch
from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cuda import backend
from engine.cuda.runtime.tensor import Tensor
from tests.batches import one_sequence
from tests.cuda.simulated.test_operations import F, activations, computed, cpu, gpu, same

assert gpu


@pytest.mark.parametrize(("rows", "length", "first"), [(1, 3, 5), (3, 5, 3), (3, 2, 0)])
def test_kept_rows_and_the_input_made_of_them(gpu: backend.Backend, rows: int, length: int, first: int) -> None:
    """Rows wrap around the ring; if there are more than it holds, the last ones stay; before position 0 there are zeros."""
    n, positions = 40, np.arange(first, first + rows, dtype=np.int32)
    before, x, e = activations(length, n)[None], activations(rows, n), activations(rows, n)[::-1].copy()
    norms = activations(2, n)
    ring = before.copy()
    cpu.keep_rows(ring, x, one_sequence(positions))
    expected = before.copy()
    for t, position in enumerate(positions):
        expected[0, position % length] = x[t]
    same(ring, expected)

    on_device, batch = gpu.upload(before), one_sequence(positions, gpu)
    a, b, weights = gpu.upload(x), gpu.upload(e), [gpu.upload(norm) for norm in norms]

    def both() -> Tensor:
        gpu.keep_rows(on_device, a, batch)
        return gpu.mtp_input(b, weights[0], on_device, weights[1], batch, 1e-6)

    (ours,) = computed(gpu, both)
    same(gpu.download(on_device), ring)
    theirs = cpu.mtp_input(e, norms[0], ring, norms[1], one_sequence(positions), 1e-6)
    same(ours, theirs)
    # Each half is a normalization of its own.
    h = np.stack([ring[0, (p - 1) % length] if p else np.zeros(n, F) for p in positions])
    same(theirs, np.hstack([cpu.rms_norm(e, norms[0], 1e-6), cpu.rms_norm(h, norms[1], 1e-6)]))


@pytest.mark.parametrize(("rows", "first"), [(1, 1), (3, 4)])
def test_a_row_beside_the_one_before(gpu: backend.Backend, rows: int, first: int) -> None:
    e, ring = activations(rows, 40), activations(5, 24)[None]
    positions = np.arange(first, first + rows, dtype=np.int32)
    a, b, batch = gpu.upload(e), gpu.upload(ring), one_sequence(positions, gpu)
    (ours,) = computed(gpu, lambda: gpu.beside(a, b, batch))
    theirs = cpu.beside(e, ring, one_sequence(positions))
    same(ours, theirs)
    same(theirs, np.hstack([e, ring[0][[(p - 1) % 5 for p in positions]]]))


@pytest.mark.parametrize("length", [6, 2])
def test_rows_of_several_sequences(gpu: backend.Backend, length: int) -> None:
    """Each row uses the ring of its sequence, as in a pass of that sequence alone.  The last row is the first one again; of
    more rows than a ring holds, the last ones stay, wherever the first ones are repeated."""
    n = 24
    runs = [(2, 7, 3), (0, 0, 1), (1, 4, 2)]  # slot, first position, rows
    at = np.concatenate([np.arange(first, first + count) for _, first, count in runs] + [[7]]).astype(np.int32)
    slots = np.repeat([slot for slot, _, _ in runs] + [2], [count for *_, count in runs] + [1]).astype(np.int32)
    x, e, norms = activations(7, n), activations(7, n)[::-1].copy(), activations(2, n)
    x[6], e[6] = x[0], e[0]
    before = activations(3 * length, n).reshape(3, length, n)
    ring, batch = before.copy(), Batch(at, at, slots, True)
    cpu.keep_rows(ring, x, batch)
    inputs, both = cpu.mtp_input(e, norms[0], ring, norms[1], batch, 1e-6), cpu.beside(e, ring, batch)
    alone, start = before.copy(), 0
    for _, _, count in runs:
        rows = slice(start, start + count)
        own = Batch(at[rows], at[rows], slots[rows])
        cpu.keep_rows(alone, x[rows], own)
        same(inputs[rows], cpu.mtp_input(e[rows], norms[0], alone, norms[1], own, 1e-6))
        same(both[rows], cpu.beside(e[rows], alone, own))
        start += count
    same(ring, alone)

    on_device, p = gpu.upload(before), Batch(gpu.upload(at), gpu.upload(at), gpu.upload(slots), True)
    a, b, weights = gpu.upload(x), gpu.upload(e), [gpu.upload(norm) for norm in norms]

    def all_of_them() -> list[Tensor]:
        gpu.keep_rows(on_device, a, p)
        return [gpu.mtp_input(b, weights[0], on_device, weights[1], p, 1e-6), gpu.beside(b, on_device, p)]

    ours = computed(gpu, all_of_them)
    same(gpu.download(on_device), ring)
    same(ours[0], inputs)
    same(ours[1], both)

    # Prompts that are read together have no copies of rows.
    again, prompts = gpu.upload(before), replace(p.part(slice(6)), runs=p.positions)

    def kept() -> Tensor:
        gpu.keep_rows(again, a[slice(6)], prompts)
        return gpu.beside(b[slice(6)], again, prompts)

    same(computed(gpu, kept)[0], both[:6])
    same(gpu.download(again), alone)


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_a_sequence_in_another_slot(gpu: backend.Backend, count: int) -> None:
    """In a pass of one sequence, only the slot of the first row is read."""
    at, slots, n = np.arange(2, 2 + count, dtype=np.int32), np.full(count, 1, np.int32), 24
    x, norms, before = activations(count, n), activations(2, n), activations(4, n).reshape(2, 2, n)
    ring, batch = before.copy(), Batch(at, at, slots)
    cpu.keep_rows(ring, x, batch)
    expected = cpu.mtp_input(x, norms[0], ring, norms[1], batch, 1e-6), cpu.beside(x, ring, batch)
    slots[1:] = 99
    on_device, p = gpu.upload(before), Batch(gpu.upload(at), gpu.upload(at), gpu.upload(slots))
    a, weights = gpu.upload(x), [gpu.upload(norm) for norm in norms]

    def all_of_them() -> list[Tensor]:
        gpu.keep_rows(on_device, a, p)
        return [gpu.mtp_input(a, weights[0], on_device, weights[1], p, 1e-6), gpu.beside(a, on_device, p)]

    ours = computed(gpu, all_of_them)
    same(gpu.download(on_device), ring)
    for mine, theirs in zip(ours, expected, strict=True):
        same(mine, theirs)


def test_a_plain_value(gpu: backend.Backend) -> None:
    x, norm = activations(2, 24), activations(1, 24)[0]
    a, w = gpu.upload(x), gpu.upload(norm)
    assert cpu.plain(x) is x and gpu.plain(a) is a
    (ours,) = computed(gpu, lambda: gpu.plain(gpu.rms_norm(a, w, 1e-6)))
    same(ours, cpu.rms_norm(x, norm, 1e-6))
    # The value to keep need not have been computed before.
    ring, positions = gpu.upload(np.zeros((1, 4, 24), F)), np.array([2, 3], np.int32)
    batch = one_sequence(positions, gpu)
    plan = gpu.record(lambda: gpu.keep_rows(ring, gpu.rms_norm(a, w, 1e-6), batch))
    gpu.start(plan)
    same(gpu.download(ring)[0, 2:], cpu.rms_norm(x, norm, 1e-6))
