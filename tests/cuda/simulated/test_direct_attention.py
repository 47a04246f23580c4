"""engine/cuda/attention/direct.py in the simulator, joined by combine.py: the bits of engine/cpu/attention.py."""

from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cache.kv import AttentionCache, AttentionCacheSpec
from engine.cache.types import BLOCK, CACHE_TYPES, CHUNK, GROUP, Types
from engine.cache.window import longest
from engine.cpu import attention as mirror
from engine.cpu import quantized_cache
from engine.cuda.attention import attend as attention
from engine.cuda.attention import direct as direct_attention
from engine.cuda.attention.weighted_values import ZEROS
from engine.cuda.runtime.simulator import run
from engine.errors import DeviceError
from tests.pages import layer_of
from tests.tiers import few

SCALE = np.float32(0.3)
TINY = np.float32(1e-45)
"""Values of about this size make weighted sums of -0 where weights are small, in float32."""
NO_SINKS = np.empty(0, np.float32)


def unset(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Lanes that have never been written are NaN; if they are quantized, their scales are NaN."""
    array: np.ndarray = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint16)[:] = 0x7E01 if dtype == np.uint16 else 0x7FC1
    return array


def ends_of(positions: list[int], slots: list[int]) -> list[int]:
    """The number of positions of each sequence that rows at ``positions`` of the sequences in ``slots`` see."""
    return [
        max((p + 1 for p, s in zip(positions, slots, strict=True) if s == slot), default=0)
        for slot in range(max(slots) + 1)
    ]


def filled(
    ends: list[int], shape: AttentionCacheSpec, rows: int, types: Types, rng: np.random.Generator
) -> AttentionCache:
    """Memory of sequences of so many positions.  Lanes that have never been written are not numbers."""
    cache: AttentionCache = layer_of(shape, max(4096, *ends), rows, types, unset, n_sequences=len(ends))
    for slot, end in enumerate(ends):
        at = np.arange(max(0, end - cache.pages // len(ends) * CHUNK), end, dtype=np.int32)
        places = at, np.full_like(at, slot), cache.table
        for of, memory, d, by_position in (
            (types.k, cache.keys, shape.d_k, False),
            (types.v, cache.values, shape.d_v, True),
        ):
            x = rng.normal(size=(at.size, shape.n_head_kv, d)).astype(np.float32)
            x[rng.random(x.shape) < 0.1] = -0.0
            if by_position:
                x[..., -1] *= TINY
            if of.quantized:
                x[-1:, 0, :BLOCK] = 0
                quantized_cache.append(x, *places, of.bits, by_position, memory, 0, at.size * x.shape[1])
            else:
                mirror.append(x, *places, by_position, memory, 0, at.size * x.shape[1])
    return cache


def agree(
    types: str,
    positions: list[int],
    n_head: int,
    n_head_kv: int,
    d_k: int,
    d_v: int = 0,
    *,
    window: int = 0,
    splits: int = 0,
    tasks: int = 0,
    early: bool = True,
    seed: int | None = 1,
    sinks: np.ndarray = NO_SINKS,
    group: int = GROUP,
    slots: list[int] | None = None,
    slot: int = 1,
    cap: float = 0.0,
) -> None:
    """Attention of rows at ``positions`` over everything up to the last of them; types: of keys and of values; ``group``:
    chunks of a group; ``slots``: of the sequences of the rows in a mixed pass; ``slot``: of their sequence in any other."""
    rng = np.random.default_rng(sum(positions) + n_head + d_k)
    rows, d_v, mixed = len(positions), d_v or d_k, slots is not None
    k, v = (CACHE_TYPES[name] for name in types.split())
    ends, of_rows = ends_of(positions, slots or [slot] * rows), np.array(slots or [slot] * rows, np.int32)
    cache = filled(ends, AttentionCacheSpec(n_head_kv, d_k, d_v, longest(window)), rows, Types(k, v), rng)
    at = np.array(positions, np.int32)
    q = rng.normal(size=(rows, n_head, d_k)).astype(np.float32) * np.float32(2)
    integers, scales = np.zeros(q.shape, np.int8), np.zeros((rows, n_head, d_k // BLOCK), np.float32)
    if k.quantized:
        given = q.reshape(-1, d_k), SCALE, integers.reshape(-1, d_k), scales.reshape(-1, d_k // BLOCK)
        quantized_cache.quantize_queries(*given, 0, rows * n_head)
    expected = np.empty((rows, n_head, d_v), np.float32)
    flat = [memory.reshape(n_head_kv, cache.pages, -1).view(np.uint32) for memory in (cache.keys, cache.values)]
    read = *flat, at, of_rows, cache.table
    law = mirror.attend(k.bits, v.bits, group, cap)
    law(q, integers, scales, *read, SCALE, window, sinks, mirror.NO_PARTS, expected, 0, rows * n_head)
    assert np.isfinite(expected).all()

    n_partials, stride = attention.partials(max(ends), window), cache.table.shape[1]
    sizes = rows, n_head, n_head_kv, d_k, d_v, k.name, v.name
    options: dict[str, Any] = {"sinks": sinks.size > 0, "together": group, "mixed": mixed, "cap": cap}
    plan = direct_attention.geometry(*sizes, n_partials, 3, early, tasks, **options)
    grid, attend = (*plan.attend_grid[:2], splits or plan.attend_grid[2]), plan.attend
    if splits:
        attend = attend.kernel(*attend.constants[:-2], k.quantized and n_partials > splits, cap)
    weights, sums = (np.full(n, np.nan, np.float32) for n in attention.scratch(rows, n_head, d_v, n_partials))
    query: tuple[Any, ...] = (integers, scales) if k.quantized else (q, None)
    arguments = [*query, *read, weights, sums, rows, cache.pages, stride, n_partials, window, SCALE]
    run(attend, grid, plan.attend_block, arguments, seed=seed)
    assert plan.rotated == (BLOCK if v.quantized else 0)
    joined = attention.combine(d_v, early, False, 0, plan.sinks, group)
    out = np.full_like(expected, np.nan)
    arguments = [weights, sums, at, None, sinks, out, n_partials, window]
    run(joined, plan.combine_grid, plan.combine_block, arguments, seed=seed)
    assert out.tobytes() == expected.tobytes()


PAIRS = ("f32 q4_0", "f16 q8_0", "q8_0 f32", "q8_0 q8_0", "q4_0 f16")


@pytest.mark.parametrize("types", few(PAIRS, 2))
def test_types(types: str) -> None:
    agree(types, [70], 2, 1, 32)


@pytest.mark.parametrize("position", [0, 143])
def test_decode(position: int) -> None:
    agree("q8_0 q8_0", [position], 1, 1, 32)


@pytest.mark.parametrize(
    ("types", "d_k", "d_v"),
    few(
        [
            ("q8_0 q4_0", 64, 96),
            ("q4_0 q8_0", 96, 64),
            ("f16 q8_0", 12, 64),
            ("f32 f16", 80, 20),
            ("f16 f32", 264, 4),
            ("q8_0 f16", 64, 36),
            ("q4_0 q4_0", 256, 256),
        ],
        3,
    ),
)
def test_sizes_of_heads(types: str, d_k: int, d_v: int) -> None:
    agree(types, [37], 2, 1, d_k, d_v)


@pytest.mark.parametrize("types", few(["q8_0 q8_0", "f16 f16"]))
def test_largest_heads(types: str) -> None:
    agree(types, [20], 3, 1, 512)


@pytest.mark.parametrize(("group", "rows"), few([(1, 3), (8, 1), (3, 3)], 2))
def test_groups(group: int, rows: int) -> None:
    agree("q8_0 q8_0", [*range(62, 62 + rows)], 2 * group, 2, 32, splits=1)


@pytest.mark.parametrize("tasks", few([8, 1]))
def test_pairs_of_a_block(tasks: int) -> None:
    agree("q4_0 q8_0", [63, 64], 5, 1, 32, tasks=tasks)
    agree("f16 q8_0", [3, 17], 5, 1, 32, tasks=tasks)


@pytest.mark.parametrize("positions", few([[127, 128, 129], [0, 1, 2]]))
def test_rows_on_both_sides_of_a_border(positions: list[int]) -> None:
    # In the first slot, no chunk can be read before the first one.
    agree("q8_0 q4_0", positions, 2, 1, 32, early=False, splits=2, slot=0)


def test_positions_that_do_not_follow_one_another() -> None:
    agree("q8_0 q8_0", [130, 7, 64], 2, 1, 32)


@pytest.mark.parametrize(
    ("types", "n_head", "tasks", "window", "splits"),
    few([("q4_0 q8_0", 3, 2, 70, 1), ("q8_0 q4_0", 2, 0, 0, 0), ("f32 q8_0", 2, 0, 0, 1)]),
)
def test_rows_of_several_sequences(types: str, n_head: int, tasks: int, window: int, splits: int) -> None:
    """Rows that see other pages than their neighbours, one of them twice; the pairs of a row in one block, or in two."""
    positions, slots = [65, 200, 201, 5, 65], [2, 0, 0, 1, 2]
    agree(types, positions, n_head, 1, 32, tasks=tasks, window=window, splits=splits, slots=slots, seed=tasks)


@pytest.mark.parametrize(("positions", "window"), [([2, 3], 1), ([191, 192], 1), ([191, 192], 70), ([159, 160], -32)])
def test_windows(positions: list[int], window: int) -> None:
    """Pages have been used again where the positions are larger than the window; the last rows are of two frames."""
    agree("q8_0 q8_0", positions, 1, 1, 32, window=window)


@pytest.mark.thorough
def test_the_order_of_threads_does_not_show() -> None:
    for seed, types in enumerate(("q8_0 q8_0", "f16 q4_0")):
        agree(types, [64, 65], 2, 1, 32, seed=seed, splits=1)


@pytest.mark.parametrize(
    ("types", "last", "n_head", "d_k", "d_v", "window"),
    few(
        [
            ("q4_0 q4_0", 64, 4, 32, 128, 0),
            ("q8_0 q8_0", 200, 1, 160, 32, 0),
            ("q4_0 f32", 127, 3, 32, 36, 0),
            ("q4_0 q8_0", 300, 6, 256, 160, 100),
            ("q8_0 q4_0", 130, 8, 64, 192, 0),
        ],
        1,
    ),
)
def test_chunks_of_a_warp(types: str, last: int, n_head: int, d_k: int, d_v: int, window: int) -> None:
    """A block's chunks by fours, and the rest: two or three of a warp each, or one of all warps."""
    agree(types, [last], n_head, 1, d_k, d_v, window=window, splits=1)


@pytest.mark.parametrize(("group", "rows", "window"), few([(3, 2, 65), (1, 3, 0), (4, 2, 0)]))
def test_chunks_of_a_warp_and_rows(group: int, rows: int, window: int) -> None:
    agree("q4_0 q8_0", [*range(127, 127 + rows)], group, 1, 32, 64, window=window, splits=1, seed=group)


@pytest.mark.parametrize(
    ("types", "positions", "splits", "seed"),
    few([("q8_0 q4_0", [300], 1, 1), ("q4_0 q4_0", [580, 100], 2, None)]),
)
def test_more_chunks_than_warps(types: str, positions: list[int], splits: int, seed: int | None) -> None:
    agree(types, positions, 2, 1, 32, splits=splits, seed=seed, group=2)


@pytest.mark.parametrize(
    ("types", "positions", "window"), few([("q4_0 f32", [330, 70], 0), ("q8_0 q8_0", [400, 401], 150)])
)
def test_groups_of_chunks(types: str, positions: list[int], window: int) -> None:
    """Rows that see different numbers of groups, and windows that begin in the middle of one."""
    sinks = np.array([-2, 1], np.float32)
    agree(types, positions, 2, 1, 32, window=window, sinks=sinks, group=2)


def test_sinks() -> None:
    agree("q8_0 q4_0", [70, 30], 4, 2, 32, sinks=np.array([-3e38, -2, 5, 3e38], np.float32))


@pytest.mark.parametrize(("types", "splits"), few([("q8_0 q4_0", 1), ("f32 q8_0", 0), ("q4_0 q8_0", 0)], 2))
def test_capped_scores(types: str, splits: int) -> None:
    """Of a chunk that a warp processes alone, or all warps."""
    agree(types, [130, 70], 2, 1, 32, splits=splits, window=100, cap=1.5)


@pytest.mark.parametrize("bits", [4, 8])
def test_values_are_exact(bits: int) -> None:
    """The unpacked value is exact for every scale and integer, except for the sign of a zero."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    scales = halves[np.isfinite(halves)].astype(np.float32)
    half = 1 << (bits - 1)
    offsets = scales * np.float32(-ZEROS[bits])
    assert (offsets == scales.astype(np.float64) * -ZEROS[bits]).all()
    for n in range(-half, half):
        x = np.uint32(0x47000000 | (n + half) << 8).view(np.float32)
        assert x == ZEROS[bits] + n
        # Exact in float64, so this is the value that an fma rounds.
        value = scales.astype(np.float64) * x + offsets
        assert (value.astype(np.float32) == value).all()
        assert (value == scales * np.float32(n)).all()


def test_heads_that_the_kernel_cannot_take() -> None:
    for d_k, d_v, types in ((544, 64, "q8_0 q8_0"), (64, 516, "q8_0 f16"), (48, 64, "q8_0 f16"), (62, 64, "f16 q8_0")):
        k, v = types.split()
        with pytest.raises(DeviceError, match="takes .* heads of a multiple of"):
            direct_attention.geometry(1, 2, 1, d_k, d_v, k, v, 8, 100, False)
