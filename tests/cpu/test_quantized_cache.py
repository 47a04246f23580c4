"""Quantized keys and values: rotation, blocks, layout and scores, each against NumPy or ``gguf.quants``; attention over them
against float64, and the paths whose choice must not affect a bit."""

from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from engine.cache.kv import AttentionCache, AttentionCacheSpec, KVCache
from engine.cache.sequence import Sequence
from engine.cache.types import BLOCK, CACHE_TYPES, CHUNK, GROUP, CacheType, Types
from engine.cpu import quantized_cache
from engine.cpu.lanes import ROWS
from engine.numerics import fma
from tests.cpu.test_attention import SCALE, in_batches, inputs, reference
from tests.mirror import Mirror as Backend
from tests.pages import chunks_of, layer_of
from tests.sequences import store
from tests.test_numerics import round_to_float32
from tests.tiers import examples

QUANTIZED = ("q8_0", "q4_0")
PAIRS = [pair for pair in product(("f32", "f16", *QUANTIZED), repeat=2) if set(pair) & set(QUANTIZED)]
"""Types of keys and values, at least one of them quantized."""

GGUF_TYPES = {"q8_0": T.Q8_0, "q4_0": T.Q4_0}
ULP = 2.0**-24
"""Largest relative error of one rounding to float32."""


def hadamard(n: int) -> np.ndarray:
    """Sylvester's matrix, float64 [n, n], of 1 and -1."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.kron(np.array([[1, 1], [1, -1]]), h)
    return h


H = hadamard(BLOCK) / np.sqrt(BLOCK)


def rotated(x: np.ndarray) -> np.ndarray:
    """Rotate blocks of the last axis, in float64; doing it twice is the identity."""
    return (x.reshape(*x.shape[:-1], -1, BLOCK).astype(np.float64) @ H).reshape(x.shape)


@dataclass
class Stored:
    """The contents of pages, read as ``engine/cache/types.py`` describes them: integers [heads, positions, d] and a scale
    for each block, float64 [heads, positions, d / 32]."""

    integers: np.ndarray
    scales: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """float64 [heads, positions, d]."""
        return self.integers * np.repeat(self.scales, BLOCK, axis=2)


def stored(ring: np.ndarray, kind: CacheType, d: int, by_position: bool) -> Stored:
    heads, chunks, _ = ring.shape
    n = CHUNK * d * kind.bits // 32
    data = np.ascontiguousarray(ring[..., :n]).view(np.uint8)
    halves = np.ascontiguousarray(ring[..., n:]).view(np.float16).astype(np.float64)
    if by_position:
        data = data.reshape(heads, chunks, CHUNK, -1)
        halves = halves.reshape(heads, chunks, CHUNK, -1)
    else:
        data = data.reshape(heads, chunks, -1, CHUNK, 16).swapaxes(2, 3)
        halves = halves.reshape(heads, chunks, -1, CHUNK).swapaxes(2, 3)
    if kind.bits == 8:
        integers = np.ascontiguousarray(data).view(np.int8).astype(np.int64)
    else:
        words = data.reshape(heads, chunks, CHUNK, -1, 4).astype(np.int64)
        integers = np.concatenate([words & 15, words >> 4], axis=4) - 8
    return Stored(integers.reshape(heads, -1, d), halves.reshape(heads, -1, d // BLOCK))


def put(x: np.ndarray, kind: CacheType, by_position: bool) -> Stored:
    """The result of storing rows x float32 [n, d], already rotated, at positions 0 and on."""
    chunks = (len(x) + CHUNK - 1) // CHUNK
    shape = (CHUNK, x.shape[1]) if by_position else (x.shape[1], CHUNK)
    ring = np.zeros(kind.shape(1, chunks, *shape), np.uint32)
    for p, row in enumerate(x):
        quantized_cache.store(ring[0, p // CHUNK], p % CHUNK, row, kind.bits, by_position)
    both = stored(ring, kind, x.shape[1], by_position)
    return Stored(both.integers[:, : len(x)], both.scales[:, : len(x)])


def new(
    heads: int, d_k: int, d_v: int, kinds: tuple[str, str], n_ctx: int, window: int = 0, rows: int = 128
) -> AttentionCache:
    """The memory of a layer, with pages for every chunk that a pass may need."""
    shape, types = AttentionCacheSpec(heads, d_k, d_v, window), Types(*(CACHE_TYPES[kind] for kind in kinds))
    layer: AttentionCache = layer_of(shape, n_ctx, rows, types, np.zeros)
    return layer


def cache_of(
    heads: int, d_k: int, d_v: int, kinds: tuple[str, str], n_ctx: int, window: int = 0, rows: int = 128
) -> KVCache:
    """A cache of one layer, whose pages a sequence takes."""
    shape = AttentionCacheSpec(heads, d_k, d_v, window)
    return KVCache([shape], n_ctx, rows, Types(*(CACHE_TYPES[kind] for kind in kinds)), np.zeros)


def contents(layer: AttentionCache) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values as they were before they were rotated: float64 [positions, heads, d]."""
    found = []
    for kind, memory, d, by_position in (
        (layer.k_type, layer.keys, layer.d_k, False),
        (layer.v_type, layer.values, layer.d_v, True),
    ):
        chunks = chunks_of(memory, layer)
        if kind.quantized:
            x = rotated(stored(chunks, kind, d, by_position).values)
        else:
            x = (chunks.view(np.float16) if kind.bits == 16 else chunks).astype(np.float64)
            x = (x if by_position else x.swapaxes(2, 3)).reshape(layer.n_head_kv, -1, d)
        found.append(x.swapaxes(0, 1))
    return found[0], found[1]


