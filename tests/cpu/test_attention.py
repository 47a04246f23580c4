"""Attention over pages against float64, and the paths whose choice must not affect a bit."""

from itertools import groupby, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from engine.arrays import Batch
from engine.cache.kv import AttentionCacheSpec, KVCache
from engine.cache.sequence import Sequence
from engine.cache.types import BLOCK, CACHE_TYPES, CHUNK, F16, F32, GROUP, Types
from engine.cpu import attention, quantized_cache
from engine.numerics import exp, fma, softcap
from engine.ops.heads import Heads
from tests.batches import one_sequence
from tests.mirror import Mirror as Backend
from tests.pages import layer_of
from tests.sequences import store
from tests.tiers import examples, few

SCALE = 0.125


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, scale: float, window: int) -> np.ndarray:
    """Softmax attention in float64: q [rows, H, d_k] at positions first.., k [n, Hk, d_k], v [n, Hk, d_v]."""
    rows, n_head, _ = q.shape
    out = np.zeros((rows, n_head, v.shape[2]))
    for t in range(rows):
        p = first + t
        low = max(0, p - window + 1) if window else 0
        for h in range(n_head):
            g = h // (n_head // k.shape[1])
            scores = k[low : p + 1, g].astype(np.float64) @ (q[t, h].astype(np.float64) * scale)
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v[low : p + 1, g].astype(np.float64) / weights.sum()
    return out.reshape(rows, -1)


def in_batches(
    ops: Backend, cache: KVCache, q: np.ndarray, k: np.ndarray, v: np.ndarray, batches: list[int]
) -> np.ndarray:
    """Append and attend batch by batch, like a forward pass."""
    rows, first, sequence = [], 0, Sequence(cache)
    for n in batches:
        positions = np.arange(first, first + n, dtype=np.int32)
        store(sequence, first, n)
        span = slice(first, first + n)
        ops.append(cache.layers[0], k[span], v[span], positions)
        rows.append(ops.attend(q[span], cache.layers[0], positions, SCALE))
        first += n
    return np.concatenate(rows)


def run(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, batches: list[int], window: int, half: bool, threads: int = 2
) -> np.ndarray:
    """Append and attend batch by batch, with a cache whose keys and values have one type."""
    ops = Backend(threads)
    shape = AttentionCacheSpec(k.shape[1], k.shape[2], v.shape[2], window)
    cache = KVCache([shape], len(k), max(batches), F16 if half else F32, ops.zeros)
    return in_batches(ops, cache, q, k, v, batches)


def inputs(n: int, heads: int, kv_heads: int, d_k: int, d_v: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    shapes = (n, heads, d_k), (n, kv_heads, d_k), (n, kv_heads, d_v)
    return tuple(rng.standard_normal(shape).astype(np.float32) * 2 for shape in shapes)


@pytest.mark.parametrize("window", [0, 1, 5, 64, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "d_k", "d_v"), [(3, 1, 64, 64), (4, 2, 80, 48), (2, 2, 8, 130)])
def test_against_float64(window: int, heads: int, kv_heads: int, d_k: int, d_v: int) -> None:
    q, k, v = inputs(200, heads, kv_heads, d_k, d_v)
    actual = run(q, k, v, [130, 1, 69], window, half=False)
    expected = reference(q, k, v, 0, SCALE, window)
    # Scores of size ~10 with d_k roundings each, then a weighted mean of values of size ~2.
    assert np.abs(actual - expected).max() < 5e-5


def test_a_float16_cache_is_exact_attention_over_rounded_keys_and_values() -> None:
    q, k, v = inputs(150, 4, 2, 64, 64)
    k16, v16 = (x.astype(np.float16).astype(np.float32) for x in (k, v))
    assert run(q, k, v, [150], 0, half=True).tobytes() == run(q, k16, v16, [150], 0, half=False).tobytes()


@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.sampled_from([0, 3, 64, 90]), st.booleans())
@examples(25)
def test_batches_and_threads_do_not_show(batches: list[int], window: int, half: bool) -> None:
    n = sum(batches)
    q, k, v = inputs(n, 4, 2, 32, 32, seed=n)
    one_by_one = run(q, k, v, [1] * n, window, half, threads=1)
    assert run(q, k, v, batches, window, half).tobytes() == one_by_one.tobytes()


