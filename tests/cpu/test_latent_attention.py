"""Latent attention is attention with one head of keys whose values are the beginning of the keys: bit for bit."""

import numpy as np
import pytest

from engine.cache.types import CHUNK
from engine.cpu import attention, latent_attention
from tests.cpu.blocks import run

F = np.float32


def stored(cache_type: str, rank: int, n_rope: int, count: int, chunks: int, seed: int) -> np.ndarray:
    """A ring of ``count`` positions, garbage behind them."""
    rng = np.random.default_rng(seed)
    c, k = (rng.standard_normal((count, n)).astype(F) for n in (rank, n_rope))
    ring = np.full((chunks, CHUNK, rank + n_rope), np.nan, F)
    if cache_type == "f16":
        ring = ring.astype(np.float16).view(np.uint16)
    run(latent_attention.append_rows, c, k, np.arange(count, dtype=np.int32), ring, items=count)
    return ring


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
@pytest.mark.parametrize(
    ("n_head", "rank", "n_rope", "positions"),
    [(3, 40, 8, [0, 62, 63, 64, 200]), (16, 64, 16, [600, 601]), (20, 96, 32, [511]), (1, 16, 2, [130, 5])],
)
def test_law(cache_type: str, n_head: int, rank: int, n_rope: int, positions: list[int]) -> None:
    """Also positions before and after borders of chunks and groups, and rows in no order."""
    group = 2
    rng = np.random.default_rng(n_head)
    at, rows, width = np.array(positions, np.int32), len(positions), rank + n_rope
    chunks = max(positions) // CHUNK + 2
    ring = stored(cache_type, rank, n_rope, max(positions) + 1, chunks, rank)
    q = 3 * rng.standard_normal((rows, n_head, width)).astype(F)
    scale, groups = F(width**-0.5), -(-chunks // group)
    tops = np.full((rows, groups, n_head, 2), np.nan, F)
    sums, out = np.full((rows, groups, n_head, rank), np.nan, F), np.full((rows, n_head, rank), np.nan, F)
    parts = np.ascontiguousarray(q[..., :rank]), np.ascontiguousarray(q[..., rank:])
    run(latent_attention.attend_groups(group), *parts, ring, at, scale, tops, sums, items=rows * groups)
    run(latent_attention.join_parts(group), tops, sums, at, out, items=rows * n_head)
    bits = 16 if cache_type == "f16" else 32
    keys, values = ring.swapaxes(1, 2), ring[..., :rank]
    rings = (np.ascontiguousarray(x).reshape(1, chunks, -1).view(np.uint32) for x in (keys, values))
    empty = np.zeros((rows, n_head, 0), np.int8), np.zeros((rows, n_head, 0), F)
    expected = np.empty_like(out)
    given = q, *empty, *rings, at, scale, 0, np.zeros(0, F), expected
    run(attention.attend(bits, bits, group), *given, items=rows * n_head)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("cache_type", ["f32", "f16"])
def test_what_is_stored(cache_type: str) -> None:
    """The row of a position, whose place repeats where the ring ends; no other row changes."""
    rng = np.random.default_rng(1)
    c, k = rng.standard_normal((2, 24)).astype(F), rng.standard_normal((2, 8)).astype(F)
    ring = np.zeros((2, CHUNK, 32), F if cache_type == "f32" else np.uint16)
    run(latent_attention.append_rows, c, k, np.array([70, 129], np.int32), ring, items=2)
    found = ring if cache_type == "f32" else ring.view(np.float16)
    expected = np.concatenate([c, k], 1).astype(found.dtype)
    assert np.array_equal(found[1, 6], expected[0]) and np.array_equal(found[0, 1], expected[1])
    assert np.count_nonzero(found.any(2)) == 2
