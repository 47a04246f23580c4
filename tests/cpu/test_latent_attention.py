"""Latent attention is attention with one head of keys whose values are the beginning of the keys: bit for bit."""

from typing import Any

import numpy as np
import pytest

from engine.cache.latent import LatentCache, LatentCacheSpec
from engine.cache.types import CHUNK, Types, cache_type
from engine.cpu import attention, indexer, latent_attention
from tests.cpu.blocks import run
from tests.pages import layer_of

F = np.float32
Cache = LatentCache[np.ndarray]


def unset(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """What has never been written is NaN."""
    array: np.ndarray = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint16)[:] = 0x7E01 if dtype == np.uint16 else 0x7FC1
    return array


def stored(kind: str, rank: int, n_rope: int, counts: list[int], seed: int) -> Cache:
    """Sequences of so many positions, garbage behind them."""
    rng, of = np.random.default_rng(seed), cache_type(kind)
    shape, n_ctx = LatentCacheSpec(rank + n_rope), max(counts) + CHUNK
    cache: Cache = layer_of(shape, n_ctx, 1, Types(of, of), unset, n_sequences=len(counts), seed=seed)
    for slot, count in enumerate(counts):
        c, k = (rng.standard_normal((count, n)).astype(F) for n in (rank, n_rope))
        places = np.arange(count, dtype=np.int32), np.full(count, slot, np.int32), cache.table
        run(latent_attention.append_rows, c, k, *places, cache.rows, items=count)
    return cache


