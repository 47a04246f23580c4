"""engine/cuda/attention/tiled.py in the simulator: the bits of engine/cpu/attention.py, and of its gates."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cache.kv import AttentionCacheSpec
from engine.cache.types import BLOCK, CACHE_TYPES, CHUNK, GROUP, Types
from engine.cache.window import longest
from engine.cpu import attention as mirror
from engine.cpu import glu, quantized_cache
from engine.cuda.attention import tiled as tiled_attention
from engine.cuda.attention.tile import Tile
from engine.cuda.runtime.simulator import run
from engine.ops.heads import Heads
from tests.cuda.simulated.device import SimulatedDevice
from tests.cuda.simulated.test_attention import same_operations
from tests.cuda.simulated.test_direct_attention import NO_SINKS, filled
from tests.tiers import few

SCALE = np.float32(0.3)


def agree(
    positions: list[int],
    n_head: int,
    n_head_kv: int,
    d_k: int,
    d_v: int,
    *,
    types: str = "f16 f16",
    window: int = 0,
    gated: bool = False,
    own: int = 8,
    end: int = 0,
    pairs: int = 32,
    threads: int = 64,
    seed: int | None = 1,
    sinks: np.ndarray = NO_SINKS,
    cap: float = 0.0,
    joined: int = GROUP,
    kept: bool = True,
) -> None:
    """Rows at ``positions`` over what the first ``end`` positions (0: as far as the rows see) have stored, in tiles of
    ``pairs``; whatever has never been written is NaN; types: of keys and of values; ``joined``: chunks of a group; ``kept``:
    the sums of groups are in shared memory."""
    rng = np.random.default_rng(sum(positions) + n_head + d_k)
    rows, end = len(positions), end or max(positions) + 1
    k, v = (CACHE_TYPES[name] for name in types.split())
    cache = filled([0, end], AttentionCacheSpec(n_head_kv, d_k, d_v, longest(window)), rows, Types(k, v), rng)
    at = np.array(positions, np.int32)
    q = rng.normal(size=(rows, n_head, d_k)).astype(np.float32) * np.float32(2)
    integers, scales = np.zeros(q.shape, np.int8), np.zeros((rows, n_head, d_k // BLOCK), np.float32)
    if k.quantized:
        given = q.reshape(-1, d_k), SCALE, integers.reshape(-1, d_k), scales.reshape(-1, d_k // BLOCK)
        quantized_cache.quantize_queries(*given, 0, rows * n_head)
    flat = [memory.reshape(n_head_kv, cache.pages, -1).view(np.uint32) for memory in (cache.keys, cache.values)]
    read = *flat, at, np.ones(rows, np.int32), cache.table
    expected = np.empty((rows, n_head, d_v), np.float32)
    law = mirror.attend(k.bits, v.bits, joined, cap)
    law(q, integers, scales, *read, SCALE, window, sinks, mirror.NO_PARTS, expected, 0, rows * n_head)
    if v.quantized:
        quantized_cache.rotate_rows(expected.reshape(-1, d_v), 0, rows * n_head)
    assert np.isfinite(expected).all()
    gate = rng.normal(size=(rows, n_head, 2, d_v)).astype(np.float32) * np.float32(20) if gated else None
    if gate is not None:
        gate[:, :, 0] = np.nan  # the queries
        glu.sigmoid_gate(expected.reshape(-1, d_v), gate.reshape(-1, 2, d_v), 0, rows * n_head)
    group = n_head // n_head_kv
    constants = k.name, v.name, d_k, d_v, group, pairs, own, threads, kept, gated, sinks.size > 0, joined, False, cap
    kernel = tiled_attention.attend_tiles(*constants)
    out = np.full_like(expected, np.nan)
    query: tuple[Any, ...] = (integers.view(np.uint32), scales) if k.quantized else (q.view(np.uint32), None)
    arguments = [*query, *read, gate, sinks, out, rows, cache.pages, cache.table.shape[1], window, SCALE]
    run(kernel, (n_head_kv, -(-rows * group // pairs)), threads, arguments, seed=seed)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("types", few(["f16 f16", "q8_0 q8_0", "f32 f32", "q4_0 q4_0"], 2))
def test_rows_of_a_prompt(types: str) -> None:
    """Tiles within a chunk and on both sides of a border; pairs that do not exist; what follows the rows.  The order of
    threads has no effect."""
    d = 32 if types.startswith("q") else 16
    agree([*range(52, 69)], 3, 1, d, d, types=types, end=80, seed=1)


@pytest.mark.parametrize(
    ("types", "d_k", "d_v", "own"),
    few(
        [
            ("f16 f16", 32, 72, 8),
            ("q4_0 q4_0", 96, 32, 4),
            ("q8_0 q4_0", 32, 128, 4),
            ("q4_0 f32", 32, 8, 8),
            ("f32 f16", 16, 8, 4),
            ("f16 f16", 48, 40, 4),
            ("f16 q8_0", 16, 32, 4),
        ],
        3,
    ),
)
def test_sizes_of_heads(types: str, d_k: int, d_v: int, own: int) -> None:
    """A thread owns four or eight pairs, and four or eight elements, some of which do not exist."""
    agree([*range(17)], 2, 2, d_k, d_v, types=types, own=own)


def test_warps_that_share_the_pairs_of_a_chunk() -> None:
    agree([*range(54, 72)], 3, 1, 32, 32, types="q8_0 q4_0", pairs=64, threads=128)


@pytest.mark.thorough
@pytest.mark.parametrize(("group", "d", "types"), [(12, 96, "f16 f16"), (4, 80, "f16 f16"), (12, 96, "q8_0 q8_0")])
def test_heads_of_current_models(group: int, d: int, types: str) -> None:
    agree([*range(150, 154)], group, 1, d, d, types=types, own=4, window=128)


@pytest.mark.thorough
def test_large_quantized_heads() -> None:
    """More elements than the threads process at a time."""
    agree([*range(60, 70)], 1, 1, 256, 256, types="q4_0 q8_0", own=4, threads=128)


@pytest.mark.parametrize(
    ("start", "types", "window"),
    few(
        [
            (250, "f16 f16", 70),
            (272, "f16 f16", -32),
            (250, "q8_0 q4_0", 70),
            (0, "f16 f16", 70),
            (184, "q8_0 q4_0", -64),
        ]
    ),
)
def test_windows(start: int, types: str, window: int) -> None:
    """A chunk that some rows of a tile do not see at all, one whose end they see, and one that has left the window; rows of
    two frames."""
    agree([*range(start, start + 24)], 2, 1, 32, 32, types=types, window=window)


@pytest.mark.parametrize(
    ("start", "rows", "types", "own", "threads", "window", "joined"),
    few(
        [
            (310, 18, "f16 f16", 4, 64, 150, 2),
            (316, 12, "f32 f32", 8, 128, 0, 2),
            (580, 12, "q8_0 f32", 8, 256, 0, 4),
            (440, 12, "q8_0 q4_0", 8, 64, 230, 2),
            (1020, 12, "f32 f32", 8, 64, 1000, GROUP),
        ],
    ),
)
def test_groups_of_chunks(start: int, rows: int, types: str, own: int, threads: int, window: int, joined: int) -> None:
    """Groups that end within the chunks that are processed at a time, of which there are one to eight; rows that see fewer
    groups than others, and windows that begin in the middle of one; pairs that do not exist; elements that do not."""
    d, d_v = (32, 32) if "q" in types else (16, 24)
    sinks = np.array([-3e38, 0.5], np.float32)
    agree([*range(start, start + rows)], 2, 1, d, d_v, types=types, own=own, threads=threads, window=window,
          sinks=sinks, gated=window > 0, joined=joined, kept=own == 8, seed=rows)  # fmt: skip


@pytest.mark.parametrize(("types", "d_v"), few([("q4_0 q4_0", 64), ("f16 f16", 24)]))
def test_gated_heads(types: str, d_v: int) -> None:
    agree([*range(60, 77)], 2, 1, 32, d_v, types=types, gated=True)


@pytest.mark.parametrize(("types", "gated", "window"), few([("f16 f16", False, 20), ("q8_0 q4_0", True, 0)]))
def test_sinks(types: str, gated: bool, window: int) -> None:
    """Much smaller than every score, much larger, and similar; pairs that do not exist."""
    sinks = np.array([-3e38, 3e38, 0.5, -2, 0, 1], np.float32)
    agree([*range(59, 67)], 6, 2, 32, 32, types=types, gated=gated, window=window, sinks=sinks)


@pytest.mark.parametrize(("types", "own"), few([("q8_0 q4_0", 4), ("f16 f16", 8), ("f32 q8_0", 4)]))
def test_capped_scores(types: str, own: int) -> None:
    """Of chunks that rows see in part and as a whole."""
    agree([*range(130, 133)], 2, 1, 32, 32, types=types, own=own, window=100, cap=1.5)


@pytest.mark.parametrize("types", few(["q8_0 q8_0", "f16 f16"]))
def test_positions_that_do_not_follow_one_another(types: str) -> None:
    """Positions as in queries over what another model remembers; with a window, chunks between them that no row sees."""
    positions = [3, 3, 3, *[130] * 15, 300, 300]
    agree(positions, 1, 1, 32, 32, types=types, window=8, end=330, joined=2)
    positions[-2:] = 200, 200
    if types == "f16 f16":
        agree(positions, 1, 1, 32, 32, types=types, end=230)


@pytest.mark.parametrize(
    ("types", "d_k", "d_v", "pairs", "at_once"),
    [
        ("f16", 128, 128, 128, 2),
        ("f16", 64, 80, 128, 2),
        ("f32", 256, 128, 128, 2),
        ("f16", 256, 256, 64, 2),
        ("f32", 192, 512, 32, 4),
        ("q8_0", 64, 64, 128, 2),
        ("q8_0", 128, 128, 64, 2),
        ("q4_0", 256, 128, 64, 2),
        ("q8_0", 512, 512, 32, 4),
    ],
)
def test_tiles(types: str, d_k: int, d_v: int, pairs: int, at_once: int) -> None:
    """The parts of shared memory fit, even if a block has 99 KiB, and every thread has a part of the tile."""
    least = 99 << 10
    kernel, grid, threads = tiled_attention.geometry(100, 12, 2, d_k, d_v, types, types, False, least)
    kept = kernel.constants[8]
    tile = Tile(d_k, d_v, pairs, 8 if pairs == 128 else 4, threads, CACHE_TYPES[types].quantized, bool(kept))
    assert kernel.constants[5:8] == (pairs, tile.own, threads) and grid == (2, -(-600 // pairs))
    assert kept == (not tile.quantized and 4 * (replace(tile, kept=True).size + pairs) <= least)
    assert tile.at_once == at_once and d_v <= tile.pitch and tile.slice % 4 == 0
    assert kernel.shared == 4 * tile.size and kernel.shared + 4 * pairs <= least


def test_larger_tiles_where_they_fit() -> None:
    for shared, pairs, kept in ((163 << 10, 128, True), (99 << 10, 128, False), (64 << 10, 64, False)):
        kernel, grid, _ = tiled_attention.geometry(100, 12, 2, 128, 128, "f16", "f16", False, shared)
        assert kernel.constants[5] == pairs and kernel.constants[8] == kept and grid == (2, -(-600 // pairs))
        most = tiled_attention.FILLED * grid[0] * grid[1]
        found = [tiled_attention.fills(100, 12, 2, 128, 128, "f16", n, shared) for n in (most, most + 1)]
        assert found == [True, False]


def test_what_is_taken() -> None:
    f16, f32, q8_0, q4_0 = (CACHE_TYPES[name] for name in ("f16", "f32", "q8_0", "q4_0"))
    for d in (64, 80, 96, 112, 128, 192, 256, 512):
        assert tiled_attention.takes(f16, f16, d, d) and tiled_attention.takes(f32, f16, d, d)
        assert tiled_attention.takes(q8_0, q4_0, d, d) == tiled_attention.takes(q4_0, f16, d, d) == (d % BLOCK == 0)
    refused: list[Any] = [(f16, f16, 72, 64), (f16, f16, 64, 576), (q8_0, f16, 48, 64), (f16, q4_0, 64, 48)]
    assert not any(tiled_attention.takes(*case) for case in refused) and CHUNK == 64


# --- through the backend ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k_type", "v_type", "gated", "past"),
    few([("q8_0", "q4_0", True, 0), ("f32", "f32", False, 5), ("f16", "f16", True, 0)]),
)
def test_the_operations_of_a_wide_pass(
    monkeypatch: pytest.MonkeyPatch, k_type: str, v_type: str, gated: bool, past: int
) -> None:
    types = Types(CACHE_TYPES[k_type], CACHE_TYPES[v_type])
    d = 32 if types.k.quantized else 16
    sinks = np.array([1, -1], np.float32) if gated else None
    heads = Heads(2, 1, d, d, True, 0.25, 1e-6, gated=gated, sinks=sinks, softcap=2.0 if gated else 0.0)
    same_operations(monkeypatch, types, heads, past=past, rows=18)


@pytest.mark.thorough
def test_the_operations_of_a_pass_too_small_for_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass too small for tiles is computed 16 rows at a time, with the same bits."""
    types = Types(CACHE_TYPES["q8_0"], CACHE_TYPES["q4_0"])
    monkeypatch.setattr(SimulatedDevice, "multiprocessors", 4)
    given = 2, 1, 32, 32, types.k.name, 4, SimulatedDevice.shared_memory
    assert not tiled_attention.fills(17, *given) and tiled_attention.fills(65, *given)
    same_operations(monkeypatch, types, Heads(2, 1, 32, 32, True, 0.25, 1e-6, gated=True), rows=18)
