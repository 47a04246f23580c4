"""Hyper-connections, compressed rows, the indexer and attention over them, each against float64 and against another division
of the rows into passes."""

from typing import Any

import numpy as np
import pytest

from engine.arrays import Batch
from engine.cache.compressed import Blocks, CompressedCache, CompressedCacheSpec
from engine.cache.kv import AttentionCacheSpec
from engine.cache.types import F16, F32, Types
from engine.cpu import compressed_attention, hyper, indexer
from engine.cpu.backend import Backend
from engine.ops.compressor import Compressor
from tests.batches import one_sequence
from tests.pages import layer_of

f32 = np.float32


def rows_of(first: int, count: int) -> Batch[np.ndarray]:
    return one_sequence(np.arange(first, first + count, dtype=np.int32))


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(f32)


def memory(
    shape: CompressedCacheSpec, n_ctx: int, max_rows: int, types: Types = F32, n_sequences: int = 1, seed: int = 0
) -> CompressedCache[np.ndarray]:
    layer: CompressedCache[np.ndarray] = layer_of(shape, n_ctx, max_rows, types, np.zeros, None, n_sequences, seed)
    return layer


def mixed(*runs: tuple[int, int, int]) -> Batch[np.ndarray]:
    """A pass of runs (slot, first position, number of rows); number 0: the row before, once more."""
    sequences, positions = [], []
    for slot, first, count in runs:
        sequences += [slot] * max(1, count)
        positions += list(range(first, first + max(1, count)))
    n = len(positions)
    return Batch(np.zeros(n, np.int32), np.array(positions, np.int32), np.array(sequences, np.int32), True)


def rows_in(blocks: Blocks[np.ndarray], slot: int = 0, transposed: bool = False) -> np.ndarray:
    """The compressed rows of a sequence, [rows, d]."""
    pages = blocks.rows[blocks.table[slot]]
    return (pages.swapaxes(1, 2) if transposed else pages).reshape(-1, pages.shape[1 if transposed else 2])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


# --- hyper-connections -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_the_weights_of_streams_against_float64(rounds: int) -> None:
    m, scale, base, epsilon = 2 * draw(5, 24), draw(3), draw(24), 1e-3
    found = Backend(2).stream_weights(m, scale, base, epsilon, rounds)
    z = m.astype(np.float64) * np.repeat(scale.astype(np.float64), [4, 4, 16]) + base
    c = np.exp(z[:, 8:].reshape(5, 4, 4))
    c = c / c.sum(2, keepdims=True) + epsilon
    for i in range(rounds):
        if i:
            c /= c.sum(2, keepdims=True) + epsilon
        c /= c.sum(1, keepdims=True) + epsilon
    expected = np.concatenate([sigmoid(z[:, :4]) + epsilon, 2 * sigmoid(z[:, 4:8]), c.reshape(5, 16)], 1)
    assert np.abs(found - expected).max() < 2e-6
    last = Backend(1).stream_weights(m[:, :4].copy(), scale[:1], base[:4], epsilon, rounds)
    assert last.tobytes() == found[:, :4].tobytes()


def test_streams_against_float64() -> None:
    ops, n = Backend(2), 70
    x, y, weights = draw(3, 4 * n), draw(3, n), draw(3, 24)
    streams, c = x.reshape(3, 4, n).astype(np.float64), weights[:, 8:].reshape(3, 4, 4)
    assert np.abs(ops.collapse(x, weights) - np.einsum("ts,tsi->ti", weights[:, :4], streams)).max() < 2e-6
    expected = weights[:, 4:8, None] * y[:, None] + np.einsum("tsd,tsi->tdi", c, streams)
    assert np.abs(ops.expand(x, y, weights).reshape(3, 4, n) - expected).max() < 3e-6
    assert np.array_equal(ops.repeat(y, 4), np.tile(y, 4))
    assert hyper.STREAMS == 4


