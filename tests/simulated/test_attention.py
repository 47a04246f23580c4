"""engine/cuda/attention.py in the simulator: the bits of engine/cpu/attention.py."""

from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cache.kv import CHUNK, LayerShape
from engine.cpu import attention as mirror
from engine.cuda import attention
from engine.cuda.simulator import run
from engine.errors import DeviceError

SCALE = np.float32(0.3)


def filled(positions: int, shape: LayerShape, rows: int, half: bool, rng: np.random.Generator) -> tuple[Any, Any]:
    """Rings that hold ``positions`` positions; lanes never written are not numbers."""
    chunks = shape.chunks(4096, rows)
    dtype = np.uint16 if half else np.float32
    keys = np.full((shape.n_head_kv, chunks, shape.d_k, CHUNK), 0x7E01 if half else np.nan, dtype)
    values = np.full((shape.n_head_kv, chunks, CHUNK, shape.d_v), 0x7E01 if half else np.nan, dtype)
    first = max(0, positions - chunks * CHUNK)
    at = np.arange(first, positions, dtype=np.int32)
    k, v = (rng.normal(size=(at.size, shape.n_head_kv, d)).astype(np.float32) for d in (shape.d_k, shape.d_v))
    v[rng.random(v.shape) < 0.1] = -0.0
    mirror.append(k, v, at, half, keys, values)
    return keys, values


def agree(
    positions: list[int],
    n_head: int,
    n_head_kv: int,
    d_k: int,
    d_v: int,
    *,
    half: bool = True,
    window: int = 0,
    splits: int = 0,
    tasks: int = 0,
    early: bool = False,
    seed: int | None = None,
) -> None:
    """Attention of rows at ``positions`` over everything up to the last of them."""
    rng = np.random.default_rng(sum(positions) + n_head + d_k)
    rows, end = len(positions), max(positions) + 1
    keys, values = filled(end, LayerShape(n_head_kv, d_k, d_v, window), rows, half, rng)
    at = np.array(positions, np.int32)
    q = rng.normal(size=(rows, n_head, d_k)).astype(np.float32) * np.float32(2)
    expected = np.empty((rows, n_head, d_v), np.float32)
    mirror.attend(q, keys, values, at, SCALE, window, half, 1, expected)
    assert np.isfinite(expected).all()

    n_slots = attention.slots(keys.shape[1] * CHUNK if window else end, window)
    plan = attention.geometry(rows, n_head, n_head_kv, d_k, d_v, half, n_slots, 3, early, tasks)
    grid = (splits or plan.attend_grid[0], *plan.attend_grid[1:])
    weights, sums = (np.full(n, np.nan, np.float32) for n in attention.scratch(rows, n_head, d_v, n_slots))
    out = np.full_like(expected, np.nan)
    chunks = keys.shape[1]
    arguments = [q, keys, values, at, weights, sums, rows, chunks, n_slots, window, SCALE]
    run(plan.attend, grid, plan.attend_block, arguments, seed=seed)
    run(plan.combine, plan.combine_grid, plan.combine_block, [weights, sums, at, out, n_slots, window], seed=seed)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("position", [0, 5, 63, 64, 130])
def test_decode(position: int, half: bool) -> None:
    agree([position], 1, 1, 4, 2, half=half, early=half)


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
def test_groups(group: int) -> None:
    agree([70], 2 * group, 2, 4, 4, splits=1) if group == 3 else agree([3], group, 1, 4, 4)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(("d_k", "d_v"), [(2, 2), (6, 10), (80, 34), (4, 66)])
def test_sizes_of_heads(d_k: int, d_v: int, half: bool) -> None:
    agree([66], 1, 1, d_k, d_v, half=half)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("positions", [[63, 64], [0, 1, 2], [127, 128, 129]])
def test_rows_on_both_sides_of_a_border(positions: list[int], early: bool) -> None:
    agree(positions, 3, 1, 4, 4, early=early, splits=2)


@pytest.mark.parametrize("tasks", [1, 2, 4, 8])
def test_tasks_of_a_block(tasks: int) -> None:
    agree([63, 64], 5, 1, 4, 4, tasks=tasks)


@pytest.mark.parametrize("window", [1, 3, 64, 70])
@pytest.mark.parametrize("positions", [[2, 3], [191, 192]])
def test_windows_and_rings(window: int, positions: list[int]) -> None:
    """The ring has wrapped where the positions are larger than the window."""
    agree(positions, 1, 1, 4, 4, window=window, early=True)


@pytest.mark.parametrize("window", [0, 1, 2, 3, 32, 63, 64, 65, 66, 128, 500])
def test_slots_are_as_many_as_a_row_can_see(window: int) -> None:
    for rows in (1, 16):
        capacity = LayerShape(1, 2, 2, window).chunks(1000, rows) * CHUNK
        seen = [p // CHUNK - (max(0, p - window + 1) if window else 0) // CHUNK + 1 for p in range(1000)]
        assert attention.slots(capacity, window) == max(seen)


def test_positions_that_do_not_follow_one_another() -> None:
    agree([130, 7, 64], 2, 1, 4, 4, early=True)


def test_more_chunks_than_are_joined_at_once() -> None:
    agree([attention.TILE * CHUNK + 10], 1, 1, 2, 2, splits=20)


@pytest.mark.parametrize("half", [True, False])
def test_heads_too_large_for_shared_memory(half: bool) -> None:
    agree([1], 1, 1, 130, 132, half=half)


def test_the_order_of_threads_does_not_show() -> None:
    for seed in range(2):
        agree([64, 65], 2, 1, 4, 4, seed=seed, splits=1)


def test_heads_that_the_kernels_cannot_take() -> None:
    for d_k, d_v in ((258, 64), (64, 512), (63, 64)):
        with pytest.raises(DeviceError, match="takes heads of an even size up to 256"):
            attention.geometry(1, 2, 1, d_k, d_v, True, 8, 100, False)