# --- rotation --------------------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.sampled_from([1e-30, 1e-3, 1, 1e30]), st.integers(1, 4))
@examples(30)
def test_rotation_against_the_matrix(seed: int, scale: float, blocks: int) -> None:
    x = (np.random.default_rng(seed).standard_normal((5, blocks * BLOCK)) * scale).astype(np.float32)
    once = x.copy()
    quantized_cache.rotate_rows(once, 0, 2)
    quantized_cache.rotate_rows(once, 2, 5)
    # Five sums and a product are rounded, and the root is: each partial sum is at most the sum of all magnitudes.
    bound = 7 * ULP * np.repeat(np.abs(x.reshape(5, -1, BLOCK)).sum(axis=2), BLOCK, axis=1) / np.sqrt(BLOCK)
    assert (np.abs(once - rotated(x)) <= bound).all()
    twice = once.copy()
    quantized_cache.rotate_rows(twice, 0, 5)
    assert np.abs(twice - x).max() <= 2 * np.sqrt(BLOCK) * bound.max()


def test_rotation_is_orthonormal_and_its_own_inverse() -> None:
    matrix = np.eye(BLOCK, dtype=np.float32)
    quantized_cache.rotate_rows(matrix, 0, BLOCK)
    assert np.array_equal(matrix, H.astype(np.float32))
    assert np.array_equal(matrix, matrix.T)
    assert np.allclose(matrix.astype(np.float64) @ matrix, np.eye(BLOCK), atol=1e-6)


def test_an_outlier_is_shared_by_its_block() -> None:
    x = np.random.default_rng(1).standard_normal((64, BLOCK)).astype(np.float32)
    x[:, 5] *= 100
    plain = put(x, CACHE_TYPES["q4_0"], False).values[0]
    turned = rotated(put(rotated(x).astype(np.float32), CACHE_TYPES["q4_0"], False).values[0])
    others = np.arange(BLOCK) != 5
    assert np.abs(turned - x)[:, others].mean() < np.abs(x)[:, others].mean()
    assert np.abs(turned - x).mean() < 2 * np.abs(plain - x).mean()


# --- blocks ----------------------------------------------------------------------------------------------------


