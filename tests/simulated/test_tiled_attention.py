"""engine/cuda/tiled_attention.py in the simulator: the bits of engine/cpu/attention.py, and of its gates."""

from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cache.kv import LayerShape
from engine.cache.types import CACHE_TYPES, CHUNK, F16, F32, Types
from engine.cpu import attention as mirror
from engine.cpu import glu
from engine.cuda import tiled_attention
from engine.cuda.simulator import run
from engine.cuda.tile import Tile
from engine.models.heads import Heads
from tests.simulated.device import SimulatedDevice
from tests.simulated.test_attention import filled, same_operations

SCALE = np.float32(0.3)


def agree(
    positions: list[int],
    n_head: int,
    n_head_kv: int,
    d_k: int,
    d_v: int,
    *,
    half: bool = True,
    window: int = 0,
    gated: bool = False,
    own: int = 8,
    end: int = 0,
    threads: int = 64,
    seed: int | None = None,
) -> None:
    """Rows at ``positions`` over what the first ``end`` positions (0: as far as the rows see) have left, in tiles of 32
    pairs; what is not written is not a number."""
    rng = np.random.default_rng(sum(positions) + n_head + d_k)
    rows, end, pairs = len(positions), end or max(positions) + 1, 32
    keys, values = filled(end, LayerShape(n_head_kv, d_k, d_v, window), rows, half, rng)
    at = np.array(positions, np.int32)
    q = rng.normal(size=(rows, n_head, d_k)).astype(np.float32) * np.float32(2)
    expected = np.empty((rows, n_head, d_v), np.float32)
    mirror.attend(q, keys, values, at, SCALE, window, half, 1, expected)
    assert np.isfinite(expected).all()
    gate = rng.normal(size=(rows, n_head, 2, d_v)).astype(np.float32) * np.float32(20) if gated else None
    if gate is not None:
        gate[:, :, 0] = np.nan  # the queries
        glu.sigmoid_gate(expected, gate[:, :, 1])
    group = n_head // n_head_kv
    kernel = tiled_attention.attend_tiles(half, d_k, d_v, group, pairs, own, threads, gated)
    out = np.full_like(expected, np.nan)
    arguments = [q, keys, values, at, gate, out, rows, keys.shape[1], window, SCALE]
    run(kernel, (n_head_kv, -(-rows * group // pairs)), threads, arguments, seed=seed)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("half", [True, False])
def test_rows_of_a_prompt(half: bool) -> None:
    """Tiles within a chunk and on both sides of a border; pairs that there are not; what lies behind the rows.  The order of
    threads does not show."""
    agree([*range(52, 69)], 3, 1, 16, 16, half=half, end=80, seed=1)


@pytest.mark.parametrize(("d_k", "d_v", "own"), [(32, 72, 8), (48, 40, 4)])
def test_sizes_of_heads(d_k: int, d_v: int, own: int) -> None:
    """A thread owns four or eight pairs, and four or eight elements, of which some are not there."""
    agree([*range(17)], 2, 2, d_k, d_v, own=own)


@pytest.mark.parametrize("start", [0, 250])
def test_windows_and_rings(start: int) -> None:
    """A chunk that some rows of a tile see nothing of, one that they see the end of, one that has gone."""
    agree([*range(start, start + 24)], 2, 1, 16, 16, window=70)


def test_gated_heads() -> None:
    agree([*range(60, 77)], 2, 1, 16, 24, gated=True)


def test_positions_that_do_not_follow_one_another() -> None:
    """... as of queries over what another model remembers; with a window, chunks between them that no row sees."""
    agree([3, 3, 3, *[130] * 15, 200, 200], 1, 1, 16, 16, end=230)
    agree([3, 3, 3, *[130] * 15, 200, 200], 1, 1, 16, 16, window=8, end=230)


@pytest.mark.parametrize(
    ("d_k", "d_v", "pairs", "own", "at_once"),
    [(128, 128, 128, 8, 2), (64, 80, 128, 8, 2), (256, 256, 64, 4, 2), (192, 512, 32, 4, 4)],
)
def test_tiles(d_k: int, d_v: int, pairs: int, own: int, at_once: int) -> None:
    """The parts of shared memory fit, also where a block has 99 KiB, and every thread has a part of the tile."""
    kernel, grid, threads = tiled_attention.geometry(100, 12, 2, d_k, d_v, True, False)
    tile = Tile(d_k, d_v, pairs, own, threads)
    assert kernel.constants[4:7] == (pairs, own, threads) and grid == (2, -(-600 // pairs))
    assert tile.at_once == at_once and d_v <= tile.pitch and tile.slice % 4 == 0
    assert kernel.shared + 4 * pairs <= 99 << 10


def test_what_is_taken() -> None:
    f16, f32, q8_0 = (CACHE_TYPES[name] for name in ("f16", "f32", "q8_0"))
    for d in (64, 80, 96, 112, 128, 192, 256, 512):
        assert tiled_attention.takes(f16, f16, d, d) and tiled_attention.takes(f32, f32, d, d)
    refused: list[Any] = [(f16, f32, 64, 64), (q8_0, q8_0, 64, 64), (f16, f16, 72, 64), (f16, f16, 64, 576)]
    assert not any(tiled_attention.takes(*case) for case in refused) and CHUNK == 64


# --- through the backend ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("types", "gated", "past"),
    [(F16, True, 0), (F32, False, 5), (Types(CACHE_TYPES["q8_0"], CACHE_TYPES["f16"]), True, 0)],
)
def test_the_operations_of_a_wide_pass(monkeypatch: pytest.MonkeyPatch, types: Types, gated: bool, past: int) -> None:
    """... are those of 16 rows at a time where the cache is quantized."""
    d = 32 if types.k.quantized else 16
    same_operations(monkeypatch, types, Heads(2, 1, d, d, True, 0.25, 1e-6, gated=gated), past=past, rows=18)


def test_the_operations_of_a_pass_too_small_for_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedDevice, "multiprocessors", 4)
    assert not tiled_attention.fills(17, 2, 1, 16, 16, 4) and tiled_attention.fills(65, 2, 1, 16, 16, 4)
    same_operations(monkeypatch, F16, Heads(2, 1, 16, 16, True, 0.25, 1e-6, gated=True), rows=18)