# --- rotation of tails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("normed", [False, True])
def test_tails_are_rotated_and_back(normed: bool) -> None:
    ops, x, norm, batch = Backend(1), draw(3, 2 * 24), draw(24), rows_of(5, 3)
    angles = draw(8, 4).astype(np.float64)
    table = np.stack([np.cos(angles), np.sin(angles)], 1).astype(f32)
    y = ops.rotate_tail(x, 2, batch, table, norm if normed else None, 1e-6)
    heads = x.reshape(3, 2, 24).astype(np.float64)
    if normed:
        heads = heads / np.sqrt((heads**2).mean(2, keepdims=True) + 1e-6) * norm
    turned = (heads[..., 16::2] + 1j * heads[..., 17::2]) * np.exp(1j * angles[5:8])[:, None]
    expected = heads.copy()
    expected[..., 16::2], expected[..., 17::2] = turned.real, turned.imag
    assert np.abs(y.reshape(3, 2, 24) - expected).max() < 2e-6
    assert np.abs(ops.rotate_tail(y, 2, batch, table, inverse=True).reshape(3, 2, 24) - heads).max() < 2e-6


# --- compressed rows -------------------------------------------------------------------------------------------

D, N_ROT = 48, 8


def compressed(ratio: int, overlap: int, batches: list[int], types: Types = F32, transposed: bool = False) -> Any:
    """The rows of a text that is read in batches, and what they are made of."""
    n, width = sum(batches), overlap * D
    values, scores = draw(n, width, seed=1), 2 * draw(n, width, seed=2)
    law = Compressor(ratio, overlap, draw(ratio, width, seed=3), draw(D, seed=4), 1e-6)
    angles = draw(n, N_ROT // 2, seed=5).astype(np.float64)
    table = np.stack([np.cos(angles), np.sin(angles)], 1).astype(f32)
    shape = CompressedCacheSpec(D, 32, ratio, overlap, D if transposed else 0, 1, 9)
    layer, ops, first = memory(shape, n, max(batches), types), Backend(2), 0
    blocks = layer.keys if transposed else layer.compressed
    assert blocks is not None
    for count in batches:
        span = slice(first, first + count)
        ops.compress(law, values[span], scores[span], blocks, rows_of(first, count), table, transposed)
        first += count
    return rows_in(blocks, 0, transposed), (values, scores, law, angles)


@pytest.mark.parametrize(("ratio", "overlap"), [(4, 2), (5, 1), (128, 1)])
def test_compressed_rows_against_float64(ratio: int, overlap: int) -> None:
    n = 300
    rows, (values, scores, law, angles) = compressed(ratio, overlap, [130, 1, 1, 68, 100])
    own = scores + np.tile(law.ape, (-(-n // ratio), 1))[:n].astype(np.float64)
    half = (overlap - 1) * D
    for r in range(n // ratio):
        block = slice(r * ratio, (r + 1) * ratio)
        a, b = values[block, half:].astype(np.float64), own[block, half:]
        if overlap == 2 and r:
            before = slice((r - 1) * ratio, r * ratio)
            a, b = np.concatenate([values[before, :D], a]), np.concatenate([own[before, :D], b])
        p = np.exp(b - b.max(0))
        x = (p * a).sum(0) / p.sum(0)
        x = x / np.sqrt((x**2).mean() + law.eps) * law.norm
        turned = (x[-N_ROT::2] + 1j * x[1 - N_ROT :: 2]) * np.exp(1j * angles[r * ratio])
        x[-N_ROT::2], x[1 - N_ROT :: 2] = turned.real, turned.imag
        assert np.abs(rows[r] - x).max() < 5e-6
    assert not rows[n // ratio :].any()


@pytest.mark.parametrize(("ratio", "overlap"), [(4, 2), (7, 1)])
def test_the_division_of_a_text_does_not_show_in_compressed_rows(ratio: int, overlap: int) -> None:
    expected, _ = compressed(ratio, overlap, [1] * 150)
    for batches in ([150], [3, 5, 140, 2], [20] * 7 + [10], [63, 1, 65, 21]):
        assert compressed(ratio, overlap, batches)[0].tobytes() == expected.tobytes()
    turned, _ = compressed(ratio, overlap, [149, 1], transposed=True)
    assert turned.tobytes() == expected.tobytes()
    half, _ = compressed(ratio, overlap, [70, 80], F16)
    assert half.tobytes() == expected.astype(np.float16).view(np.uint16).tobytes()


# --- the indexer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("types", [F32, F16])
@pytest.mark.parametrize(("top_k", "n_head"), [(5, 1), (64, 6), (100, 3)])
def test_the_rows_with_the_largest_scores_are_chosen(types: Types, top_k: int, n_head: int) -> None:
    ratio, d, n_ctx = 4, 32, 1200
    layer = memory(CompressedCacheSpec(8, 32, ratio, 2, d, top_k, 9), n_ctx, 8, types)
    keys = draw(n_ctx // ratio, d, seed=1).astype(np.float16).astype(f32)
    # Equal rows have equal scores.
    keys[40:80] = keys[:40]
    assert layer.keys is not None
    flat = rows_in(layer.keys, 0, True).copy()
    flat[: len(keys)] = keys if types is F32 else keys.astype(np.float16).view(np.uint16)
    layer.keys.rows[layer.keys.table[0]] = flat.reshape(-1, 64, d).swapaxes(1, 2)
    positions = np.array([0, 3, 18, 19, 255, 399, 403, 600, 1199], np.int32)
    batch = one_sequence(positions)
    q, w = draw(9, n_head * d, seed=2), draw(9, n_head, seed=3)
    chosen = Backend(2).choose_rows(q, w, 0.25, ratio, top_k, layer.keys, batch)
    for t, p in enumerate(positions):
        n = (p + 1) // ratio
        dots = np.maximum(q[t].reshape(n_head, d).astype(np.float64) @ keys[:n].T.astype(np.float64), 0)
        scores = (w[t].astype(np.float64) * 0.25) @ dots
        # Rounding would decide between unequal rows only if they were this close.
        order = np.argsort(-np.round(scores, 5), kind="stable")[: min(n, top_k)]
        assert chosen[t].tolist() == sorted(order.tolist()) + [-1] * (top_k - len(order))


def test_the_threshold_is_exact() -> None:
    random = np.random.default_rng(0)
    for n in (2, 9, 300):
        scores = random.integers(-3, 3, n).astype(f32) * random.choice([0.0, 1.0, 1e-30], n).astype(f32)
        for k in range(1, n):
            chosen = np.empty((1, k), np.int32)
            indexer.choose(scores[None], np.array([n - 1], np.int32), 1, chosen, 0, 1)
            assert chosen[0].tolist() == sorted(np.argsort(-scores, kind="stable")[:k].tolist())


# --- attention -------------------------------------------------------------------------------------------------


def attend(
    n_head: int, d: int, window: int, ratio: int, top_k: int, positions: list[int], types: Types, seed: int = 0
) -> tuple[np.ndarray, Any]:
    """Attention of single positions over drawn latents and rows, the result and what it is made of."""
    n_ctx, ops = max(positions) + 1, Backend(2)
    layer = memory(CompressedCacheSpec(d, window, ratio, 1, 0, top_k, 9), n_ctx, 64, types)
    latents, rows = draw(n_ctx, d, seed=seed), draw(max(1, n_ctx // max(ratio, 1)), d, seed=seed + 1)
    if layer.compressed is not None:
        flat = rows_in(layer.compressed).copy()
        flat[: n_ctx // ratio] = rows if types is F32 else rows.astype(np.float16).view(np.uint16)
        layer.compressed.rows[layer.compressed.table[0]] = flat.reshape(-1, 64, d)
    q, sinks, random = draw(len(positions), n_head * d, seed=seed + 2), draw(n_head, seed=9), np.random.default_rng(1)
    chosen, out = np.zeros((len(positions), top_k), np.int32), []
    for t, p in enumerate(positions):
        seen = (p + 1) // ratio if ratio else 0
        chosen[t, : min(top_k, seen)] = np.sort(random.permutation(seen)[:top_k])
        first = max(0, p - window + 1)
        ops.keep_latents(latents[first : p + 1], layer, rows_of(first, p + 1 - first))
        given = q[t : t + 1], layer, rows_of(p, 1), d**-0.5, sinks, ratio, chosen[t : t + 1] if top_k else None
        out.append(ops.attend_compressed(*given))
    return np.concatenate(out), (q, latents, rows, sinks, chosen)


@pytest.mark.parametrize("types", [F32, F16])
@pytest.mark.parametrize(
    ("n_head", "d", "window", "ratio", "top_k"), [(3, 64, 40, 0, 0), (36, 48, 100, 2, 0), (5, 80, 16, 2, 130)]
)
def test_attention_against_float64(n_head: int, d: int, window: int, ratio: int, top_k: int, types: Types) -> None:
    """Up to two groups of compressed rows, more heads than an item, windows over the edges of chunks and groups."""
    positions = [0, 1, 38, 63, 64, 127, 300, 511, 530, 1300]
    found, (q, latents, rows, sinks, chosen) = attend(n_head, d, window, ratio, top_k, positions, types)
    if types is F16:
        latents, rows = (x.astype(np.float16) for x in (latents, rows))
    for t, p in enumerate(positions):
        seen = (p + 1) // ratio if ratio else 0
        listed = chosen[t, : min(top_k, seen)] if top_k else np.arange(seen)
        keys = np.concatenate([rows[listed], latents[max(0, p - window + 1) : p + 1]]).astype(np.float64)
        scores = q[t].reshape(n_head, d).astype(np.float64) @ keys.T * d**-0.5
        every = np.exp(np.concatenate([scores, sinks[:, None]], 1))
        expected = (every / every.sum(1, keepdims=True))[:, :-1] @ keys
        assert np.abs(found[t].reshape(n_head, d) - expected).max() < 3e-6


@pytest.mark.parametrize("types", [F32, F16])
def test_without_compressed_rows_it_is_attention(types: Types) -> None:
    """The same bits as with a cache of keys and one of values that are equal."""
    n_head, d, window, n = 4, 64, 100, 640
    ops, x, q, sinks = Backend(1), draw(n, d), draw(n, n_head * d, seed=1), draw(n_head, seed=2)
    layer = memory(CompressedCacheSpec(d, window, 0, 1, 0, 0, 9), n, 128, types)
    usual = layer_of(AttentionCacheSpec(1, d, d, window), n, 128, types, np.zeros)
    for first in range(0, n, 128):
        batch, span = rows_of(first, 128), slice(first, first + 128)
        ops.keep_latents(x[span], layer, batch)
        ops.append(usual, x[span, None], x[span, None], batch.positions)
        found = ops.attend_compressed(q[span], layer, batch, 0.125, sinks, 0, None)
        expected = ops.attend(q[span].reshape(128, n_head, d), usual, batch.positions, 0.125, sinks=sinks)
        assert found.tobytes() == expected.tobytes()


def test_groups_join_in_order() -> None:
    """Groups of two chunks give other bits than groups of eight: the second level of joining is at work."""
    q, sinks, positions = draw(1, 16, 64), draw(16), np.array([400], np.int32)
    latents, rows, none = draw(7, 64, 64), draw(7, 64, 64), np.zeros((1, 0), np.int32)
    out = [np.empty((1, 16, 64), f32) for _ in range(2)]
    for group, result in zip((2, 8), out, strict=True):
        table, slots = np.arange(7, dtype=np.int32)[None], np.zeros(1, np.int32)
        given = q, latents, table, rows, table, none, positions, slots, 300, 1, f32(0.125), sinks, result
        compressed_attention.attend(group)(*given, 0, 1)
    assert np.abs(out[0] - out[1]).max() < 1e-6 and out[0].tobytes() != out[1].tobytes()


# --- several sequences -----------------------------------------------------------------------------------------

SEQUENCES = ((0, 250, 70), (2, 57, 5), (1, 62, 5))
"""Runs of a pass: the slot, the first position, the number of rows.  One begins where another one ends."""


@pytest.mark.parametrize("types", [F32, F16])
def test_rows_of_several_sequences_are_computed_as_alone(types: Types) -> None:
    """Latents, compressed rows, keys, open blocks, choices and attention: the second pass of three sequences, one of which is
    longer than the ring of its open block, equals theirs in memories of their own."""
    ratio, overlap, n_head, top_k, d_key, n_ctx = 4, 2, 3, 3, 16, 400
    shape = CompressedCacheSpec(D, 40, ratio, overlap, d_key, top_k, 9)
    together, width, ops = memory(shape, n_ctx, 128, types, 3, seed=1), overlap * D, Backend(2)
    laws = [Compressor(ratio, overlap, draw(ratio, overlap * d, seed=3), draw(d, seed=4), 1e-6) for d in (D, d_key)]
    table, sinks = draw(n_ctx, 2, 4, seed=5), draw(n_head, seed=6)
    assert shape.pending(128) < max(count for _, _, count in SEQUENCES)

    def run(layer: Any, batch: Batch[np.ndarray], given: np.ndarray) -> np.ndarray:
        parts = np.split(given, np.cumsum([width, width, 2 * d_key, 2 * d_key, D, n_head * D, n_head * d_key]), 1)
        a, b, c, e, x, q, queries, weights = (np.ascontiguousarray(part) for part in parts)
        ops.keep_latents(x, layer, batch)
        ops.compress(laws[0], a, b, layer.compressed, batch, table)
        ops.compress(laws[1], c, e, layer.keys, batch, table, True)
        chosen = ops.choose_rows(queries, weights, 0.25, ratio, top_k, layer.keys, batch)
        return np.hstack([ops.attend_compressed(q, layer, batch, 0.2, sinks, ratio, chosen), chosen.astype(f32)])

    n = 2 * width + 4 * d_key + D + n_head * D + n_head * d_key + n_head
    expected, alone = [], []
    for slot, first, count in SEQUENCES:
        layer, given = memory(shape, n_ctx, 128, types), draw(first + count, n, seed=10 + slot)
        if first:
            run(layer, rows_of(0, first), given[:first])
            run(together, mixed((slot, 0, first)), given[:first])
        expected.append(run(layer, rows_of(first, count), given[first:]))
        alone.append((slot, layer, given[first:]))
    found = run(together, mixed(*SEQUENCES), np.concatenate([given for _, _, given in alone]))
    assert found.tobytes() == np.concatenate(expected).tobytes()
    for (slot, layer, _), (_, first, count) in zip(alone, SEQUENCES, strict=True):
        for own, every in ((layer.compressed, together.compressed), (layer.keys, together.keys)):
            assert own is not None and every is not None
            turned = own is layer.keys
            assert rows_in(every, slot, turned).tobytes() == rows_in(own, 0, turned).tobytes()
            assert every.pending[slot].tobytes() == own.pending[0].tobytes()
        latents = (x.latents[x.table[s]].reshape(-1, D) for x, s in ((together, slot), (layer, 0)))
        one, other = (x[max(0, first + count - 40) : first + count] for x in latents)
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_copies_of_the_last_row_change_nothing(count: int) -> None:
    """The last row completes a block whose other tokens are in the pass, in the open block, or in both."""
    ratio, d, end = 4, 32, 80
    shape = CompressedCacheSpec(d, 32, ratio, 2, d, 2, 9)
    law, table = Compressor(ratio, 2, draw(ratio, 2 * d, seed=3), draw(d, seed=4), 1e-6), draw(end, 2, 4, seed=5)
    layers, ops = [memory(shape, end, 16, F32, 2) for _ in range(2)], Backend(2)
    runs = (0, 20, 3), (1, end - count, count)
    for layer, batch in zip(layers, (mixed(*runs), mixed(*runs, *[(1, end - 1, 0)] * 3)), strict=True):
        random = np.random.default_rng(0)
        for blocks in (layer.compressed, layer.keys):
            assert blocks is not None
            blocks.pending[:] = random.standard_normal(blocks.pending.shape)
        rows = np.minimum(np.arange(batch.rows), 2 + count)
        values, scores = draw(8, 2 * d, seed=1)[rows], draw(8, 2 * d, seed=2)[rows]
        for blocks, turned in ((layer.compressed, False), (layer.keys, True)):
            assert blocks is not None
            ops.compress(law, values, scores, blocks, batch, table, turned)
            ops.round_rows(blocks, ratio, 8, batch, turned)
    for name in ("compressed", "keys"):
        one, other = (getattr(layer, name) for layer in layers)
        assert one.rows.any() and one.rows.tobytes() == other.rows.tobytes()
        assert one.pending.tobytes() == other.pending.tobytes()