def test_far_apart_scores_neither_overflow_nor_vanish() -> None:
    q, k, v = inputs(130, 1, 1, 64, 64)
    k[7] *= 1e4
    actual = run(q, k, v, [130], 0, half=False)
    assert np.isfinite(actual).all()
    assert np.allclose(actual, reference(q, k, v, 0, SCALE, 0), atol=1e-4)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_hidden_lanes_never_show(window: int, poison: float) -> None:
    """Whatever an older answer has stored in the pages, or a later row of the batch."""
    q, k, v = inputs(100, 2, 1, 64, 80)
    ops = Backend()
    outputs = []
    for fill in (0.0, poison):
        layer = layer_of(AttentionCacheSpec(1, 64, 80, window), 200, 100, F32, ops.zeros)
        layer.keys[:] = fill
        layer.values[:] = fill
        positions = np.arange(100, dtype=np.int32)
        ops.append(layer, k, v, positions)
        outputs.append(ops.attend(q, layer, positions, SCALE).tobytes())
    assert outputs[0] == outputs[1]
    v[70] = poison
    later = run(q, k, v, [100], window, half=False)
    assert np.isfinite(later[:70]).all()


# --- ranges of items -------------------------------------------------------------------------------------------


def unset(words: np.ndarray) -> np.ndarray:
    """Fill an array with NaNs, of float32 and of float16."""
    words.reshape(-1).view(np.uint16)[:] = 0x7FC1
    return words