@st.composite
def blocks(draw: st.DrawFn) -> np.ndarray:
    """A block: noise of any size a float16 scale can have, zeros, tiny ones, outliers, and maxima of both signs."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    x: np.ndarray = random.standard_normal(BLOCK) * 10.0 ** draw(st.integers(-44, 4))
    kind = draw(st.sampled_from(["noise", "zero", "some zeros", "outlier", "tie", "equal", "steps"]))
    at = draw(st.integers(0, BLOCK - 1))
    if kind == "zero":
        x[:] = draw(st.sampled_from([0.0, -0.0]))
    elif kind == "some zeros":
        x[random.random(BLOCK) < 0.5] = 0
    elif kind == "outlier":
        x[at] *= 10.0 ** draw(st.integers(1, 30))
    elif kind == "tie":
        x[at] = np.abs(x).max() * 1.5
        x[(at + draw(st.integers(1, BLOCK - 1))) % BLOCK] = -x[at]
    elif kind == "equal":
        x[:] = x[at]
    elif kind == "steps":
        x = random.integers(-127, 128, BLOCK) * 0.5
    return np.clip(x, -5e5, 5e5).astype(np.float32)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("name", QUANTIZED)
@given(st.lists(blocks(), min_size=1, max_size=4))
@examples(150)
def test_blocks_against_gguf(name: str, by_position: bool, x: list[np.ndarray]) -> None:
    rows = np.stack(x)
    found = put(rows, CACHE_TYPES[name], by_position)
    with np.errstate(all="ignore"):  # it divides by what is too small
        packed = gguf.quants.quantize(rows, GGUF_TYPES[name])
    theirs = gguf.quants.dequantize(packed, GGUF_TYPES[name]).astype(np.float64)
    scales = packed.reshape(len(rows), -1)[:, :2].copy().view(np.float16).astype(np.float64)
    ours, step = found.values[0], found.scales[0]
    # If the largest magnitude occurs with both signs, q4_0 may use either.
    assert np.array_equal(np.abs(step), np.abs(scales))
    assert name == "q4_0" or np.array_equal(step, scales)
    assert (np.abs(ours - theirs) <= np.abs(step)).all()
    # Half a step; one step where the integers end below the largest value; and the effect of rounding the scale on the
    # largest integer: half of 2**-10 of it, or of the smallest float16.
    rounded = {"q8_0": 127, "q4_0": 8}[name] * np.maximum(np.abs(step) * 2.0**-11, 2.0**-25)
    assert (np.abs(ours - rows) <= np.abs(step) * (0.5001 if name == "q8_0" else 1.0001) + rounded).all()
    most = {"q8_0": 127, "q4_0": 8}[name]
    assert np.abs(found.integers).max() <= most
    assert (np.abs(found.integers).max(axis=2) == most)[0, np.abs(rows).max(axis=1) > 1e-6].all()


def test_q4_0_rounds_once_before_it_truncates() -> None:
    """Values next to the borders between two integers, where one more rounding, of the product, gives the other integer."""
    random = np.random.default_rng(5)
    shown = 0
    for largest in random.uniform(0.5, 4.0, 200).astype(np.float32):
        inverse = np.float32(-8) / largest
        x = ((random.integers(1, 16, BLOCK) - 8.5) / inverse).astype(np.float32)
        x = np.where(random.random(BLOCK) < 0.5, x, np.nextafter(x, random.choice([-9, 9], BLOCK).astype(np.float32)))
        x[0] = largest
        sums = [round_to_float32(Fraction(float(v)) * Fraction(float(inverse)) + Fraction(17, 2)) for v in x]
        expected = np.minimum(np.array(sums).astype(int), 15) - 8
        found = np.empty(BLOCK, np.int8)
        quantized_cache.quantize_block(x, 4, found)
        assert np.array_equal(found, expected)
        shown += ((x * inverse + np.float32(8.5)).astype(int) - 8 != expected)[1:].sum()
    assert shown > 0, "no value tells one rounding from two"


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_too_small_to_divide_by_counts_as_zero(name: str) -> None:
    x = np.zeros((4, BLOCK), np.float32)
    x[0, 3], x[1, 4], x[2, 5] = 2.0**-149, -(2.0**-126), 2.0**-100
    found = put(x, CACHE_TYPES[name], False)
    assert not found.scales.any()
    assert not found.integers[0, [0, 1, 3]].any()


@given(st.lists(blocks(), min_size=1, max_size=4))
@examples(50)
def test_queries_are_quantized_as_keys_are_with_a_wider_scale(x: list[np.ndarray]) -> None:
    row = np.concatenate(x)
    q, d = np.empty(row.size, np.int8), np.empty(len(x), np.float32)
    quantized_cache.quantize_query(row, q, d)
    amax = np.abs(row.reshape(-1, BLOCK)).max(axis=1)
    amax[amax < 2.0**-100] = 0
    assert np.array_equal(d, amax / np.float32(127))
    kept = amax > 0
    assert np.array_equal(q.reshape(-1, BLOCK), put(row[None], CACHE_TYPES["q8_0"], False).integers.reshape(-1, BLOCK))
    error = np.abs(q.reshape(-1, BLOCK)[kept] * d[kept, None].astype(np.float64) - row.reshape(-1, BLOCK)[kept])
    assert (error <= 0.5001 * d[kept, None]).all()


# --- layout ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [32, 96, 128, 512])
@pytest.mark.parametrize("name", QUANTIZED)
def test_what_is_stored_at_a_position_comes_back(name: str, d: int) -> None:
    """All positions of pages that are used again, keys and values, whatever the batches."""
    kind, ops, heads = CACHE_TYPES[name], Backend(1), 3
    layer = new(heads, d, d, (name, name), 1000, window=65)
    size = layer.pages * CHUNK
    assert size == 320
    rng = np.random.default_rng(d)
    k, v = (rng.standard_normal((size + 100, heads, d)).astype(np.float32) for _ in range(2))
    first = 0
    for n in (1, 2, 62, 64, 128, 1, 63, 35, 64):
        ops.append(layer, k[first : first + n], v[first : first + n], np.arange(first, first + n, dtype=np.int32))
        first += n
    assert first == len(k)
    assert layer.keys.nbytes == heads * size * kind.row_bytes(d)
    # Position p is stored where the table says.
    every = np.arange(100, 100 + size)
    where = layer.table[0, every // CHUNK] * CHUNK + every % CHUNK
    for x, memory, by_position in ((k, layer.keys, False), (v, layer.values, True)):
        found = stored(memory, kind, d, by_position)
        values = rotated(found.values)[:, where].swapaxes(0, 1)
        step = np.abs(found.scales).max()
        # The error of a block is a vector of at most 32 half steps (one step for the few at an end); rotation keeps its
        # length.
        assert np.abs(values - x[100:]).max() < 1.1 * step * np.sqrt(BLOCK)
        assert np.sqrt(np.mean((values - x[100:]) ** 2)) < (0.35 if name == "q8_0" else 0.4) * step
        # The same with the functions that attention reads them with.
        floats, keys = np.empty((CHUNK, d), np.float32), np.empty((d, CHUNK), np.float32)
        scales = np.empty((d // BLOCK, CHUNK), np.float32)
        for h, c in product(range(heads), range(layer.pages)):
            span = slice(c * CHUNK, (c + 1) * CHUNK)
            if by_position:
                quantized_cache.unpack_values(memory[h, c], kind.bits, floats)
                assert np.array_equal(floats, found.values[h, span])
            else:
                quantized_cache.unpack_keys(memory[h, c], kind.bits, scales, keys)
                assert np.array_equal(keys.T, found.integers[h, span])
                assert np.array_equal(scales.T, found.scales[h, span])


# --- scores ----------------------------------------------------------------------------------------------------


@njit
def chain(products, sums):
    """fma(products[b], sums[b], ...) in rising b."""
    total = np.float32(0.0)
    for b in range(products.size):
        total = fma(products[b], sums[b], total)
    return total


def chunk_of(integers: np.ndarray, scales: np.ndarray, kind: CacheType) -> np.ndarray:
    """A chunk of keys with these integers [64, d] and scales [64, d / 32]."""
    d = integers.shape[1]
    if kind.bits == 8:
        runs = integers.astype(np.int8).view(np.uint8).reshape(CHUNK, d // 16, 16)
    else:
        nibbles = (integers + 8).reshape(CHUNK, d // 32, 4, 2, 4)
        runs = (nibbles[..., 0, :] | nibbles[..., 1, :] << 4).astype(np.uint8).reshape(CHUNK, d // 32, 16)
    words = np.ascontiguousarray(runs.swapaxes(0, 1)).view(np.uint32).reshape(-1)
    halves = np.ascontiguousarray(scales.T.astype(np.float16)).view(np.uint32).reshape(-1)
    return np.concatenate([words, halves])


def scores(integers: np.ndarray, scales: np.ndarray, kind: CacheType, q: np.ndarray, dq: np.ndarray) -> np.ndarray:
    d = q.size
    chunk, keys = chunk_of(integers, scales, kind), np.empty((d, CHUNK), np.float32)
    dk = np.empty((d // BLOCK, CHUNK), np.float32)
    quantized_cache.unpack_keys(chunk, kind.bits, dk, keys)
    assert np.array_equal(keys.T, integers)
    out, dots = np.empty((ROWS, CHUNK), np.float32), np.empty((ROWS, CHUNK), np.float32)
    # The last of five queries alone, and with others before it.
    queries, scales_of = np.ones((5, d), np.float32), np.ones((5, d // BLOCK), np.float32)
    quantized_cache.query_floats(None, q[None, None], dq[None, None], 1, 0, 0, queries, scales_of, 4)
    quantized_cache.scores(queries, scales_of, 4, 1, keys, 0, dk, dots, out)
    alone = out[0].copy()
    quantized_cache.scores(queries, scales_of, 1, ROWS, keys, 0, dk, dots, out)
    assert out[3].tobytes() == alone.tobytes()
    return alone


@pytest.mark.parametrize("d", [32, 96, 256, 512])
@pytest.mark.parametrize("name", QUANTIZED)
def test_scores_are_exact_sums_of_integers(name: str, d: int) -> None:
    kind, rng = CACHE_TYPES[name], np.random.default_rng(d)
    low, high = (-127, 127) if kind.bits == 8 else (-8, 7)
    integers = rng.integers(low, high + 1, (CHUNK, d))
    integers[:8] = rng.choice([low, high], (8, d))
    q = rng.integers(-127, 128, d).astype(np.int8)
    for query in (q, np.where(q < 0, -127, 127).astype(np.int8)):
        integers[8] = np.where(query < 0, low, high)
        # Scales of one: the rest are integers, each of which is a float32.
        found = scores(integers, np.ones((CHUNK, d // BLOCK)), kind, query, np.ones(d // BLOCK, np.float32))
        assert np.array_equal(found, integers.astype(np.int64) @ query.astype(np.int64))
        dq = rng.random(d // BLOCK).astype(np.float32)
        scales = (rng.standard_normal((CHUNK, d // BLOCK)) * 0.1).astype(np.float16)
        sums = (integers * query.astype(np.int64)).reshape(CHUNK, -1, BLOCK).sum(axis=2)
        found = scores(integers, scales, kind, query, dq)
        expected = [chain(dq * scales[j].astype(np.float32), sums[j].astype(np.float32)) for j in range(CHUNK)]
        assert found.tobytes() == np.array(expected, np.float32).tobytes()


# --- attention -------------------------------------------------------------------------------------------------


def run(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    batches: list[int],
    window: int,
    kinds: tuple[str, str],
    threads: int = 2,
) -> tuple[np.ndarray, AttentionCache]:
    """Attention batch by batch with a cache of two types, and that cache."""
    ops = Backend(threads)
    cache = cache_of(k.shape[1], k.shape[2], v.shape[2], kinds, len(k), window, max(batches))
    return in_batches(ops, cache, q, k, v, batches), cache.layers[0]


def as_scored(q: np.ndarray, kind: str) -> np.ndarray:
    """Queries [rows, heads, d] as they are multiplied by keys of a type: if those are quantized, 8 bits of each element,
    returned as the float64 that they represent."""
    if kind not in QUANTIZED:
        return q
    rows = q.reshape(-1, q.shape[2])
    integers, scales = np.empty(rows.shape, np.int8), np.empty((len(rows), rows.shape[1] // BLOCK), np.float32)
    quantized_cache.quantize_queries(rows, np.float32(SCALE), integers, scales, 0, len(rows))
    return rotated(integers * np.repeat(scales, BLOCK, axis=1).astype(np.float64) / SCALE).reshape(q.shape)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
@pytest.mark.parametrize(("heads", "kv_heads", "d_k", "d_v"), [(4, 2, 64, 96), (3, 1, 160, 32)])
def test_attention_against_float64(kinds: tuple[str, str], heads: int, kv_heads: int, d_k: int, d_v: int) -> None:
    q, k, v = inputs(150, heads, kv_heads, d_k, d_v)
    for window in (0, 40):
        # Pages that still hold all of it.
        actual, layer = run(q, k, v, [130, 1, 19], window, kinds)
        keys, values = contents(layer)
        expected = reference(as_scored(q, kinds[0]), keys[:150], values[:150], 0, SCALE, window)
        # The bound for float32 keys: scores of size ~10 with d_k roundings each, or two per block, then a weighted mean of
        # values of size ~2; and the result is rotated.
        assert np.abs(actual - expected).max() < 5e-5


@pytest.mark.parametrize(
    ("kinds", "most"), [(("q8_0", "q8_0"), 0.015), (("q8_0", "q4_0"), 0.1), (("q4_0", "q4_0"), 0.2)]
)
def test_attention_is_near_that_over_what_was_stored(kinds: tuple[str, str], most: float) -> None:
    q, k, v = inputs(150, 4, 2, 64, 96)
    q *= 0.5
    actual, _ = run(q, k, v, [150], 0, kinds)
    error = actual - reference(q, k, v, 0, SCALE, 0)
    # A value is off by 0.3 steps, which are 1/127 or 1/8 of the largest of 32 of size ~2: by 0.01 or 0.16, less if several
    # are averaged; a score of size ~4 by about as many hundredths, which shifts as much weight between values.
    assert np.sqrt(np.mean(error**2)) < most


@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.sampled_from([0, 3, 64, 90]))
@examples(6, 2)
def test_batches_and_threads_do_not_show(kinds: tuple[str, str], batches: list[int], window: int) -> None:
    n = sum(batches)
    q, k, v = inputs(n, 4, 2, 32, 64, seed=n)
    one_by_one, _ = run(q, k, v, [1] * n, window, kinds, threads=1)
    assert run(q, k, v, batches, window, kinds)[0].tobytes() == one_by_one.tobytes()


@pytest.mark.covering(1)
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
@pytest.mark.parametrize("window", [0, 20])
def test_hidden_lanes_never_show(kinds: tuple[str, str], window: int) -> None:
    """Whatever an older answer has stored in the pages, or a later row of the batch."""
    q, k, v = inputs(100, 2, 1, 64, 96)
    ops, positions, outputs = Backend(), np.arange(100, dtype=np.int32), []
    # In float16 these are a NaN, infinity, and large numbers.
    for fill in (0, 0xFFFFFFFF, 0x7C007C00, 0x7BFF7BFF):
        layer = new(1, 64, 96, kinds, 200, window)
        for memory in (layer.keys, layer.values):
            memory.view(np.uint32)[:] = fill
        ops.append(layer, k, v, positions)
        outputs.append(ops.attend(q, layer, positions, SCALE).tobytes())
    assert len(set(outputs)) == 1
    k[70], v[70] = np.nan, np.inf
    later, _ = run(q, k, v, [100], window, kinds)
    assert later[:70].tobytes() == outputs[0][: later[:70].nbytes]


@pytest.mark.parametrize("kinds", [("q8_0", "q4_0"), ("f32", "q8_0"), ("q4_0", "f16")], ids="-".join)
def test_more_than_a_group(kinds: tuple[str, str]) -> None:
    """Rows at several places of the groups, one by one and all at once, against float64."""
    n = (2 * GROUP + 1) * CHUNK + 5
    q, k, v = inputs(n, 2, 1, 32, 32)
    layer = new(1, 32, 32, kinds, n)
    ops, every = Backend(1), np.arange(n, dtype=np.int32)
    ops.append(layer, k, v, every)
    keys, values = contents(layer)
    for window in (0, 5 * CHUNK, GROUP * CHUNK + 1):
        together = ops.attend(q, layer, every, SCALE, window)
        for p in (*range(0, n, 297), GROUP * CHUNK - 1, GROUP * CHUNK, n - 1):
            alone = ops.attend(q[p : p + 1], layer, every[p : p + 1], SCALE, window)
            assert alone.tobytes() == together[p : p + 1].tobytes(), (window, p)
            expected = reference(as_scored(q[p : p + 1], kinds[0]), keys, values, p, SCALE, window)
            assert np.abs(alone - expected).max() < 5e-5, (window, p)


@pytest.mark.parametrize("kinds", [("q8_0", "q8_0"), ("q4_0", "f16")], ids="-".join)
def test_queries_alone_see_what_they_are_told_to(kinds: tuple[str, str]) -> None:
    """Layers without keys of their own, and drafts: another last position and another window than the cache's."""
    q, k, v = inputs(150, 4, 2, 64, 64)
    _, layer = run(q, k, v, [100, 50], 64, kinds)
    keys, values = contents(layer)
    ops, last = Backend(1), np.array([0, 5, 64, 100, 149, 3], np.int32)
    for window in (0, 1, 30, 63):
        found = ops.attend(q[:6], layer, last, SCALE, window)
        for t, p in enumerate(last):
            expected = reference(as_scored(q[t : t + 1], kinds[0]), keys, values, int(p), SCALE, window)
            assert np.abs(found[t] - expected).max() < 5e-5
            alone = ops.attend(q[t : t + 1], layer, last[t : t + 1], SCALE, window)
            assert alone.tobytes() == found[t : t + 1].tobytes()


