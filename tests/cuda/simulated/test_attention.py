"""engine/cuda/attention/attend.py and combine.py in the simulator: the bits of engine/cpu/attention.py, and of its gates."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.arrays import Batch
from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cache.kv import AttentionCache, AttentionCacheSpec
from engine.cache.types import CHUNK, F16, F32, GROUP, Types, cache_type
from engine.cache.window import frames, longest
from engine.cpu import attention as mirror
from engine.cpu import glu, integer_cache
from engine.cpu.products.quantize import quantize_rows
from engine.cuda import backend
from engine.cuda.attention import attend as attention
from engine.cuda.attention import combine, integer_steps, join
from engine.cuda.attention import direct as direct_attention
from engine.cuda.products import quantize
from engine.cuda.runtime.simulator import run
from engine.errors import DeviceError
from engine.ops.heads import Heads
from engine.verify.layout import activations
from tests.batches import one_sequence
from tests.cuda.simulated.device import SimulatedDevice
from tests.cuda.simulated.test_direct_attention import NO_SINKS, ends_of, filled
from tests.mirror import Mirror as CPU
from tests.pages import layer_of
from tests.tiers import few

SCALE = np.float32(0.3)


@contextmanager
def appending(append: Callable[[bool], None]) -> Iterator[None]:
    """Call ``append(False)`` where a thread begins, and ``append(True)`` where it waits for its inputs."""
    begin, wait = attention.let_next_begin, attention.wait_for_inputs

    def begun() -> None:
        append(False)
        begin()

    def waited() -> None:
        wait()
        append(True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "let_next_begin", begun)
        patch.setattr(attention, "wait_for_inputs", waited)
        yield


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
    seed: int | None = 1,
    unseen: bool = False,
    gated: bool = False,
    sinks: np.ndarray = NO_SINKS,
    group: int = GROUP,
    slots: list[int] | None = None,
    cap: float = 0.0,
) -> None:
    """Attention of rows at ``positions`` over everything up to the last of them; ``unseen``: the kernel finds the cache as it
    was before the rows, until it waits for its inputs; ``group``: chunks of a group; ``slots``: of the sequences of the rows
    in a mixed pass."""
    rng = np.random.default_rng(sum(positions) + n_head + d_k)
    rows, mixed = len(positions), slots is not None
    ends, of_rows = ends_of(positions, slots or [1] * rows), np.array(slots or [1] * rows, np.int32)
    cache = filled(ends, AttentionCacheSpec(n_head_kv, d_k, d_v, longest(window)), rows, F16 if half else F32, rng)
    keys, values = cache.keys, cache.values
    at = np.array(positions, np.int32)
    q = rng.normal(size=(rows, n_head, d_k)).astype(np.float32) * np.float32(2)
    expected = np.empty((rows, n_head, d_v), np.float32)
    bits = 16 if half else 32
    given = (memory.reshape(*memory.shape[:2], -1).view(np.uint32) for memory in (keys, values))
    none = np.empty((rows, n_head, 0), np.int8), np.empty((rows, n_head, 0), np.float32)
    read = *given, at, of_rows, cache.table
    law = mirror.attend(bits, bits, group, cap)
    law(q, *none, *read, SCALE, window, sinks, mirror.NO_PARTS, expected, 0, rows * n_head)
    assert np.isfinite(expected).all()
    gate = rng.normal(size=(rows, n_head, 2, d_v)).astype(np.float32) * np.float32(20) if gated else None
    if gate is not None:
        gate[:, :, 0] = np.nan  # the queries
        glu.sigmoid_gate(expected.reshape(-1, d_v), gate.reshape(-1, 2, d_v), 0, rows * n_head)

    n_partials = attention.partials(max(ends), window)
    options: dict[str, Any] = {"sinks": sinks.size > 0, "together": group, "mixed": mixed, "cap": cap}
    plan = attention.geometry(rows, n_head, n_head_kv, d_k, d_v, half, n_partials, 3, early, tasks, gated, **options)
    grid = (*plan.attend_grid[:2], splits or plan.attend_grid[2])
    weights, sums = (np.full(n, np.nan, np.float32) for n in attention.scratch(rows, n_head, d_v, n_partials))
    out = np.full_like(expected, np.nan)
    page, lane = cache.table[of_rows, at // CHUNK], at % CHUNK
    new_keys, new_values = keys[:, page, :, lane], values[:, page, lane]
    new = np.concatenate([new_keys, new_values.swapaxes(0, 1)], axis=2)

    def append(exists: bool) -> None:
        keys[:, page, :, lane], values[:, page, lane] = (new_keys, new_values) if exists else (0x7E01, 0x7E01)

    words = new.view(f"u{new.itemsize}").astype(np.uint32)
    arguments = [
        q,
        words,
        keys,
        values,
        at,
        of_rows,
        cache.table,
        weights,
        sums,
        rows,
        cache.pages,
        cache.table.shape[1],
    ]
    with appending(append) if unseen else nullcontext():
        run(plan.attend, grid, plan.attend_block, [*arguments, n_partials, window, SCALE], seed=seed)
    arguments = [weights, sums, at, gate, sinks, out, n_partials, window]
    run(plan.combine, plan.combine_grid, plan.combine_block, arguments, seed=seed)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.covering(1)
@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("position", [0, 63, 130])
def test_decode(position: int, half: bool) -> None:
    agree([position], 1, 1, 4, 2, half=half, early=half)


@pytest.mark.parametrize("group", [1, 3, 8])
def test_groups(group: int) -> None:
    agree([70], 2 * group, 2, 4, 4, splits=1) if group == 3 else agree([3], group, 1, 4, 4)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize(("d_k", "d_v"), [(2, 2), (80, 34)])
def test_sizes_of_heads(d_k: int, d_v: int, half: bool) -> None:
    agree([66], 1, 1, d_k, d_v, half=half)


@pytest.mark.covering(1)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("positions", [[63, 64], [0, 1, 2], [127, 128, 129]])
def test_rows_on_both_sides_of_a_border(positions: list[int], early: bool) -> None:
    agree(positions, 3, 1, 4, 4, early=early, splits=2)


@pytest.mark.thorough
@pytest.mark.parametrize(("group", "d"), [(12, 96), (16, 64), (4, 80), (5, 128)])
def test_heads_of_current_models(group: int, d: int) -> None:
    agree([130, 131], group, 1, d, d, early=True, window=128)


@pytest.mark.parametrize("tasks", [1, 8])
def test_tasks_of_a_block(tasks: int) -> None:
    agree([63, 64], 5, 1, 4, 4, tasks=tasks)


@pytest.mark.parametrize("positions", few([[130], [70, 3, 6], [*range(125, 135)]], 2))
def test_new_positions_in_a_chunk_that_was_there_before(positions: list[int]) -> None:
    """A block's first chunk is fetched while it is being appended to; new positions are added afterwards."""
    d_k, d_v = (80, 64) if len(positions) == 1 else (4, 6)
    agree(positions, 2, 2, d_k, d_v, early=True, splits=3, unseen=True)