@pytest.mark.parametrize("kinds", few(["f16 f16", "q8_0 q4_0", "f32 f16", "q4_0 f32"], 2))
@given(st.data())
@examples(20, 3)
def test_ranges_do_not_show(kinds: str, data: st.DataObject) -> None:
    """Any division of the items, in any order, in every kernel of a pass; positions and sequences in any order as well."""
    k_type, v_type = (CACHE_TYPES[name] for name in kinds.split())
    rows, group, heads_kv = (data.draw(st.integers(1, n)) for n in (9, 5, 3))
    d_k = data.draw(st.sampled_from([32, 96] if k_type.quantized else [8, 50, 64, 80]))
    d_v = data.draw(st.sampled_from([32, 96] if v_type.quantized else [2, 48, 66, 112]))
    window, heads, n = data.draw(st.sampled_from([0, 1, 40, 70])), heads_kv * group, 150
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    positions = rng.integers(0, n, rows).astype(np.int32)
    if data.draw(st.booleans()):
        positions = np.arange(positions[0], positions[0] + rows, dtype=np.int32)
    slots = data.draw(st.integers(1, 3))
    sequences = rng.integers(0, slots, rows).astype(np.int32)
    if data.draw(st.booleans()):
        sequences.sort()
    chunks = -(-(n + rows) // CHUNK)
    pages = slots * chunks + 1
    table = rng.permutation(pages)[:-1].reshape(slots, chunks).astype(np.int32)

    def ranges(items: int) -> list[tuple[int, int]]:
        cuts = data.draw(st.lists(st.integers(0, items), max_size=6))
        return data.draw(st.permutations(list(pairwise(sorted({0, items, *cuts})))))

    every = np.tile(np.arange(chunks * CHUNK, dtype=np.int32), slots)
    owners, stored = np.repeat(np.arange(slots, dtype=np.int32), chunks * CHUNK), []
    for kind, d, by_position in ((k_type, d_k, False), (v_type, d_v, True)):
        x = rng.standard_normal((every.size, heads_kv, d)).astype(np.float32)
        whole, parts = (
            unset(np.empty(kind.shape(heads_kv, pages, *((CHUNK, d) if by_position else (d, CHUNK))), kind.dtype))
            for _ in range(2)
        )
        items = every.size * heads_kv
        for memory, divided in ((whole, [(0, items)]), (parts, ranges(items))):
            for at in divided:
                if kind.quantized:
                    quantized_cache.append(x, every, owners, table, kind.bits, by_position, memory, *at)
                else:
                    attention.append(x, every, owners, table, by_position, memory, *at)
        assert parts.tobytes() == whole.tobytes()
        stored.append(whole.reshape(heads_kv, pages, -1).view(np.uint32))
    q = rng.standard_normal((rows, heads, d_k)).astype(np.float32)
    d = d_k if k_type.quantized else 0
    queries = [
        (unset(np.empty((rows, heads, d), np.int8)), np.empty((rows, heads, d // BLOCK), np.float32)) for _ in "ab"
    ]
    for (integers, scales), divided in zip(queries, ([(0, rows * heads)], ranges(rows * heads)), strict=True):
        for at in divided if d else ():
            given = q.reshape(-1, d_k), np.float32(SCALE), integers.reshape(-1, d), scales.reshape(-1, d // BLOCK)
            quantized_cache.quantize_queries(*given, *at)
    assert [x.tobytes() for x in queries[0]] == [x.tobytes() for x in queries[1]]
    kernel, found = attention.attend(k_type.bits, v_type.bits), set()
    sinks = rng.standard_normal(data.draw(st.sampled_from([0, heads]))).astype(np.float32)
    singles = [(item, item + 1) for item in range(rows * heads)]
    for divided in ([(0, rows * heads)], ranges(rows * heads), singles):
        out = unset(np.empty((rows, heads, d_v), np.float32))
        for at in divided:
            given_rows = positions, sequences, table
            kernel(q, *queries[0], *stored, *given_rows, np.float32(SCALE), window, sinks, attention.NO_PARTS, out, *at)
        assert np.isfinite(out).all()
        found.add(out.tobytes())
    assert len(found) == 1


# --- rows of several sequences ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", few(["f16 f16", "i12 i12", "q8_0 q4_0", "i8 i8", "f32 f16", "q4_0 f32"], 3))
@pytest.mark.parametrize("window", [0, 70])
def test_rows_of_several_sequences_are_those_computed_alone(kinds: str, window: int) -> None:
    """In one pass: rows of three sequences, in other slots and pages, of which one row occurs twice; with what is before them
    stored in passes of all sequences as well.  What no row owns is unchanged."""
    rng, d, types = np.random.default_rng(1), 32, Types(*(CACHE_TYPES[name] for name in kinds.split()))
    shape, heads = AttentionCacheSpec(2, d, d, window), Heads[np.ndarray](6, 2, d, d, True, SCALE, 1e-6, None, None)
    # Slot, number of positions before the pass, rows of the pass.
    parts = [(2, 130, 20), (0, 0, 1), (3, 63, 5)]
    joint = layer_of(shape, 256, 64, types, np.zeros, n_sequences=4, seed=1)
    for memory in (joint.keys, joint.values):
        unset(memory)
    free = {int(page) for page in joint.table[1]}
    ops, alone, past, batches = Backend(2), [], [], []
    for slot, before, rows in parts:
        n = before + rows
        q, k, v = (rng.standard_normal((n, heads_of * d)).astype(np.float32) for heads_of in (6, 2, 2))
        layer, found = layer_of(shape, 256, n, types, np.zeros), []
        for first in (*range(0, before, 50), before):
            part = slice(first, min(first + 50, before) if first < before else n)
            positions = np.arange(first, part.stop, dtype=np.int32)
            out = ops.attention(heads, q[part], k[part], v[part], layer, one_sequence(positions), None)
            found.append((positions, np.full(positions.size, slot, np.int32), q[part], k[part], v[part], out))
        alone.append(found)
        last = np.full(rows, n - 1, np.int32)
        past.append(ops.attend_past(heads, q[before:], layer, one_sequence(last), last, None, 40))
    # Passes of the sequences that have as many parts left; the last one has all of them, and a row twice.
    while any(alone):
        most = max(map(len, alone))
        batches.append([found.pop(0) for found in alone if len(found) == most])
    batches[-1].append(batches[-1][1])
    for batch in batches:
        positions, slots, q, k, v, expected = (np.concatenate(columns) for columns in zip(*batch, strict=True))
        mixed = Batch(positions, positions, slots, True)
        assert ops.attention(heads, q, k, v, joint, mixed, None).tobytes() == expected.tobytes()
    ends = np.concatenate([np.full(rows, before + rows - 1, np.int32) for _, before, rows in parts])
    mixed = Batch(ends, ends, slots[: ends.size], True)
    assert (
        ops.attend_past(heads, q[: ends.size], joint, mixed, ends, None, 40).tobytes() == np.concatenate(past).tobytes()
    )
    for memory in (joint.keys, joint.values):
        assert (memory.view(np.uint16)[:, sorted(free)] == 0x7FC1).all()


# --- sinks -----------------------------------------------------------------------------------------------------


@njit
def fused(x, y, z):
    return fma(x, y, z)


def with_sinks(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    window: int,
    sinks: np.ndarray | None,
    kind: str = "f32",
    cap: float = 0.0,
) -> np.ndarray:
    """All rows in one pass: [rows, heads, d_v]."""
    ops, n = Backend(1), len(k)
    shape = AttentionCacheSpec(k.shape[1], k.shape[2], v.shape[2], window)
    layer = layer_of(shape, n, n, Types(CACHE_TYPES[kind], CACHE_TYPES[kind]), ops.zeros)
    positions = np.arange(n, dtype=np.int32)
    ops.append(layer, k, v, positions)
    return ops.attend(q, layer, positions, SCALE, sinks=sinks, cap=cap).reshape(n, q.shape[1], -1)


def score(q: np.ndarray, k: np.ndarray) -> np.float32:
    """The score of a query [d_k] and a key [d_k]."""
    total = np.float32(0)
    for x, y in zip(q * np.float32(SCALE), k, strict=True):
        total = np.float32(fused(x, y, total))
    return total


Sums = tuple[np.float32, np.float32, np.ndarray]
"""The maximum, the sum of weights and the weighted values [d_v] of a chunk, of a group, or of several."""


def chunk_sums(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: range) -> Sums:
    """A chunk of which a query sees the positions ``seen``."""
    f32 = np.float32
    scores = [score(q, k[j]) for j in seen]
    m, p, o = max(scores), np.zeros(CHUNK, f32), np.zeros(v.shape[1], f32)
    p[seen.start % CHUNK :][: len(seen)] = [exp(f32(s - m)) for s in scores]
    for j in seen:
        o = np.array([fused(p[j % CHUNK], x, y) for x, y in zip(v[j], o, strict=True)], f32)
    while p.size > 1:
        p = p[: p.size // 2] + p[p.size // 2 :]
    return m, p[0], o


def joined(parts: list[Sums]) -> Sums:
    """Chunks, or groups, joined in this order."""
    f32 = np.float32
    top, total, result = f32(-np.inf), f32(0), np.zeros_like(parts[0][2])
    for m, weight, o in parts:
        most = max(top, m)
        a, b = f32(exp(f32(top - most))), f32(exp(f32(m - most)))
        total = f32(fused(total, a, f32(b * weight)))
        result = np.array([fused(x, a, f32(b * y)) for x, y in zip(result, o, strict=True)], f32)
        top = most
    return top, total, result


def law(q: np.ndarray, k: np.ndarray, v: np.ndarray, low: int, sink: float | None, group: int = GROUP) -> np.ndarray:
    """The result of the last position for one head, as the kernel's head specifies it: q [d_k], k [n, d_k], v [n, d_v]."""
    chunks = range(low // CHUNK, (len(k) - 1) // CHUNK + 1)
    groups = []
    for _, numbers in groupby(chunks, lambda c: c // group):
        seen = [range(max(low, c * CHUNK), min(len(k), (c + 1) * CHUNK)) for c in numbers]
        groups.append(joined([chunk_sums(q, k, v, positions) for positions in seen]))
    top, total, result = joined(groups)
    if sink is not None:
        most = max(top, np.float32(sink))
        a = np.float32(exp(np.float32(top - most)))
        result, total = result * a, np.float32(fused(total, a, exp(np.float32(np.float32(sink) - most))))
    return result / total


SINKS = st.sampled_from(["smallest", "largest", "equal", "near"])


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 70]), st.lists(SINKS, min_size=2, max_size=2))
@examples(40)
def test_sinks_against_float64_and_the_law(seed: int, window: int, kinds: list[str]) -> None:
    """Much smaller than every score, much larger, equal to the largest, and similar; in one head or in both."""
    q, k, v = inputs(80, 2, 1, 4, 3, seed)
    rng, last = np.random.default_rng(seed), len(k) - 1
    low = max(0, last - window + 1) if window else 0
    tops = [max(score(q[last, h], key) for key in k[low:, 0]) for h in range(2)]
    sinks = np.array(
        [
            {"smallest": -3e38, "largest": 3e38, "equal": top, "near": top + rng.normal()}[kind]
            for kind, top in zip(kinds, tops, strict=True)
        ],
        np.float32,
    )
    actual = with_sinks(q, k, v, window, sinks)
    assert np.isfinite(actual).all()
    for h in range(2):
        s = k[low:, 0].astype(np.float64) @ (q[last, h].astype(np.float64) * SCALE)
        top = max(s.max(), float(sinks[h]))
        weights = np.exp(s - top)
        expected = weights @ v[low:, 0].astype(np.float64) / (weights.sum() + np.exp(float(sinks[h]) - top))
        assert np.abs(actual[last, h] - expected).max() < 5e-5
        assert actual[last, h].tobytes() == law(q[last, h], k[:, 0], v[:, 0], low, float(sinks[h])).tobytes()


@pytest.mark.parametrize("sink", [None, 2.0])
def test_chunks_are_joined_in_groups(sink: float | None) -> None:
    """Bit for bit, in groups of two chunks, of which a row may see one or a part.  The first element of a value is so small
    that its product with a small weight is -0, and 0 where a chunk begins, which has the largest weight."""
    n, differ = 330, 0
    q, k, v = inputs(n, 2, 1, 4, 3)
    q, v[..., 0] = np.abs(q), np.float32(-1e-45)
    k[::CHUNK], v[::CHUNK, :, 0] = k[::CHUNK] + 8, 0
    layer = layer_of(AttentionCacheSpec(1, 4, 3), n, n, F32, Backend(1).zeros)
    Backend(1).append(layer, k, v, np.arange(n, dtype=np.int32))
    given = [memory.reshape(1, layer.pages, -1).view(np.uint32) for memory in (layer.keys, layer.values)]
    slots = np.zeros(4, np.int32)
    last, sinks = np.array([n - 1, 256, 127, 70], np.int32), np.full(0 if sink is None else 2, sink, np.float32)
    none = np.empty((4, 2, 0), np.int8), np.empty((4, 2, 0), np.float32)
    for window in (0, 60, 150, 250):
        out = unset(np.empty((4, 2, 3), np.float32))
        attention.attend(32, 32, 2)(
            q[:4],
            *none,
            *given,
            last,
            slots,
            layer.table,
            np.float32(SCALE),
            window,
            sinks,
            attention.NO_PARTS,
            out,
            0,
            8,
        )
        for t, h in product(range(4), range(2)):
            end, low = int(last[t]) + 1, max(0, int(last[t]) - window + 1) if window else 0
            of_row = q[t, h], k[:end, 0], v[:end, 0], low, sink
            assert out[t, h].tobytes() == law(*of_row, 2).tobytes(), (window, t, h)
            differ += law(*of_row).tobytes() != out[t, h].tobytes()
            if low == 0:
                zero = chunk_sums(*of_row[:3], range(CHUNK))[2][0]
                assert zero == 0 and np.signbit(zero) and not np.signbit(out[t, h, 0])
    assert differ > 0, "no row tells one level from two"


@pytest.mark.parametrize("kind", ["f16", "q8_0", "i8"])
def test_frames_are_windows_of_different_sizes(kind: str) -> None:
    """A row at position p sees as many positions of its frame as p is in it, and one more: in one pass, and each alone."""
    n, d = 3 * CHUNK + 5, 32
    q, k, v = inputs(n, 2, 1, d, d)
    ops, every, types = Backend(2), np.arange(n, dtype=np.int32), Types(CACHE_TYPES[kind], CACHE_TYPES[kind])
    for size in (1, 2, 32, CHUNK, 2 * CHUNK, 4 * CHUNK):
        layer = layer_of(AttentionCacheSpec(1, d, d, size, n, framed=True), n, n, types, ops.zeros)
        ops.append(layer, k, v, every)
        together = ops.attend(q, layer, every, SCALE)
        for p in (*range(0, n, 17), size - 1, size, 2 * size - 1, 2 * size, n - 1):
            if p < n:
                row = q[p : p + 1], layer, every[p : p + 1], SCALE
                found = together[p].tobytes()
                assert ops.attend(*row).tobytes() == found == ops.attend(*row, p % size + 1).tobytes(), (size, p)


@pytest.mark.parametrize("half", [True, False])
def test_more_than_a_group(half: bool) -> None:
    """Rows at every place of the groups, one by one and all at once."""
    n = (2 * GROUP + 1) * CHUNK + 5
    q, k, v = inputs(n, 2, 1, 8, 8)
    layer = layer_of(AttentionCacheSpec(1, 8, 8), n, n, F16 if half else F32, Backend(1).zeros)
    ops, every = Backend(1), np.arange(n, dtype=np.int32)
    ops.append(layer, k, v, every)
    for window in (0, 5 * CHUNK, GROUP * CHUNK + 1):
        together = ops.attend(q, layer, every, SCALE, window)
        for p in (*range(0, n, 97), GROUP * CHUNK - 1, GROUP * CHUNK, n - 1):
            alone = ops.attend(q[p : p + 1], layer, every[p : p + 1], SCALE, window)
            assert alone.tobytes() == together[p : p + 1].tobytes(), (window, p)


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
def test_sinks_of_every_type(kind: str) -> None:
    """A sink that no weight reaches, an infinite one included, changes no bit; one far above all scores leaves zeros; and one
    between divides by a sum that has one more term."""
    q, k, v = inputs(100, 4, 2, 32, 32)
    without = with_sinks(q, k, v, 90, None, kind)
    sinks = np.array([-np.inf, -3e38, 3e38, 1], np.float32)
    actual = with_sinks(q, k, v, 90, sinks, kind)
    assert actual[:, :2].tobytes() == without[:, :2].tobytes()
    assert (actual[:, 2] == 0).all()
    ratio = actual[:, 3] / without[:, 3]
    # The same for all elements of a row, but for rounding, of which results near 0 have most.
    middle = np.median(ratio, axis=1, keepdims=True)
    assert (middle > 0).all() and (middle < 1).all()
    assert np.allclose(actual[:, 3], without[:, 3] * middle, rtol=0, atol=1e-5)


# --- caps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 70])
def test_capped_scores_against_float64_and_the_law(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    cap, n = 1.5, 80
    q, k, v = inputs(n, 2, 1, 4, 3)
    actual, low = with_sinks(q, k, v, window, None, cap=cap), max(0, n - window) if window else 0
    plain, bound = score, njit(lambda x: softcap(x, np.float32(cap)))
    monkeypatch.setitem(globals(), "score", lambda q, k: np.float32(bound(plain(q, k))))
    for h in range(2):
        s = k[low:, 0].astype(np.float64) @ (q[-1, h].astype(np.float64) * SCALE)
        weights = np.exp(cap * np.tanh(s / cap))
        assert np.abs(actual[-1, h] - weights @ v[low:, 0].astype(np.float64) / weights.sum()).max() < 5e-6
        assert actual[-1, h].tobytes() == law(q[-1, h], k[:, 0], v[:, 0], low, None).tobytes()


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0", "i8", "i12"])
def test_capped_scores_of_every_type(kind: str) -> None:
    """A row that sees only its own position and a sink of 0 gives the weight 1 / (1 + exp(-score)), which tells its score."""
    cap = 2.0
    q, k, v = inputs(50, 4, 2, 32, 32)
    zeros, without = np.zeros(4, np.float32), with_sinks(q, k, v, 1, None, kind)
    at = np.abs(without).argmax(axis=2)[..., None]
    most = np.take_along_axis(without, at, 2).astype(np.float64)

    def score_of(cap: float) -> np.ndarray:
        weight = np.take_along_axis(with_sinks(q, k, v, 1, zeros, kind, cap), at, 2) / most
        return np.log(weight / (1 - weight))

    scores = score_of(0.0)
    seen = np.abs(scores) < 8
    assert (np.abs(scores[seen]) > cap).sum() > 20
    assert np.abs(score_of(cap) - cap * np.tanh(scores / cap))[seen].max() < 2e-3


# --- what precedes attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("n_rot", [0, 8, 24])
@pytest.mark.parametrize("norm_after", [True, False])
def test_norms_rotations_and_factors_against_float64(norm_after: bool, n_rot: int, neox: bool) -> None:
    """Of all elements, of some, and of none: the queries that attention gets, and the keys and values in the cache."""
    rows, d, rng = 5, 24, np.random.default_rng(n_rot)
    positions = np.arange(3, 3 + rows, dtype=np.int32)
    q, k, v = (rng.standard_normal((rows, n * d)).astype(np.float32) for n in (4, 2, 2))
    q_norm, k_norm, factors = (rng.uniform(0.5, 2, n).astype(np.float32) for n in (d, d, 8))
    angles = rng.uniform(-3, 3, (8, n_rot // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32) if n_rot else None
    heads = Heads(4, 2, d, d, neox, SCALE, 1e-6, q_norm, k_norm, norm_after=norm_after, query_scales=factors)

    def rotated(x: np.ndarray) -> np.ndarray:
        y, half = x.copy(), n_rot // 2
        first, second = (slice(0, half), slice(half, n_rot)) if neox else (slice(0, n_rot, 2), slice(1, n_rot, 2))
        z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles[positions])[:, None]
        y[..., first], y[..., second] = z.real, z.imag
        return y

    def normalized(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * weight

    def prepared(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        wide = x.reshape(rows, -1, d).astype(np.float64)
        return normalized(rotated(wide), weight) if norm_after else rotated(normalized(wide, weight))

    ops = Backend(1)
    layer, seen = layer_of(AttentionCacheSpec(2, d, d), 64, rows, F32, ops.zeros), dict[str, np.ndarray]()
    ops.observe(lambda told: seen.update(told.values))
    ops.attention(heads, q.copy(), k.copy(), v.copy(), layer, one_sequence(positions), table)
    ops.observe(None)
    expected = prepared(q, q_norm) * factors[positions, None, None].astype(np.float64)
    assert np.allclose(seen["query"], expected, rtol=1e-5, atol=1e-6)
    assert layer.pages == 1
    keys = layer.keys[:, 0, :, positions]  # [rows, heads, d]
    assert np.allclose(keys, prepared(k, k_norm), rtol=1e-5, atol=1e-6)
    assert np.array_equal(layer.values[:, 0, positions].swapaxes(0, 1), v.reshape(rows, 2, d))


# --- weights ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(0, CHUNK - 1), st.integers(1, CHUNK), st.sampled_from([1, 50, 1e30]))
@examples(100)
def test_weights_are_those_of_the_scalar_law(seed: int, first: int, n: int, size: float) -> None:
    """Every lane has the bits of ``exp``, whatever hidden lanes hold."""
    rng = np.random.default_rng(seed)
    last = min(CHUNK, first + n)
    p = (rng.standard_normal(CHUNK) * size).astype(np.float32)
    p[rng.random(CHUNK) < 0.1] = -np.inf
    p[last - 1] = rng.standard_normal()
    visible = p[first:last].copy()
    p[:first], p[last:] = np.nan, np.inf
    m = attention.weigh(p, first, last)
    assert m == visible.max()
    expected = np.zeros(CHUNK, np.float32)
    expected[first:last] = [exp(np.float32(x - m)) for x in visible]
    assert p.tobytes() == expected.tobytes()
