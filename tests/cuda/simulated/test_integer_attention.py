"""engine/cuda/attention/integer_tiled.py and integer_steps.py in the simulator: the bits of the CPU's mirror."""

from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cache.kv import AttentionCache, AttentionCacheSpec
from engine.cache.types import CACHE_TYPES, CHUNK, Types
from engine.cache.window import longest
from engine.cpu import glu, integer_cache
from engine.cpu import integer_attention as mirror
from engine.cpu.attention import NO_PARTS
from engine.cuda.attention import attend, integer_steps, integer_tile, integer_tiled
from engine.cuda.runtime.simulator import run
from tests.cuda.simulated.test_direct_attention import NO_SINKS, ends_of, unset
from tests.pages import layer_of
from tests.tiers import few

SCALE = np.float32(0.3)


class Case:
    """Rows at ``positions`` of the sequences in ``slots`` (None: all in slot 1) over what the first ``end`` positions (0: as
    far as the rows see) have stored; whatever has never been written is NaN, or has a scale that is."""

    def __init__(
        self,
        name: str,
        positions: list[int],
        n_head: int,
        n_head_kv: int,
        d_k: int,
        d_v: int,
        window: int,
        end: int,
        slots: list[int] | None = None,
    ) -> None:
        self.rng = rng = np.random.default_rng(sum(positions) + n_head + d_k)
        self.of = of = CACHE_TYPES[name]
        self.rows, slots = len(positions), slots or [1] * len(positions)
        self.n_head, self.n_head_kv, self.d_k, self.d_v, self.window = n_head, n_head_kv, d_k, d_v, window
        ends = [0, end] if end else ends_of(positions, slots)
        self.cache = self._filled(ends, AttentionCacheSpec(n_head_kv, d_k, d_v, longest(window)))
        self.at = np.array(positions, np.int32)
        q = rng.normal(size=(self.rows, n_head, d_k)).astype(np.float32) * np.float32(2)
        block = of.block(d_k)
        self.integers = np.zeros(q.shape, np.int16)
        self.scales = np.zeros((self.rows, n_head, d_k // block), np.float32)
        given = self.integers.reshape(-1, d_k), self.scales.reshape(-1, d_k // block), 0, self.rows * n_head
        integer_cache.quantize_queries(q.reshape(-1, d_k), SCALE, block, *given)
        self.query = np.stack([self.integers >> 3, self.integers & 7], axis=2).astype(np.int8).view(np.uint32)
        flat = (
            memory.reshape(n_head_kv, self.cache.pages, -1).view(np.uint32)
            for memory in (self.cache.keys, self.cache.values)
        )
        self.read = *flat, self.at, np.array(slots, np.int32), self.cache.table
        self.sizes = self.cache.pages, self.cache.table.shape[1]

    def _filled(self, ends: list[int], shape: AttentionCacheSpec) -> AttentionCache[Any]:
        cache: AttentionCache[Any] = layer_of(
            shape, 4096, self.rows, Types(self.of, self.of), unset, n_sequences=len(ends)
        )
        for slot, end in enumerate(ends):
            at = np.arange(max(0, end - cache.pages // len(ends) * CHUNK), end, dtype=np.int32)
            places = at, np.full_like(at, slot), cache.table
            for memory, d, by_position in ((cache.keys, shape.d_k, False), (cache.values, shape.d_v, True)):
                x = self.rng.normal(size=(at.size, shape.n_head_kv, d)).astype(np.float32)
                x *= self.rng.uniform(0.01, 10, (at.size, 1, 1)).astype(np.float32) if by_position else np.float32(1)
                x[-1:, 0, : self.of.block(d)] = 0
                kind = self.of.bits, self.of.block(d), by_position
                integer_cache.append(x, *places, *kind, memory, 0, at.size * x.shape[1])
        return cache

    def expected(self, sinks: np.ndarray, joined: int, cap: float) -> np.ndarray:
        """What the CPU finds, before gates."""
        out = np.empty((self.rows, self.n_head, self.d_v), np.float32)
        end = NO_PARTS, out, 0, self.rows * self.n_head
        given = self.integers, self.scales, *self.read, self.window, sinks, *end
        mirror.attend(self.of.bits, joined, cap)(*given)
        integer_cache.rotate_rows(out.reshape(-1, self.d_v), self.of.block(self.d_v), 0, self.rows * self.n_head)
        assert np.isfinite(out).all()
        return out


def tiles_agree(
    name: str,
    positions: list[int],
    n_head: int,
    n_head_kv: int,
    d_k: int,
    d_v: int = 0,
    *,
    window: int = 0,
    gated: bool = False,
    end: int = 0,
    warps: int = 1,
    part: int = 0,
    shared_by: int = 1,
    joined: int = 2,
    seed: int | None = 1,
    sinks: np.ndarray = NO_SINKS,
    cap: float = 0.0,
) -> None:
    """The bits of the CPU, in tiles of 16 pairs per warp."""
    d_v = d_v or d_k
    case = Case(name, positions, n_head, n_head_kv, d_k, d_v, window, end)
    expected = case.expected(sinks, joined, cap)
    gate = case.rng.normal(size=(case.rows, n_head, 2, d_v)).astype(np.float32) * np.float32(20) if gated else None
    if gate is not None:
        gate[:, :, 0] = np.nan  # the queries
        glu.sigmoid_gate(expected.reshape(-1, d_v), gate.reshape(-1, 2, d_v), 0, case.rows * n_head)
    group, part = n_head // n_head_kv, part or integer_tile.part_of(case.of, d_v)
    constants = name, d_k, d_v, group, part, warps, shared_by, gated, sinks.size > 0, joined, cap
    kernel = integer_tiled.attend_integers(*constants)
    out = np.full_like(expected, np.nan)
    arguments = [case.query, case.scales, *case.read, gate, sinks, out, case.rows, *case.sizes, window]
    tile = integer_tile.IntegerTile(case.of, d_k, d_v, part, warps, shared_by)
    grid = n_head_kv, tile.number(case.rows * group), d_v // tile.width
    run(kernel, grid, 32 * warps, arguments, seed=seed)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["i8", "i12"])
def test_rows_of_a_prompt(name: str) -> None:
    """Tiles on both sides of a border of chunks; pairs that do not exist; what follows the rows.  The order of threads has no
    effect."""
    tiles_agree(name, [*range(60, 67)], 3, 1, 32, end=80, seed=1)


@pytest.mark.parametrize(
    ("name", "d_k", "d_v", "part"),
    few([("i8", 64, 128, 0), ("i12", 128, 64, 0), ("i12", 96, 32, 0), ("i8", 32, 256, 128), ("i12", 32, 192, 64)], 2),
)
def test_sizes_of_heads(name: str, d_k: int, d_v: int, part: int) -> None:
    tiles_agree(name, [*range(126, 131)], 2, 1, d_k, d_v, part=part)


@pytest.mark.parametrize(("name", "window"), few([("i8", 0), ("i12", 70)]))
def test_warps_that_share_queries(name: str, window: int) -> None:
    """Two warps for every 16 pairs, of which some see chunks that others do not; the order of threads has no effect."""
    rows = [*range(117, 134)]
    tiles_agree(name, rows, 2, 1, 32, 256, part=128, warps=4, shared_by=2, window=window, seed=2)


def test_groups_of_chunks() -> None:
    """Several groups, of which rows see some, and warps that see different chunks."""
    tiles_agree("i8", [100, 190, 191, 192, 256, 330], 4, 1, 32, warps=2)


@pytest.mark.parametrize(("name", "start", "window"), few([("i8", 250, 70), ("i8", 282, -32), ("i12", 310, 70)]))
def test_windows(name: str, start: int, window: int) -> None:
    """A first chunk in the middle of a group, and a chunk that some rows do not see at all; rows of two frames."""
    tiles_agree(name, [*range(start, start + 12)], 2, 1, 32, window=window, warps=2)


@pytest.mark.parametrize(("name", "gated"), few([("i8", True), ("i12", False)]))
def test_sinks_and_gates(name: str, gated: bool) -> None:
    """Sinks much smaller than every score, much larger, and similar."""
    sinks = np.array([-3e38, 3e38, 0.5, -2], np.float32)
    tiles_agree(name, [*range(126, 130)], 4, 2, 32, gated=gated, sinks=sinks)


@pytest.mark.parametrize(("name", "shared_by"), few([("i8", 2), ("i12", 1)]))
def test_capped_scores(name: str, shared_by: int) -> None:
    """Of a warp, or of two that exchange them."""
    rows, d_v = [*range(125, 131)], 128 * shared_by
    tiles_agree(name, rows, 2, 1, 32, d_v, part=128, warps=shared_by, shared_by=shared_by, window=70, cap=1.5)


# --- steps -----------------------------------------------------------------------------------------------------


def steps_agree(
    name: str,
    positions: list[int],
    n_head: int,
    n_head_kv: int,
    d_k: int,
    d_v: int = 0,
    *,
    window: int = 0,
    splits: int = 0,
    early: bool = True,
    seed: int | None = 1,
    sinks: np.ndarray = NO_SINKS,
    shared: int = 227 << 10,
    slots: list[int] | None = None,
    cap: float = 0.0,
) -> None:
    """The bits of the CPU, by chunks that are joined afterwards; without ``shared`` memory they are read where they are;
    ``slots``: of the sequences of the rows in a mixed pass."""
    d_v, mixed = d_v or d_k, slots is not None
    case = Case(name, positions, n_head, n_head_kv, d_k, d_v, window, 0, slots)
    expected = case.expected(sinks, 2, cap)
    n_partials = attend.partials(max(positions) + 1, window)
    sizes = case.rows, n_head, n_head_kv, d_k, d_v, name
    options: dict[str, Any] = {"sinks": sinks.size > 0, "together": 2, "mixed": mixed, "cap": cap}
    plan = integer_steps.geometry(*sizes, n_partials, 3, shared, early, **options)
    weights, sums = (np.full(n, np.nan, np.float32) for n in attend.scratch(case.rows, n_head, d_v, n_partials))
    rest = weights, sums, 1 if mixed else case.rows, *case.sizes, n_partials, window, SCALE
    grid = (*plan.attend_grid[:2], splits or plan.attend_grid[2])
    run(plan.attend, grid, plan.attend_block, [case.query, case.scales, *case.read, *rest], seed=seed)
    out = np.full_like(expected, np.nan)
    arguments = [weights, sums, case.at, None, sinks, out, n_partials, window]
    run(plan.combine, plan.combine_grid, plan.combine_block, arguments, seed=seed)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["i8", "i12"])
@pytest.mark.parametrize("position", [0, 70])
def test_a_row(name: str, position: int) -> None:
    steps_agree(name, [position], 2, 1, 32, early=position == 0, seed=position, shared=0 if position else 99 << 10)


@pytest.mark.parametrize(
    ("name", "d_k", "d_v"), few([("i8", 64, 128), ("i12", 128, 64), ("i12", 96, 32), ("i8", 32, 256)])
)
def test_sizes_of_heads_of_steps(name: str, d_k: int, d_v: int) -> None:
    steps_agree(name, [126, 127, 128], 4, 2, d_k, d_v)


@pytest.mark.parametrize(("name", "splits", "shared"), few([("i8", 1, 227 << 10), ("i12", 2, 227 << 10), ("i8", 1, 0)]))
def test_several_chunks_of_a_warp(name: str, splits: int, shared: int) -> None:
    """More pairs than a block takes, and rows that see different chunks."""
    steps_agree(name, [*range(560, 570)], 2, 1, 32, splits=splits, shared=shared)


@pytest.mark.parametrize(
    ("name", "n_head", "window", "shared"), few([("i8", 2, 0, 0), ("i8", 17, 0, 227 << 10), ("i12", 2, 70, 227 << 10)])
)
def test_rows_of_several_sequences(name: str, n_head: int, window: int, shared: int) -> None:
    """Rows that see other pages than their neighbours, one of them twice; the pairs of a row in one block, or in two."""
    positions, slots = [65, 330, 331, 5, 65], [2, 0, 0, 1, 2]
    steps_agree(name, positions, n_head, 1, 32, window=window, splits=1, shared=shared, slots=slots)


@pytest.mark.parametrize(("name", "shared"), few([("i8", 0), ("i12", 227 << 10)]))
def test_capped_scores_of_steps(name: str, shared: int) -> None:
    steps_agree(name, [130, 131], 2, 1, 32, window=70, shared=shared, cap=1.5)


@pytest.mark.parametrize("name", few(["i8", "i12"]))
def test_windows_and_sinks_of_steps(name: str) -> None:
    sinks = np.array([-3e38, 3e38, 0.5, -2], np.float32)
    # The last two rows begin a chunk after the others, and are in the second half of the pairs of a warp.
    steps_agree(name, [*range(257, 263)], 4, 2, 32, window=70, sinks=sinks)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["i8", "i12"])
def test_frames_of_steps(name: str) -> None:
    steps_agree(name, [*range(285, 291)], 4, 2, 32, window=-32)