@pytest.mark.parametrize(
    ("half", "early", "tasks", "window"), few([(True, True, 0, 0), (False, True, 2, 0), (True, False, 4, 70)])
)
def test_rows_of_several_sequences(half: bool, early: bool, tasks: int, window: int) -> None:
    """Rows that see other pages than their neighbours, one of them twice; the pairs of a row in one block, or in two."""
    agree(
        [129, 263, 264, 5, 129], 3, 1, 4, 4, half=half, early=early, tasks=tasks, window=window, slots=[2, 0, 0, 1, 2]
    )


@pytest.mark.parametrize("positions", few([[62, 63, 64, 9, 65], [128, 129, 130, 3, 131]]))
def test_what_other_rows_of_a_sequence_append(positions: list[int]) -> None:
    """A block that has one row of several finds what the others append to the chunk, and to the one before."""
    agree(positions, 2, 1, 4, 6, early=True, unseen=True, splits=3, slots=[0, 0, 0, 1, 0])


@pytest.mark.parametrize("window", [1, 70])
@pytest.mark.parametrize("positions", [[2, 3], [191, 192]])
def test_windows(window: int, positions: list[int]) -> None:
    """Pages have been used again where the positions are larger than the window."""
    agree(positions, 1, 1, 4, 4, window=window, early=True)


@pytest.mark.parametrize(("positions", "window"), few([([159, 160], -32), ([141, 138, 127, 130], -64)]))
def test_frames(positions: list[int], window: int) -> None:
    """Rows of two frames, which begin in the middle of a chunk, or with one."""
    agree(positions, 1, 1, 4, 4, window=window, early=True)