def attended(
    cache: Cache,
    q: np.ndarray,
    rank: int,
    at: np.ndarray,
    sequences: np.ndarray,
    group: int,
    chosen: np.ndarray | None = None,
) -> np.ndarray:
    """Attention of queries [rows, n_head, width] over the cache, or its chosen positions: [rows, n_head, rank]."""
    rows, n_head, width = q.shape
    scale, groups = F(width**-0.5), -(-cache.table.shape[1] // group)
    tops = np.full((rows, groups, n_head, 2), np.nan, F)
    sums, out = np.full((rows, groups, n_head, rank), np.nan, F), np.full((rows, n_head, rank), np.nan, F)
    parts = np.ascontiguousarray(q[..., :rank]), np.ascontiguousarray(q[..., rank:])
    if chosen is None:
        chosen = np.zeros((rows, 0), np.int32)
    else:
        seen, at = at, np.full_like(at, -1)
        run(indexer.ends, seen, chosen.shape[1], at, items=rows)
    given = *parts, cache.rows, at, sequences, cache.table, chosen, scale, tops, sums
    run(latent_attention.attend_groups(group), *given, items=rows * groups)
    run(latent_attention.join_parts(group), tops, sums, at, out, items=rows * n_head)
    return out


@pytest.mark.parametrize("kind", ["f32", "f16"])
@pytest.mark.parametrize(
    ("n_head", "rank", "n_rope", "positions"),
    [(3, 40, 8, [0, 62, 63, 64, 200]), (16, 64, 16, [600, 601]), (20, 96, 32, [511]), (1, 16, 2, [130, 5])],
)
def test_law(kind: str, n_head: int, rank: int, n_rope: int, positions: list[int]) -> None:
    """Also positions before and after borders of chunks and groups, and rows in no order."""
    group = 2
    rng = np.random.default_rng(n_head)
    at, rows, width = np.array(positions, np.int32), len(positions), rank + n_rope
    cache = stored(kind, rank, n_rope, [3, max(positions) + 1], rank)
    sequences = np.ones(rows, np.int32)
    q = 3 * rng.standard_normal((rows, n_head, width)).astype(F)
    out = attended(cache, q, rank, at, sequences, group)
    bits = 16 if kind == "f16" else 32
    keys, values = cache.rows.swapaxes(1, 2), cache.rows[..., :rank]
    pages = (np.ascontiguousarray(x).reshape(1, cache.pages, -1).view(np.uint32) for x in (keys, values))
    empty = np.zeros((rows, n_head, 0), np.int8), np.zeros((rows, n_head, 0), F)
    expected = np.empty_like(out)
    given = (
        q,
        *empty,
        *pages,
        at,
        sequences,
        cache.table,
        F(width**-0.5),
        0,
        np.zeros(0, F),
        attention.NO_PARTS,
        expected,
    )
    run(attention.attend(bits, bits, group), *given, items=rows * n_head)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_rows_of_several_sequences(kind: str) -> None:
    """Each row has the bits that it has alone, whatever the slot and the pages of its sequence are; a row may occur twice."""
    n_head, rank, n_rope, counts = 3, 24, 8, [131, 66, 400]
    sequences, at = np.array([2, 2, 0, 1, 2], np.int32), np.array([398, 399, 130, 65, 398], np.int32)
    cache = stored(kind, rank, n_rope, counts, 1)
    q = np.random.default_rng(2).standard_normal((5, n_head, rank + n_rope)).astype(F)
    q[4] = q[0]
    out = attended(cache, q, rank, at, sequences, 2)
    assert out[4].tobytes() == out[0].tobytes()
    for t, slot in enumerate(sequences):
        # Its sequence as the only one, with pages in the order of chunks.
        alone = LatentCache(
            cache.rows[cache.table[slot]],
            np.arange(cache.table.shape[1], dtype=np.int32)[None],
            cache.k_type,
            cache.v_type,
            cache.width,
            cache.max_rows,
        )
        own = attended(alone, q[t : t + 1], rank, at[t : t + 1], np.zeros(1, np.int32), 2)
        assert out[t : t + 1].tobytes() == own.tobytes()


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_chosen_positions(kind: str) -> None:
    """Each row has the bits of attention to a sequence that has the chosen positions only; without a choice it has none."""
    n_head, rank, n_rope, top_k = 3, 24, 8, 200
    rng, sequences = np.random.default_rng(5), np.array([1, 1, 0, 1], np.int32)
    at = np.array([450, 199, 70, 380], np.int32)
    cache = stored(kind, rank, n_rope, [71, 451], 1)
    q = rng.standard_normal((4, n_head, rank + n_rope)).astype(F)
    chosen = np.full((4, top_k), -1, np.int32)
    for t, p in enumerate(at):
        some = np.sort(rng.permutation(p + 1)[:top_k])
        chosen[t, : some.size] = some
    chosen[3, 0] = -1
    out = attended(cache, q, rank, at, sequences, 2, chosen)
    assert np.isnan(out[3]).all()
    for t, slot in enumerate(sequences[:3]):
        listed = chosen[t][chosen[t] >= 0]
        rows = np.zeros((4 * CHUNK, rank + n_rope), cache.rows.dtype)
        rows[: listed.size] = cache.rows[cache.table[slot, listed // CHUNK], listed % CHUNK]
        pages, table = rows.reshape(4, CHUNK, -1), np.arange(4, dtype=np.int32)[None]
        alone = LatentCache(pages, table, cache.k_type, cache.v_type, cache.width, cache.max_rows)
        own = attended(alone, q[t : t + 1], rank, np.array([listed.size - 1], np.int32), np.zeros(1, np.int32), 2)
        assert out[t : t + 1].tobytes() == own.tobytes()
    everything = attended(cache, q[1:3], rank, at[1:3], sequences[1:3], 2)
    assert out[1:3].tobytes() == everything.tobytes()


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_what_is_stored(kind: str) -> None:
    """The row of a position is in the page of its chunk, of its sequence; no other row changes."""
    rng, of = np.random.default_rng(1), cache_type(kind)
    c, k = rng.standard_normal((3, 24)).astype(F), rng.standard_normal((3, 8)).astype(F)
    cache: Cache = layer_of(LatentCacheSpec(32), 3 * CHUNK, 1, Types(of, of), np.zeros, n_sequences=2)
    at, sequences = np.array([70, 129, 129], np.int32), np.array([1, 1, 0], np.int32)
    run(latent_attention.append_rows, c, k, at, sequences, cache.table, cache.rows, items=3)
    found = cache.rows if kind == "f32" else cache.rows.view(np.float16)
    expected = np.concatenate([c, k], 1).astype(found.dtype)
    for t, (slot, chunk, lane) in enumerate([(1, 1, 6), (1, 2, 1), (0, 2, 1)]):
        assert np.array_equal(found[cache.table[slot, chunk], lane], expected[t])
    assert np.count_nonzero(found.any(2)) == 3