# --- pages that are used again while drafts are verified -------------------------------------------------------


@pytest.mark.covering(1)
@pytest.mark.parametrize("kinds", [("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q8_0", "q4_0")], ids="-".join)
@pytest.mark.parametrize("window", [32, 64])
def test_pages_that_are_used_again_while_drafts_are_verified(window: int, kinds: tuple[str, str]) -> None:
    """At every offset of a page, a batch of 1 to 16 rows, or of 64, any number of which are right and one is kept: the bits
    of pages that hold everything.

    The first rows of a batch are the true continuation, and the others are not.
    """
    n = 7 * CHUNK
    q, k, v = inputs(n + 64, 2, 1, 32, 32)
    wrong_k, wrong_v = inputs(n + 64, 2, 1, 32, 32, seed=1)[1:]
    ops, seen = Backend(1), set()
    whole, every = new(1, 32, 32, kinds, n + 64), np.arange(n + 64, dtype=np.int32)
    ops.append(whole, k, v, every)
    expected = ops.attend(q, whole, every, SCALE, window)
    for rows in (1, 2, 5, 11, 16, 64):
        cache = cache_of(1, 32, 32, kinds, 10 * n, window, max(16, rows))
        sequence = Sequence(cache)
        layer = cache.layers[0]
        assert layer.pages < n // CHUNK - 1 and cache.rewind >= rows
        for first in range(n):
            # Each position is the first of a batch; in turn, 1 to all of the rows are right.
            right = 1 + first % rows
            positions = np.arange(first, first + rows, dtype=np.int32)
            store(sequence, first, rows)
            span = slice(first, first + rows)
            given_k, given_v = (
                np.concatenate([x[span][:right], y[span][right:]]) for x, y in ((k, wrong_k), (v, wrong_v))
            )
            ops.append(layer, given_k, given_v, positions)
            out = ops.attend(q[span], layer, positions, SCALE)
            assert out[:right].tobytes() == expected[first : first + right].tobytes(), (rows, first)
            sequence.truncate(first + 1)
            if first >= layer.pages * CHUNK:
                seen.add((rows, first % CHUNK))
    assert len(seen) == 6 * CHUNK