@pytest.mark.parametrize("window", [0, 1, 2, 3, 32, 63, 64, 65, 66, 128, 500])
def test_partials_are_as_many_as_a_row_can_see(window: int) -> None:
    seen = [p // CHUNK - (max(0, p - window + 1) if window else 0) // CHUNK + 1 for p in range(1000)]
    assert attention.partials(1000, window) == max(seen)


@pytest.mark.parametrize("size", [1, 2, 32, 64, 128, 512, 1024])
def test_partials_of_frames(size: int) -> None:
    seen = [p // CHUNK - p // size * size // CHUNK + 1 for p in range(1000)]
    assert attention.partials(1000, frames(size)) == max(seen)


def test_positions_that_do_not_follow_one_another() -> None:
    agree([130, 7, 64], 2, 1, 4, 4, early=True)


def test_more_groups_than_are_joined_at_once() -> None:
    agree([2 * combine.TILE * CHUNK + 10], 1, 1, 2, 2, splits=20, group=2)


@pytest.mark.parametrize(
    ("positions", "d_v", "window", "half", "group"),
    few(
        [
            ([330, 331, 70, 10], 4, 0, False, 2),
            ([400, 450], 34, 150, True, 2),
            ([700], 2, 0, False, 4),
            ([640, 1600], 2, 1000, False, GROUP),
        ],
        2,
    ),
)
def test_groups_of_chunks(positions: list[int], d_v: int, window: int, half: bool, group: int) -> None:
    """Rows that see different numbers of groups, and windows that begin in the middle of one."""
    sinks = np.array([-3e38, 0.5], np.float32)
    agree(positions, 2, 1, 4, d_v, window=window, half=half, group=group, sinks=sinks, gated=half)


@pytest.mark.parametrize(("positions", "d_v"), [([3], 34), ([64, 65], 4)])
def test_gated_heads(positions: list[int], d_v: int) -> None:
    agree(positions, 2, 1, d_v, d_v, early=True, gated=True)


@pytest.mark.parametrize(
    ("positions", "window", "gated"), few([([70, 130], 0, True), ([0], 0, False), ([200], 70, False)], 2)
)
def test_sinks(positions: list[int], window: int, gated: bool) -> None:
    """Much smaller than every score, much larger, and similar."""
    sinks = np.array([-3e38, 3e38, 0.5, -0.0], np.float32)
    agree(positions, 4, 2, 4, 34, window=window, gated=gated, early=True, sinks=sinks)


@pytest.mark.parametrize("half", few([True, False]))
def test_capped_scores(half: bool) -> None:
    agree([70, 130], 2, 1, 32, 32, window=70, half=half, early=True, cap=1.5)


@pytest.mark.parametrize("half", few([True, False]))
def test_heads_too_large_for_shared_memory(half: bool) -> None:
    agree([1], 1, 1, 130, 132, half=half)


def test_the_order_of_threads_does_not_show() -> None:
    for seed in range(2):
        agree([64, 65], 2, 1, 4, 4, seed=seed, splits=1)


# --- the result as int8 ----------------------------------------------------------------------------------------


def joined(weights: np.ndarray, sums: np.ndarray, first: int, group: int, sink: float | None) -> np.ndarray:
    """The chunks of a head, from number ``first`` on, joined as the mirror joins them: weights [chunks, 2], sums [chunks,
    d_v]."""
    out, top, total = np.zeros(sums.shape[1], np.float32), np.float32(-np.inf), np.float32(0)
    numbers = first + np.arange(len(weights))
    for number in np.unique(numbers // group):
        inner, m, mass = np.zeros_like(out), np.float32(-np.inf), np.float32(0)
        for i in np.flatnonzero(numbers // group == number):
            m, mass = map(np.float32, mirror.join(m, mass, *weights[i], sums[i], inner))
        top, total = map(np.float32, mirror.join(top, total, m, mass, inner, out))
    if sink is not None:
        total = np.float32(mirror.join_sink(top, total, sink, out))
    return out / total


@pytest.mark.parametrize(
    ("positions", "n_head", "d_v", "unit", "window", "gated", "rotated", "sunk", "group"),
    few(
        [
            ([70 * CHUNK], 3, 96, 32, 0, False, 0, True, 8),
            ([40 * CHUNK, 41 * CHUNK - 1], 1, 32, 32, 37 * CHUNK, False, 0, True, 8),
            ([5, 64, 2080], 2, 128, 256, 0, False, 32, True, 8),
            ([1000], 1, 512, 256, 70, True, 0, False, 8),
            ([300, 301], 17, 32, 32, 3, True, 0, True, 2),
            ([130], 8, 32, 256, 0, True, 0, False, 8),
            ([0], 4, 64, 32, 0, True, 32, True, 8),
            ([100, 600], 4, 128, 256, 0, True, 128, True, 8),
            ([50 * CHUNK, 1000], 1, 32, 32, 39 * CHUNK, False, 0, False, 2),
            ([2047, 2048, 2049, 9, 10, 11, 12, 13, 14, 4159], 1, 32, 32, 0, False, 0, False, 4),
            ([90], 2, 64, 32, 0, False, 64, False, 8),
        ],
        5,
    ),
)
def test_chunks_joined_and_quantized(
    positions: list[int],
    n_head: int,
    d_v: int,
    unit: int,
    window: int,
    gated: bool,
    rotated: int,
    sunk: bool,
    group: int,
) -> None:
    """Joined chunks are what the mirror and ``combine`` give, quantized by the CPU; one to three times 32 chunks, in one to
    three blocks."""
    rng = np.random.default_rng(sum(positions))
    rows, columns, at = len(positions), n_head * d_v, np.array(positions, np.int32)
    n_partials = attention.partials(max(positions) + 1, window)
    sizes = rows, n_head, 1, 2, min(d_v, 256), True, n_partials, 3, True
    plan = attention.geometry(*sizes, gated=gated, sinks=sunk, together=group)

    def kernel(gated: bool, rotated: int) -> Any:
        return combine.combine(d_v, True, gated, rotated, sunk, group)

    plan = replace(plan, d_v=d_v, combine=kernel(gated, 0), combine_grid=(n_head, rows, d_v // 32))
    assert plan.quantizes
    weights = rng.normal(size=(rows, n_head, n_partials, 2)).astype(np.float32)
    weights[..., 1] = np.exp(weights[..., 1])
    weights[:, :, ::3, 0] = 0.25  # equally large in some chunks
    sums = rng.normal(size=(rows, n_head, n_partials, d_v)).astype(np.float32)
    sums[rng.random(sums.shape) < 0.1] = -0.0
    sums[..., ::7] = -0.0
    sums[0, 0] *= np.float32(2.0**-110)  # a head, in one case a unit, that counts as zero
    firsts = [(max(0, position - window + 1) if window else 0) // CHUNK for position in positions]
    seen = [position // CHUNK - first + 1 for position, first in zip(positions, firsts, strict=True)]
    for row in range(rows):
        weights[row, :, seen[row] :], sums[row, :, seen[row] :] = np.nan, np.nan
    gate = rng.normal(size=(rows, n_head, 2, d_v)).astype(np.float32) * np.float32(5) if gated else None
    out = np.full((rows, columns), np.nan, np.float32)
    sinks = rng.normal(size=n_head).astype(np.float32) * np.float32(3) if sunk else None
    arguments = [weights, sums, at, gate, sinks, out, n_partials, window]
    run(kernel(False, 0), plan.combine_grid, plan.combine_block, arguments)
    for row, (first, n) in enumerate(zip(firsts, seen, strict=True)):
        heads = [
            joined(weights[row, h, :n], sums[row, h, :n], first, group, sinks[h] if sinks is not None else None)
            for h in range(n_head)
        ]
        assert out[row].tobytes() == np.concatenate(heads).tobytes()
    if rotated:
        # The CPU rotates the result back before the gates, if there are any.
        integer_cache.rotate_rows(out.reshape(-1, d_v), rotated, 0, rows * n_head)
        if gate is not None:
            glu.sigmoid_gate(out.reshape(-1, d_v), gate.reshape(-1, 2, d_v), 0, rows * n_head)
        expected, plan = out.copy(), replace(plan, rotated=rotated, combine=kernel(gated, rotated))
        plan = replace(plan, combine_grid=(n_head, rows, d_v // rotated), combine_block=combine.threads_of(rotated))
    if rotated or gated:
        run(plan.combine, plan.combine_grid, plan.combine_block, arguments)
    assert np.isfinite(out).all() and (not rotated or out.tobytes() == expected.tobytes())

    words = quantize.activation_words(unit, rows, columns)
    q, d, totals = (np.zeros(n, dtype) for n, dtype in zip(words, (np.uint32, np.float32, np.uint32), strict=True))
    grid = (-(-columns // quantize.RUN), rows)
    arguments = [weights, sums, at, gate, sinks, q, d, totals, columns, n_partials, window, 0]
    run(plan.quantized(unit), grid, quantize.RUN, arguments, seed=1)
    # The same by two kernels.
    n_groups = join.group_partials(n_partials, group)
    weights_of_groups, sums_of_groups = ((rows, n_head, n_groups, n) for n in (2, d_v))
    inner = np.full(weights_of_groups, np.nan, np.float32), np.full(sums_of_groups, np.nan, np.float32)
    arguments = [weights, sums, at, *inner, n_partials, n_groups, window]
    few_blocks = (*join.grid(n_partials, n_head, rows, group)[:2], 1 + rows % 2)
    run(join.join_chunks(d_v, True, group), few_blocks, d_v, arguments, seed=1)
    in_two = [np.zeros_like(x) for x in (q, d, totals)]
    arguments = [*inner, at, gate, sinks, *in_two, columns, n_groups, window, 0]
    kernel_of_groups = combine.combine_quantize(unit, d_v, True, gated, rotated, sunk, group, True)
    run(kernel_of_groups, grid, quantize.RUN, arguments, seed=1)
    assert [x.tobytes() for x in in_two] == [x.tobytes() for x in (q, d, totals)]
    law = np.empty((rows, columns), np.int8), np.empty((rows, columns // unit), np.float32)
    s = np.empty((rows, columns // 16), np.int16)
    quantize_rows(out, unit, *law, s, 0, law[1].size)
    wide = s.reshape(rows, -1, 2).sum(2, dtype=np.int32)
    found = activations(unit, rows, columns, q, d, totals)
    assert found[0].tobytes() == law[0].tobytes() and found[1].tobytes() == law[1].tobytes()
    if unit == 256:
        both = found[2].reshape(rows, -1, 24)
        assert np.array_equal(both[..., :16], s.reshape(rows, -1, 16))
        assert np.array_equal(both[..., 16:], wide.reshape(rows, -1, 8))
    else:
        assert np.array_equal(found[2], wide)

    # Behind other rows of a wide pass.
    first = 17
    layout = quantize.layout_of(unit, first + rows)
    behind = [np.zeros(n, np.uint32) for n in quantize.activation_words(unit, first + rows, columns, layout)]
    parts: list[Any] = [weights, sums, at, gate, sinks, *behind, columns]
    run(plan.quantized(unit, layout), grid, quantize.RUN, [*parts, n_partials, window, first], seed=1)
    last = [x[first:] for x in activations(unit, first + rows, columns, *behind)]
    assert last[0].tobytes() == law[0].tobytes() and last[1].tobytes() == law[1].tobytes()
    assert np.array_equal(last[2], s if unit == 256 else wide)


def test_what_is_not_quantized_at_once() -> None:
    """Heads for which the elements of a warp would belong to two, and many chunks of a single row."""
    assert not attention.geometry(1, 2, 1, 80, 80, True, 8, 3, True).quantizes
    for rows, n_partials, at_once in ((1, 128, True), (1, 129, False), (2, 129, True)):
        assert attention.geometry(rows, 2, 1, 64, 64, True, n_partials, 3, True).quantizes == at_once
        sizes = rows, 2, 1, 64, 64, "q8_0", "q8_0", n_partials, 3, True
        assert direct_attention.geometry(*sizes).quantizes == at_once
        plan = integer_steps.geometry(rows, 2, 1, 64, 64, "i8", n_partials, 3, 0, True)
        assert plan.quantizes and (plan.join is not None) == (n_partials > 128) == plan.quantized(32).constants[-1]


@pytest.mark.parametrize(
    ("partials", "group", "expected"), [(1, 8, 1), (2, 8, 2), (9, 8, 2), (10, 8, 3), (64, 8, 9), (3, 2, 2)]
)
def test_partials_of_groups_are_as_many_as_a_row_can_see(partials: int, group: int, expected: int) -> None:
    seen = [(first + partials - 1) // group - first // group + 1 for first in range(2 * group)]
    assert join.group_partials(partials, group) == max(seen) == expected


@pytest.mark.parametrize(
    ("rows", "n_partials", "expected"),
    [(17, 4, 16), (96, 4, 48), (128, 4, 128), (128, 33, 32), (96, 33, 32), (128, 64, 16), (1000, 4, 250)],
)
def test_rows_of_a_launch(rows: int, n_partials: int, expected: int) -> None:
    """As many as the memory for chunks suffices for, in parts of the same size; 16 rows of one sequence."""
    assert attention.rows_at_once(rows, 32, 128, n_partials, True) == expected
    assert attention.rows_at_once(rows, 32, 128, n_partials, False) == 16


@pytest.mark.parametrize("group", [3, 12])
def test_mixed_passes_use_the_kernels_of_one_row(group: int) -> None:
    """Each row has its own blocks, no more in all than are resident at once, or one for all chunks."""

    def plans(rows: int, mixed: bool) -> list[attention.Geometry]:
        sizes, options = (rows, 2 * group, 2, 64, 64), {"early": True, "mixed": mixed}
        return [
            attention.geometry(*sizes, True, 1000, 132, **options),
            direct_attention.geometry(*sizes, "q8_0", "q8_0", 1000, 132, **options),
            integer_steps.geometry(*sizes, "i8", 1000, 132, 227 << 10, **options),
        ]

    for one, few_rows, most in zip(plans(1, False), plans(3, True), plans(16, True), strict=True):
        assert one.attend == few_rows.attend == most.attend
        for plan, rows in ((few_rows, 3), (most, 16)):
            assert plan.attend_grid[:2] == (2, rows * one.attend_grid[1]) and plan.combine_grid[1] == rows
            assert 1 <= plan.attend_grid[2] <= -(-one.attend_grid[2] // rows)


def test_heads_that_the_kernels_cannot_take() -> None:
    for d_k, d_v in ((258, 64), (64, 512), (63, 64)):
        with pytest.raises(DeviceError, match="takes heads of an even size up to 256"):
            attention.geometry(1, 2, 1, d_k, d_v, True, 8, 100, False)


# --- through the backend ---------------------------------------------------------------------------------------


def same_operations(
    monkeypatch: pytest.MonkeyPatch,
    types: Types,
    heads: Heads,
    *,
    n_rot: int = 0,
    window: int = 0,
    one: bool = False,
    past: int = 0,
    rows: int = 2,
) -> None:
    """Keys and values of earlier positions by ``remember``, then attention of ``rows`` rows, then queries at a later
    position, or within ``past``, over the stored ones; ``one``: values are the keys; n_rot -1: nothing is rotated."""
    monkeypatch.setattr(backend, "Device", SimulatedDevice)
    gpu, cpu, rng = backend.Backend(), CPU(1), np.random.default_rng(0)
    start, d, n_ctx = 2, heads.d_k, rows + 6
    cos, sin = np.cos(angles := rng.uniform(-3, 3, (n_ctx, abs(n_rot or d) // 2))), np.sin(angles)
    table = None if n_rot < 0 else np.stack([cos, sin], axis=1).astype(np.float32)
    shape = AttentionCacheSpec(heads.n_head_kv, d, heads.d_v, window)
    caches = [layer_of(shape, n_ctx, max(rows, 16), types, ops.zeros, ops.store) for ops in (cpu, gpu)]
    positions = np.arange(start + rows + 1, dtype=np.int32)
    q = rng.normal(size=(rows, heads.n_head * d * (2 if heads.gated else 1))).astype(np.float32)
    k, v = (rng.normal(size=(positions.size, heads.n_head_kv * w)).astype(np.float32) for w in (d, heads.d_v))

    def both(ops: Any, cache: AttentionCache, heads: Heads, *arrays: Any) -> Any:
        q, k, v, batch, angles = arrays
        ops.remember(heads, k[:start], k[:start] if one else v[:start], cache, batch.part(slice(start)), angles)
        of_rows, last_rows = slice(start, start + rows), slice(batch.rows - rows, batch.rows)
        k, v = k[of_rows], v[of_rows]
        found = [ops.attention(heads, q, k, k if one else v, cache, batch.part(of_rows), angles)]
        if not heads.gated:
            last = batch.positions[of_rows] if past == 0 else batch.positions[:rows]
            found.append(ops.attend_past(heads, q, cache, batch.part(last_rows), last, angles, past))
        return found

    expected = both(cpu, caches[0], heads, q.copy(), k.copy(), v.copy(), one_sequence(positions), table)
    names = ("q_norm", "k_norm", "sinks", "query_scales")
    on_device: Any = {name: gpu.upload(w) for name in names if (w := getattr(heads, name)) is not None}
    device_heads = replace(heads, **on_device)
    given = *map(gpu.upload, (q, k, v)), one_sequence(positions, gpu), None if table is None else gpu.upload(table)
    everything: Any = lambda: [gpu.plain(x) for x in both(gpu, caches[1], device_heads, *given)]  # noqa: E731
    plan: Any = gpu.record(everything)
    gpu.start(plan)
    for mine, theirs in zip(plan.result, expected, strict=True):
        assert gpu.download(mine).tobytes() == theirs.tobytes()
    for name in ("keys", "values"):
        assert gpu.download(getattr(caches[1], name)).tobytes() == getattr(caches[0], name).tobytes()


@pytest.mark.parametrize(
    ("k_type", "v_type", "copies"),
    few(
        [
            ("f16", "f16", 1),
            ("q8_0", "q4_0", 1),
            ("i12", "i12", 1),
            ("f32", "f32", 1),
            ("f16", "f16", 13),
            ("i8", "i8", 13),
        ]
    ),
)
def test_the_operations_of_rows_of_several_sequences(
    monkeypatch: pytest.MonkeyPatch, k_type: str, v_type: str, copies: int
) -> None:
    """A mixed pass, with a row that occurs again, gives the bits of passes of one sequence each, in other slots and pages,
    also if there are more rows than narrow kernels take."""
    monkeypatch.setattr(backend, "Device", SimulatedDevice)
    gpu, cpu, rng = backend.Backend(), CPU(1), np.random.default_rng(0)
    types, n_ctx, d = Types(cache_type(k_type), cache_type(v_type)), 200, 32
    shape, heads = AttentionCacheSpec(1, d, d), Heads[Any](2, 1, d, d, True, 0.25)
    table = rng.normal(size=(n_ctx, 2, d // 2)).astype(np.float32)
    before, slots = [63, 3, 0], [2, 0, 1]
    theirs = layer_of(shape, n_ctx, 16, types, gpu.zeros, gpu.store, 3, seed=1)
    mine = layer_of(shape, n_ctx, 128, types, np.zeros, None, 3, seed=2)
    rows_of = [[0, 1, 2], [0], [0, 1]]
    given = [[rng.normal(size=(n + 3, w * d)).astype(np.float32) for w in (2, 1, 1)] for n in before]
    found: dict[str, list[np.ndarray]] = {"q": [], "k": [], "v": [], "positions": [], "sequences": [], "last": []}
    expected, past = [], []
    for of, (n, slot, rows) in enumerate(zip(before, slots, rows_of, strict=True)):
        q, k, v = given[of]
        at = np.arange(n + 3, dtype=np.int32)
        if n:
            stored = Batch(at[:n], at[:n], np.full(n, of, np.int32))
            cpu.remember(heads, k[:n].copy(), v[:n].copy(), mine, stored, table)
            places = [gpu.upload(x) for x in (at[:n], np.full(n, slot, np.int32), k[:n], v[:n], table)]

            def remember(places: Any = places, theirs: Any = theirs) -> None:
                gpu.remember(heads, places[2], places[3], theirs, Batch(places[0], *places[:2]), places[4])

            gpu.start(gpu.record(remember))
        now = Batch(at[n : n + len(rows)], at[n : n + len(rows)], np.full(len(rows), of, np.int32))
        of_rows = [x[n : n + len(rows)] for x in (q, k, v)]
        q_rows, k_rows, v_rows = of_rows
        expected.append(cpu.attention(heads, q_rows.copy(), k_rows.copy(), v_rows.copy(), mine, now, table))
        last = np.full(len(rows), n + len(rows) - 1, np.int32)
        past.append(cpu.attend_past(heads, q_rows.copy(), mine, now, last, table, 0))
        found["last"].append(last)
        for name, x in zip(found, (*of_rows, now.positions, np.full(len(rows), slot, np.int32)), strict=False):
            found[name].append(x)
    # The second sequence again, as rows that fill a pass.
    arrays = [gpu.upload(np.concatenate([*parts, *[parts[1]] * copies])) for parts in found.values()]
    queries, keys, values, positions, sequences, ends = arrays
    angles, batch = gpu.upload(table), Batch(positions, positions, sequences, True)

    def work() -> Any:
        out = gpu.plain(gpu.attention(heads, queries, keys, values, theirs, batch, angles))
        return [out, gpu.plain(gpu.attend_past(heads, queries, theirs, batch, ends, angles, 0))]

    plan: Any = gpu.record(work)
    gpu.start(plan)
    for result, law in zip(plan.result, (expected, past), strict=True):
        assert gpu.download(result).tobytes() == np.concatenate([*law, *[law[1]] * copies]).tobytes()


@pytest.mark.thorough
def test_the_operations_of_gated_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """n_rot is less than d_k."""
    norms = [np.random.default_rng(1).normal(size=32).astype(np.float32) for _ in range(2)]
    heads = Heads(2, 1, 32, 32, True, 0.25, 1e-6, norms[0], norms[1], gated=True)
    same_operations(monkeypatch, F16, heads, n_rot=8)
    same_operations(monkeypatch, Types(cache_type("q4_0"), cache_type("q8_0")), heads, n_rot=8)


@pytest.mark.parametrize(
    ("k_type", "v_type", "past"),
    few(
        [
            ("f16", "f16", 0),
            ("f32", "q4_0", 0),
            ("i12", "i12", 2),
            ("f32", "f32", 1),
            ("q8_0", "q8_0", 0),
            ("q4_0", "f16", 2),
            ("i8", "i8", 0),
        ],
        3,
    ),
)
def test_the_operations_of_every_type(monkeypatch: pytest.MonkeyPatch, k_type: str, v_type: str, past: int) -> None:
    norm = np.random.default_rng(1).normal(size=32).astype(np.float32)
    heads = Heads(4, 2, 32, 32, True, 1.0, 1e-6, norm, norm[::-1].copy(), v_normed=True)
    types = Types(cache_type(k_type), cache_type(v_type))
    same_operations(monkeypatch, types, heads, past=past, window=2 if past else 0, one=k_type == "q8_0")


@pytest.mark.parametrize("types", few([F16, F32]))
def test_the_operations_of_large_heads(monkeypatch: pytest.MonkeyPatch, types: Types) -> None:
    """Queries over stored keys and values, whatever the type; of a layer that normalizes only queries."""
    norm = np.random.default_rng(1).normal(size=288).astype(np.float32)
    heads = Heads(2, 1, 288, 288, True, 1.0, 1e-6, norm, norm[::-1].copy(), v_normed=True)
    same_operations(monkeypatch, types, heads, one=True)


@pytest.mark.parametrize(
    ("types", "n_rot", "norm_after", "rows"),
    few(
        [
            ("f16 f16", -1, False, 2),
            ("q8_0 q4_0", 8, True, 1),
            ("i12 i12", 8, True, 17),
            ("f32 f32", 0, True, 2),
            ("i8 i8", 0, False, 2),
            ("f16 f16", 8, True, 17),
            ("q4_0 f16", -1, True, 17),
        ],
        3,
    ),
)
def test_the_operations_of_heads_with_sinks_caps_and_factors(
    monkeypatch: pytest.MonkeyPatch, types: str, n_rot: int, norm_after: bool, rows: int
) -> None:
    """Norms before and after rotation, or without one; steps and a prompt."""
    k, v = (cache_type(name) for name in types.split())
    rng, d = np.random.default_rng(rows), 32 if k.quantized or v.quantized else 16
    q_norm, k_norm, factors = (rng.normal(size=n).astype(np.float32) for n in (d, d, 24))
    heads = Heads(2, 1, d, d, n_rot == 8, 0.5, 1e-6, q_norm, k_norm, norm_after=norm_after)
    heads = replace(heads, sinks=np.array([0.5, -1], np.float32), query_scales=factors, softcap=2.0)
    same_operations(monkeypatch, Types(k, v), heads, n_rot=n_rot, rows=rows, past=5 if rows == 2 else 0)