def test_a_window_and_the_tokens_that_can_be_rolled_back_are_held() -> None:
    """And no more of them: one page more would never be needed."""
    for window, rows in product((1, 31, 32, 64, 65, 512), (1, 16, 64, 128)):
        cache = cache_of(1, 32, 32, ("q8_0", "q4_0"), 10000, window, rows)
        sequence, most = Sequence(cache), 0
        (paging,) = cache.pools
        for first in range(0, 20 * CHUNK, rows):
            sequence.claim(first, rows)
            most = max(most, len(sequence.pages(paging)))
            sequence.commit([0] * rows)
            assert all(sequence.can_truncate(max(0, sequence.length - back)) for back in (0, 1, cache.rewind))
        assert cache.rewind == paging.spare == 64
        assert cache.layers[0].pages - 1 <= most <= cache.layers[0].pages, (window, rows)


@pytest.mark.parametrize("window", [32, 64, 500])
def test_where_the_pages_hold_the_whole_context_all_of_it_can_be_taken_back(window: int) -> None:
    cache = cache_of(1, 32, 32, ("q8_0", "q8_0"), 64, window, 64)
    sequence = Sequence(cache)
    store(sequence, 0, 64)
    assert cache.rewind == 64
    assert all(sequence.can_truncate(length) for length in range(65))
