"""Integer keys and values (i8, i12): the law of storage, weights and joining replayed in rational arithmetic, sums against
int64, attention against float64, and the paths whose choice must not affect a bit."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

import engine
from engine.cache.kv import AttentionCache, AttentionCacheSpec, KVCache
from engine.cache.sequence import Sequence
from engine.cache.types import CACHE_TYPES, CHUNK, GROUP, CacheType, Types
from engine.cpu import integer_attention, integer_cache, integer_products
from engine.cpu.attention import NO_PARTS
from engine.cpu.integer_attention import WEIGHT
from engine.cpu.integer_cache import QUERY
from engine.cpu.simd import available
from engine.decode.evaluate import evaluate
from engine.numerics import exp, exp2
from engine.speculative.params import SpeculationParams
from engine.synthetic.model import make_model
from tests.cpu.test_attention import SCALE, in_batches, inputs, reference
from tests.cpu.test_quantized_cache import hadamard
from tests.mirror import Mirror as Backend
from tests.pages import chunks_of, layer_of
from tests.sequences import store
from tests.test_numerics import round_to_float32
from tests.tiers import examples, few

F = np.float32
NAMES = ("i8", "i12")
MOST = {"i8": 127, "i12": 2047}
ULP = 2.0**-24
NO_SINKS = np.zeros(0, F)
both = pytest.mark.parametrize("name", NAMES)


# --- the law, written again ------------------------------------------------------------------------------------


def rotated(x: np.ndarray, block: int) -> np.ndarray:
    """Rotate blocks of the last axis, in float64; doing it twice is the identity."""
    h = hadamard(block) / np.sqrt(block)
    return (x.reshape(*x.shape[:-1], -1, block).astype(np.float64) @ h).reshape(x.shape)


@dataclass
class Stored:
    """The contents of pages, read as ``engine/cache/types.py`` describes them: integers [heads, positions, d] and the scale
    of each, float64."""

    integers: np.ndarray
    scales: np.ndarray

    @property
    def values(self) -> np.ndarray:
        return self.integers * self.scales


def stored(ring: np.ndarray, kind: CacheType, d: int, by_position: bool) -> Stored:
    heads, chunks, _ = ring.shape
    block = kind.block(d)
    data = np.ascontiguousarray(ring).view(np.uint8).reshape(heads, chunks, -1)
    high, low = data[..., : CHUNK * d].view(np.int8).astype(np.int64), data[..., CHUNK * d : CHUNK * d * kind.bits // 8]
    if by_position:
        high = high.reshape(heads, chunks, 16, d, 4).transpose(0, 1, 2, 4, 3)
        parts = low.reshape(heads, chunks, 16, -1, block // 2, 4).transpose(0, 1, 2, 5, 3, 4)
        nibbles = np.stack([parts & 15, parts >> 4], 5)  # [..., block, half, dimension]
    else:
        high = high.reshape(heads, chunks, d // 4, CHUNK, 4).transpose(0, 1, 3, 2, 4)
        parts = low.reshape(heads, chunks, -1, CHUNK, 4).transpose(0, 1, 3, 2, 4)
        nibbles = np.stack([parts & 15, parts >> 4], 4)  # [..., eight dimensions, half, dimension]
    integers = high.reshape(heads, -1, d)
    if kind.bits == 12:
        integers = 16 * integers + nibbles.reshape(heads, -1, d)
    halves = data[..., CHUNK * d * kind.bits // 8 :].view(np.float16).astype(np.float64)
    halves = halves.reshape(heads, chunks, d // block, CHUNK).transpose(0, 1, 3, 2).reshape(heads, -1, d // block)
    return Stored(integers, np.repeat(halves, block, axis=2))


def put(x: np.ndarray, kind: CacheType, by_position: bool) -> Stored:
    """The result of storing rows x float32 [n, d], already rotated, at positions 0 and on."""
    (n, d), chunks = x.shape, -(-len(x) // CHUNK)
    ring = np.zeros((1, chunks, kind.chunk_words(d)), np.uint32)
    for p, row in enumerate(x):
        integer_cache.store(ring[0, p // CHUNK], p % CHUNK, row, kind.bits, kind.block(d), by_position)
    found = stored(ring, kind, d, by_position)
    return Stored(found.integers[:, :n], found.scales[:, :n])


def fused(a: Any, b: Any, c: Any) -> np.float32:
    """fma, with the sign of a zero that IEEE 754 gives."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    return F(F(a) * F(b) + F(c)) if exact == 0 else round_to_float32(exact)


def join(before: tuple[Any, ...], m: np.float32, total: np.float32, o: list[np.float32]) -> tuple[Any, ...]:
    """Online softmax: what precedes, (maximum, sum, values), joined with the next part."""
    top = max(before[0], m)
    a, b = exp(F(before[0] - top)), exp(F(m - top))
    values = [fused(old, a, F(b * new)) for old, new in zip(before[2], o, strict=True)]
    return top, fused(before[1], a, F(b * total)), values


def tree(p: list[np.float32]) -> np.float32:
    while len(p) > 1:
        p = [F(a + b) for a, b in zip(p[: len(p) // 2], p[len(p) // 2 :], strict=True)]
    return p[0]


def replay(
    q: np.ndarray,
    dq: np.ndarray,
    keys: Stored,
    values: Stored,
    seen: tuple[int, int],
    group: int,
    sink: float | None,
) -> np.ndarray:
    """One query, integers q [d_k] and scales dq [blocks], over positions [first, last) of one head: float32 [d_v]."""
    d_v, (first, last) = values.integers.shape[2], seen
    nothing = F(-np.inf), F(0), [F(0)] * d_v
    k_block, v_block = len(q) // len(dq), CACHE_TYPES["i8"].block(d_v)
    everything, inner = nothing, nothing
    for chunk in range(first // CHUNK, (last - 1) // CHUNK + 1):
        visible = range(max(first, chunk * CHUNK), min(last, (chunk + 1) * CHUNK))
        scores = {}
        for j in visible:
            score = F(0)
            for b, scale in enumerate(dq):
                span = slice(b * k_block, (b + 1) * k_block)
                dot = round_to_float32(Fraction(int(q[span].astype(int) @ keys.integers[0, j, span])))
                score = fused(F(scale * F(keys.scales[0, j, b * k_block])), dot, score)
            scores[j] = score
        m = max(scores.values())
        p = [exp2(F(scores[j] - m)) if j in scores else F(0) for j in range(chunk * CHUNK, (chunk + 1) * CHUNK)]
        o: list[np.float32] = []
        for b in range(d_v // v_block):
            w = {j: F(p[j % CHUNK] * F(values.scales[0, j, b * v_block])) for j in visible}
            top, span = max(w.values()), slice(b * v_block, (b + 1) * v_block)
            if top < 2.0**-100:
                o += [F(0)] * v_block
                continue
            e = int(np.frexp(top)[1])  # 2**(e - 1) <= top < 2**e
            integers = {j: min(WEIGHT, round(Fraction(float(x)) * Fraction(2) ** (11 - e))) for j, x in w.items()}
            sums = np.sum([integers[j] * values.integers[0, j, span] for j in visible], axis=0)
            o += [F(round_to_float32(Fraction(int(total))) * F(2.0 ** (e - 11))) for total in sums]
        inner = join(inner, F(m * F(np.log(2))), tree(p), o)
        if (chunk + 1) % group == 0 or chunk == (last - 1) // CHUNK:
            everything, inner = join(everything, *inner), nothing
    m, total, o = everything
    if sink is not None:
        top = max(m, F(sink))
        a = exp(F(m - top))
        total, o = fused(total, a, exp(F(F(sink) - top))), [F(x * a) for x in o]
    return np.array([F(x / total) for x in o])


# --- rotation and blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [32, 64, 128])
@given(st.integers(0, 1000), st.sampled_from([1e-30, 1, 1e30]))
@examples(10)
def test_rotation_against_the_matrix(block: int, seed: int, scale: float) -> None:
    x = (np.random.default_rng(seed).standard_normal((3, 2 * block)) * scale).astype(F)
    once = x.copy()
    integer_cache.rotate_rows(once, block, 0, 3)
    # A rounding per level, one of the product, one of the root: each partial sum is at most the sum of all magnitudes.
    sums = np.abs(x.reshape(3, -1, block)).sum(axis=2, dtype=np.float64)
    bound = 10 * ULP * np.repeat(sums, block, axis=1) / np.sqrt(block)
    assert (np.abs(once - rotated(x, block)) <= bound).all()


@both
@pytest.mark.parametrize(("d", "block"), [(32, 32), (96, 32), (64, 64), (192, 64), (128, 128), (256, 128), (640, 128)])
def test_a_block_is_the_largest_power_of_two(name: str, d: int, block: int) -> None:
    kind = CACHE_TYPES[name]
    assert kind.block(d) == block
    assert kind.row_bytes(d) * 8 == d * kind.bits + 16 * (d // block)
    assert kind.block(80) == kind.block(24) == 0


@st.composite
def blocks(draw: st.DrawFn) -> np.ndarray:
    """A block: noise of any size, zeros, outliers, what a float16 scale cannot hold."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    x: np.ndarray = random.standard_normal(32) * 10.0 ** draw(st.integers(-40, 30))
    kind = draw(st.sampled_from(["noise", "zero", "some zeros", "outlier", "equal", "steps"]))
    if kind == "zero":
        x[:] = draw(st.sampled_from([0.0, -0.0]))
    elif kind == "some zeros":
        x[random.random(32) < 0.5] = 0
    elif kind == "outlier":
        x[draw(st.integers(0, 31))] *= 10.0 ** draw(st.integers(1, 8))
    elif kind == "equal":
        x[:] = x[0]
    elif kind == "steps":
        x = random.integers(-2047, 2048, 32) * 2.0 ** draw(st.integers(-26, 16)) * 0.5
    return x.astype(F)


@both
@pytest.mark.parametrize("by_position", [False, True])
@given(st.lists(blocks(), min_size=1, max_size=3))
@examples(100)
def test_blocks_are_those_of_the_law(name: str, by_position: bool, x: list[np.ndarray]) -> None:
    rows, most = np.stack(x), MOST[name]
    found = put(rows, CACHE_TYPES[name], by_position)
    for row, integers, scale in zip(rows, found.integers[0], found.scales[0, :, 0], strict=True):
        amax = np.abs(row).max()
        with np.errstate(over="ignore"):
            d = np.float16(F(amax) / F(most) if amax >= 2.0**-100 else 0)
        if d == np.inf:
            assert scale == np.inf if by_position else np.isnan(scale)
            continue
        assert scale == d
        if d == 0:
            assert not integers.any()
            continue
        limit, inverse = F(most) * F(d), Fraction(float(F(1) / F(d)))
        assert integers.tolist() == [round(Fraction(float(np.clip(v, -limit, limit))) * inverse) for v in row]
        assert np.abs(integers).max() <= most
        # Half a step where the scale holds the largest value: rounding the scale cannot make it a whole one.
        inside = np.abs(row) <= limit
        assert (np.abs(integers * float(d) - row)[inside] <= 0.5001 * float(d)).all()


@given(st.lists(blocks(), min_size=1, max_size=3))
@examples(30)
def test_queries_have_wider_integers(x: list[np.ndarray]) -> None:
    row = np.concatenate(x)
    q, d = np.empty(row.size, np.int16), np.empty(len(x), F)
    integer_cache.quantize_query(row, 32, q, d)
    for block, integers, scale in zip(x, q.reshape(-1, 32), d, strict=True):
        amax = np.abs(block).max()
        assert scale == (F(amax) / F(QUERY) if amax >= 2.0**-100 else 0)
        inverse = Fraction(float(F(QUERY) / F(amax))) if scale else 0
        assert integers.tolist() == [round(Fraction(float(v)) * inverse) for v in block]


@both
@pytest.mark.parametrize("d", [32, 96, 128, 256])
def test_what_is_stored_at_a_position_comes_back(name: str, d: int) -> None:
    """All positions of pages that are used again, keys and values, whatever the batches."""
    kind, ops, heads = CACHE_TYPES[name], Backend(2), 3
    layer = new(heads, d, d, name, 1000, window=65)
    size = layer.pages * CHUNK
    assert size == 320
    rng = np.random.default_rng(d)
    k, v = (rng.standard_normal((size + 100, heads, d)).astype(F) for _ in range(2))
    first = 0
    for n in (1, 2, 62, 64, 128, 1, 63, 35, 64):
        ops.append(layer, k[first : first + n], v[first : first + n], np.arange(first, first + n, dtype=np.int32))
        first += n
    assert first == len(k) and layer.keys.nbytes == heads * size * kind.row_bytes(d)
    every = np.arange(100, 100 + size)
    where = layer.table[0, every // CHUNK] * CHUNK + every % CHUNK
    for x, memory, by_position in ((k, layer.keys, False), (v, layer.values, True)):
        found = stored(memory, kind, d, by_position)
        error = rotated(found.values, kind.block(d))[:, where].swapaxes(0, 1) - x[100:]
        assert np.sqrt(np.mean(error**2)) < 0.3 * found.scales.max()


# --- sums ------------------------------------------------------------------------------------------------------


def chunk_of(x: np.ndarray, kind: CacheType, by_position: bool) -> np.ndarray:
    """The words of a chunk, without scales, whose keys or values are the integers x [64, d]."""
    (_, d), block = x.shape, kind.block(x.shape[1])
    high, low = (x >> (kind.bits - 8)).astype(np.int8), (x & 15).astype(np.uint8)
    if by_position:
        high = high.reshape(16, 4, d).transpose(0, 2, 1)
        halves = low.reshape(16, 4, d // block, 2, block // 2).transpose(3, 0, 2, 4, 1)
    else:
        high = high.reshape(CHUNK, d // 4, 4).transpose(1, 0, 2)
        halves = low.reshape(CHUNK, d // 8, 2, 4).transpose(2, 1, 0, 3)
    parts = [high.view(np.uint8).reshape(-1) if high.flags.c_contiguous else high.copy().view(np.uint8).reshape(-1)]
    if kind.bits == 12:
        parts.append((halves[0] | halves[1] << 4).reshape(-1))
    return np.concatenate(parts).view(np.uint32)


@pytest.mark.parametrize("d", few([256, 32, 96, 64], 2))
@both
def test_the_packing_of_these_tests_is_that_of_the_cache(name: str, d: int) -> None:
    kind, x = CACHE_TYPES[name], np.random.default_rng(d).standard_normal((CHUNK, d)).astype(F)
    for by_position in (False, True):
        integers = put(x, kind, by_position).integers[0]
        ring = np.zeros((1, 1, kind.chunk_words(d)), np.uint32)
        words = chunk_of(integers, kind, by_position)
        ring[0, 0, : words.size] = words
        assert np.array_equal(stored(ring, kind, d, by_position).integers[0], integers)


def callers(bits: int, rows: int, least: int, instructions: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Functions that call ``make_scores`` and ``make_values``."""
    scores = integer_products.make_scores(bits, rows, instructions)
    put_values = integer_products.make_values(bits, rows, least, instructions)

    @njit
    def call_scores(c, dq, words, dk, p):
        scores(c, dq, 0, words, 0, c.shape[1], dk, c.shape[1], dq.shape[1], p)

    @njit
    def call_values(c, factors, words, block, o):
        for b in range(o.shape[1] // block):
            put_values(c, factors, words, 0, block, o.shape[1], b, block, o)

    return call_scores, call_values


@pytest.mark.parametrize("instructions", available())
@pytest.mark.parametrize(("rows", "d"), few([(4, 128), (1, 64), (1, 256), (4, 96)], 2))
@both
def test_sums_of_products_are_exact(name: str, rows: int, d: int, instructions: str) -> None:
    """Of random integers, and of the largest ones: those of a block of keys, and of the positions of a chunk."""
    kind, most, rng = CACHE_TYPES[name], MOST[name], np.random.default_rng(d)
    block = kind.block(d)
    least = 32 if block == 32 else 64
    call_scores, call_values = callers(kind.bits, rows, least, instructions)
    signs = rng.choice([-1, 1], d)
    largest = most * signs * np.ones((CHUNK, 1), np.int64)
    for x in (rng.integers(-most, most + 1, (CHUNK, d)), largest):
        q = rng.integers(-QUERY, QUERY + 1, (rows, d)) if x is not largest else QUERY * signs * np.ones((rows, 1), int)
        dq, dk = (rng.random(shape).astype(F) for shape in ((rows, d // block), (d // block, CHUNK)))
        p = np.empty((rows, CHUNK), F)
        call_scores(q.astype(np.int16), dq, chunk_of(x, kind, False), dk, p)
        expected = np.zeros((rows, CHUNK), F)
        for b in range(d // block):
            span = slice(b * block, (b + 1) * block)
            dots = (q[:, span] @ x[:, span].T).astype(np.int32).astype(F)
            for r, j in product(range(rows), range(CHUNK)):
                expected[r, j] = fused(F(dq[r, b] * dk[b, j]), dots[r, j], expected[r, j])
        assert p.tobytes() == expected.tobytes()
        weights = rng.integers(0, WEIGHT + 1, (rows, CHUNK)) if x is not largest else np.full((rows, CHUNK), WEIGHT)
        factors, o = 2.0 ** rng.integers(-20, 20, rows).astype(F), np.empty((rows, d), F)
        call_values(weights.astype(np.int16), factors, chunk_of(x, kind, True), block, o)
        sums = (weights @ x).astype(np.int32).astype(F)
        assert o.tobytes() == (factors[:, None] * sums).tobytes()


def test_every_sum_is_below_2_to_the_24() -> None:
    """So float32 holds all partial sums exactly, in any order; and the two sums of i12 make the sum of its integers."""
    for first, second, n in ((QUERY, 127, 128), (QUERY, 128, 128), (WEIGHT, 127, CHUNK), (WEIGHT, 128, CHUNK)):
        assert first * second * n < 2**24
    for factor, n in ((QUERY, 128), (WEIGHT, CHUNK)):
        assert factor * 2047 * n < 2**31
        # On the CPU, each of two lanes has half of 16 times the sum.
        assert 16 * factor * 2047 * (n // 2) < 2**31
    rng = np.random.default_rng(1)
    for _ in range(2000):
        high, low = int(rng.integers(-(2**24), 2**24)), int(rng.integers(0, 2**21))
        assert fused(16, high, low) == F(np.int32(16 * high + low))


# --- weights ---------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 1 << 32),
    st.sampled_from([0.0, 6e-8, 1e-3, 1.0, 65504.0]),
    st.integers(0, 63),
    st.integers(1, 64),
    st.sampled_from([0.0, 5.0, 80.0]),
)
@examples(100)
def test_weights_are_those_of_the_law(seed: int, size: float, first: int, last: int, spread: float) -> None:
    random = np.random.default_rng(seed)
    d = (random.random(CHUNK) * size).astype(np.float16).astype(F)
    p = np.exp(-spread * random.random(CHUNK)).astype(F)
    last = max(last, first + 1)
    p[:first], p[last:] = 0, 0
    # A hidden scale is what an older answer has left there.
    d[:first], d[last:] = np.nan, np.inf
    w, integers = np.empty(CHUNK, F), np.empty(CHUNK, np.int16)
    step = integer_attention.integer_weights(p, d, w, integers)
    weights = p[first:last] * d[first:last]
    assert not integers[:first].any() and not integers[last:].any()
    if weights.max() < 2.0**-100:
        assert step == 0 and not integers.any()
        return
    assert step == 2.0 ** (np.frexp(weights.max())[1] - 11)
    expected = [min(WEIGHT, round(Fraction(float(x)) / Fraction(float(step)))) for x in weights]
    assert integers[first:last].tolist() == expected
    assert 1024 <= integers.max() <= WEIGHT


# --- attention -------------------------------------------------------------------------------------------------


def new(heads: int, d_k: int, d_v: int, name: str, n_ctx: int, window: int = 0, rows: int = 128) -> AttentionCache:
    """The memory of a layer, with pages for every chunk that a pass may need."""
    kind = CACHE_TYPES[name]
    layer: AttentionCache = layer_of(
        AttentionCacheSpec(heads, d_k, d_v, window), n_ctx, rows, Types(kind, kind), np.zeros
    )
    return layer


def cache_of(heads: int, d_k: int, d_v: int, name: str, n_ctx: int, window: int = 0, rows: int = 128) -> KVCache:
    """A cache of one layer, whose pages a sequence takes."""
    kind = CACHE_TYPES[name]
    return KVCache([AttentionCacheSpec(heads, d_k, d_v, window)], n_ctx, rows, Types(kind, kind), np.zeros)


def run(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, batches: list[int], window: int, name: str, threads: int = 2
) -> tuple[np.ndarray, AttentionCache]:
    """Attention batch by batch, and its cache."""
    cache = cache_of(k.shape[1], k.shape[2], v.shape[2], name, len(k), window, max(batches))
    return in_batches(Backend(threads), cache, q, k, v, batches), cache.layers[0]


def attend(
    kernel: Callable[..., None], q: np.ndarray, layer: AttentionCache, last: np.ndarray, sinks: np.ndarray
) -> Any:
    """The result of a kernel for queries [rows, n_head, d_k], not rotated back; and the queries' integers and scales."""
    items, d, kind = q.shape[0] * q.shape[1], q.shape[2], layer.k_type
    block = kind.block(d)
    integers, scales = np.empty(q.shape, np.int16), np.empty((*q.shape[:2], d // block), F)
    given = q.reshape(items, d), F(SCALE), block, integers.reshape(items, d), scales.reshape(items, -1)
    integer_cache.quantize_queries(*given, 0, items)
    out = np.empty((*q.shape[:2], layer.d_v), F)
    rows = last, np.zeros_like(last), layer.table
    kernel(integers, scales, layer.keys, layer.values, *rows, layer.window, sinks, NO_PARTS, out, 0, items)
    return out, integers, scales


@both
@pytest.mark.parametrize(
    ("d_k", "d_v", "window", "sink"), few([(96, 64, 0, None), (64, 256, 150, 3.0), (160, 32, 60, -2.0)], 2)
)
def test_attention_replayed(name: str, d_k: int, d_v: int, window: int, sink: float | None) -> None:
    """Bit for bit, in groups of two chunks: rows in the middle of groups, windows that begin in the middle of one."""
    q, k, v = inputs(330, 2, 1, d_k, d_v, seed=d_k)
    kind, last = CACHE_TYPES[name], np.array([329, 256, 127, 70], np.int32)
    layer = new(1, d_k, d_v, name, 400, window=0)
    Backend(1).append(layer, k, v, np.arange(330, dtype=np.int32))
    layer.window = window
    sinks = NO_SINKS if sink is None else np.array([sink, sink + 1], F)
    out, integers, scales = attend(integer_attention.attend(kind.bits, 2), q[:4], layer, last, sinks)
    keys, values = (
        stored(chunks_of(memory, layer), kind, d, by_position)
        for memory, d, by_position in ((layer.keys, d_k, False), (layer.values, d_v, True))
    )
    for t, h in product(range(4), range(2)):
        first = max(0, int(last[t]) - window + 1) if window else 0
        seen = first, int(last[t]) + 1
        expected = replay(integers[t, h], scales[t, h], keys, values, seen, 2, None if sink is None else sinks[h])
        assert out[t, h].tobytes() == expected.tobytes(), (t, h)


@both
@pytest.mark.parametrize(("heads", "kv_heads", "d_k", "d_v"), [(4, 2, 64, 96), (3, 1, 160, 256)])
def test_attention_against_float64(name: str, heads: int, kv_heads: int, d_k: int, d_v: int) -> None:
    """Over what was stored, with the query as it is multiplied: what remains are 11 bits of each weight."""
    q, k, v = inputs(700, heads, kv_heads, d_k, d_v)
    kind = CACHE_TYPES[name]
    for window in (0, 40, 600):
        actual, layer = run(q, k, v, [130, 1, 569], window, name)
        layer = new(kv_heads, d_k, d_v, name, 700)
        Backend(1).append(layer, k, v, np.arange(700, dtype=np.int32))
        keys, values = (
            rotated(stored(chunks_of(memory, layer), kind, d, by_position).values, kind.block(d)).swapaxes(0, 1)[:700]
            for memory, d, by_position in ((layer.keys, d_k, False), (layer.values, d_v, True))
        )
        _, integers, scales = attend(
            integer_attention.attend(kind.bits), q, layer, np.arange(700, dtype=np.int32), NO_SINKS
        )
        block = kind.block(d_k)
        query = rotated(integers * np.repeat(scales, block, 2).astype(np.float64) / SCALE, block)
        expected = reference(query, keys, values, 0, SCALE, window)
        # A weighted scale is off by at most 2**-11 of the largest of its chunk.  The more of the 64 are as large, the more
        # of their errors average out.
        assert np.sqrt(np.mean((actual - expected) ** 2)) < 2.0**-10 * np.sqrt(np.mean(v**2))


@pytest.mark.parametrize(("name", "most"), [("i8", 0.015), ("i12", 0.0015)])
def test_attention_is_near_that_over_floats(name: str, most: float) -> None:
    q, k, v = inputs(150, 4, 2, 64, 96)
    q *= 0.5
    error = run(q, k, v, [150], 0, name)[0] - reference(q, k, v, 0, SCALE, 0)
    assert np.sqrt(np.mean(error**2)) < most


@pytest.mark.parametrize("sink", [0.0, 10.0, 20.0])
@pytest.mark.parametrize("d", few([128, 64, 256]))
def test_a_position_that_attracts_weight_and_has_tiny_values(d: int, sink: float) -> None:
    """The exponent of a chunk is that of weight times scale: were it that of the scale alone, the weights of all other
    positions would be rounded to 0, an error of 0.06 to 1."""
    rng, n = np.random.default_rng(int(sink)), 300
    q, k, v = (rng.standard_normal((n, 1, d)).astype(F) for _ in range(3))
    q *= F(1.5 / SCALE / np.sqrt(d))
    if sink:
        direction = rng.standard_normal(d)
        direction /= np.linalg.norm(direction)
        k[:, 0] -= ((k[:, 0] @ direction)[:, None] * direction).astype(F)
        k[0, 0] = direction * np.sqrt(d)
        q[:, 0] += (direction * (sink / SCALE / np.sqrt(d))).astype(F)
        v[0] *= F(0.01)
    expected, errors = reference(q, k, v, 0, SCALE, 0), {}
    for name in ("q8_0", *NAMES):
        found = in_batches(Backend(2), cache_of(1, d, d, name, n, rows=n), q, k, v, [n])
        errors[name] = np.sqrt(np.mean((found - expected)[n // 2 :] ** 2))
    assert errors["i8"] < 1.5 * errors["q8_0"]
    assert errors["i12"] < errors["q8_0"] / 3
    assert errors["q8_0"] < 0.02 * np.sqrt(np.mean(expected[n // 2 :] ** 2))


@both
@given(st.lists(st.integers(1, 70), min_size=1, max_size=6), st.sampled_from([0, 3, 64, 90]))
@examples(8, 2)
def test_batches_and_threads_do_not_show(name: str, batches: list[int], window: int) -> None:
    n = sum(batches)
    q, k, v = inputs(n, 6, 2, 32, 64, seed=n)
    one_by_one, _ = run(q, k, v, [1] * n, window, name, threads=1)
    assert run(q, k, v, batches, window, name)[0].tobytes() == one_by_one.tobytes()


@both
def test_more_than_a_group(name: str) -> None:
    """Rows at every place of the groups of 8 chunks, one by one and all at once."""
    n = (2 * GROUP + 1) * CHUNK + 5
    q, k, v = inputs(n, 2, 1, 32, 32)
    layer = new(1, 32, 32, name, n)
    ops, every = Backend(1), np.arange(n, dtype=np.int32)
    ops.append(layer, k, v, every)
    for window in (0, 5 * CHUNK, GROUP * CHUNK + 1):
        together = ops.attend(q, layer, every, SCALE, window)
        for p in (*range(0, n, 97), GROUP * CHUNK - 1, GROUP * CHUNK, n - 1):
            alone = ops.attend(q[p : p + 1], layer, every[p : p + 1], SCALE, window)
            assert alone.tobytes() == together[p : p + 1].tobytes(), (window, p)


@both
@pytest.mark.parametrize("window", [0, 20])
def test_hidden_lanes_never_show(name: str, window: int) -> None:
    """Whatever an older answer has stored in the pages, or a later row of the batch."""
    q, k, v = inputs(100, 2, 1, 64, 96)
    ops, positions, outputs = Backend(), np.arange(100, dtype=np.int32), []
    # As scales these are a NaN, infinity, and large numbers.
    for fill in (0, 0xFFFFFFFF, 0x7C007C00, 0x7BFF7BFF):
        layer = new(1, 64, 96, name, 200, window)
        layer.keys[:], layer.values[:] = fill, fill
        ops.append(layer, k, v, positions)
        outputs.append(ops.attend(q, layer, positions, SCALE).tobytes())
    assert len(set(outputs)) == 1
    k[70], v[70] = np.nan, np.inf
    later, _ = run(q, k, v, [100], window, name)
    assert later[:70].tobytes() == outputs[0][: later[:70].nbytes]


@both
def test_zeros(name: str) -> None:
    q, k, v = inputs(70, 1, 1, 32, 32)
    k[:], v[:] = 0, 0
    out, _ = run(q, k, v, [70], 0, name)
    assert not out.any()
    v[1] = 1
    out, _ = run(q, k, v, [70], 0, name)
    assert np.allclose(out[1:, 0] * np.arange(2, 71), 1, rtol=2e-3)


@both
@pytest.mark.parametrize("window", [32, 64])
def test_pages_that_are_used_again_while_drafts_are_verified(name: str, window: int) -> None:
    """Batches of 1 to 16 rows, any number of which are right and one is kept: the bits of pages that hold everything.

    The first rows of a batch are the true continuation, and the others are not.
    """
    n = 7 * CHUNK
    q, k, v = inputs(n + 64, 2, 1, 32, 32)
    wrong_k, wrong_v = inputs(n + 64, 2, 1, 32, 32, seed=1)[1:]
    ops, every = Backend(1), np.arange(n + 64, dtype=np.int32)
    whole = new(1, 32, 32, name, n + 64)
    ops.append(whole, k, v, every)
    expected = ops.attend(q, whole, every, SCALE, window)
    for rows in (1, 5, 16):
        cache = cache_of(1, 32, 32, name, 10 * n, window, max(16, rows))
        sequence = Sequence(cache)
        layer = cache.layers[0]
        assert layer.pages < n // CHUNK
        for first in range(n):
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


# --- whole models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", few(["tiny-gpt-oss", "tiny-gemma4-e", "tiny-qwen35moe"]))
def test_logits_of_models(tmp_path: Path, model: str) -> None:
    """Sliding windows, heads of several widths, layers that read others' keys, sinks, hybrids: any division of a prompt."""
    path, found = make_model(tmp_path / "m.gguf", model, "Q8_0"), {}
    for name in ("f32", "q8_0", *NAMES):
        outputs = []
        for batch_size in (0, 16):
            llm = engine.load(path, device="cpu", n_ctx=256, cache_type=name, batch_size=batch_size)
            ids = np.random.default_rng(0).integers(0, llm.config.n_vocab, 150).tolist()
            outputs.append(llm.logits(ids))
        llm.reset()
        singles = np.array(ids[:70], np.int32)[:, None], np.arange(70, dtype=np.int32)[:, None]
        rows = [
            evaluate(llm.model, token, position, 1, llm.model.sequence)
            for token, position in zip(*singles, strict=True)
        ]
        assert outputs[0].tobytes() == outputs[1].tobytes()
        assert np.concatenate(rows).tobytes() == outputs[0][:70].tobytes()
        found[name] = outputs[0]
    errors = {name: np.sqrt(np.mean((logits - found["f32"]) ** 2)) for name, logits in found.items()}
    assert 0 < errors["i12"] < errors["q8_0"]
    assert errors["i8"] < 1.2 * errors["q8_0"]


@both
def test_answers_with_drafts_are_those_without(name: str) -> None:
    llm = engine.load("pycoder", device="cpu", n_ctx=256, cache_type=name)
    prompt = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n"
    for temperature in (0.0, 0.8):
        given: dict[str, Any] = {"max_tokens": 60, "temperature": temperature, "seed": 1}
        plain = llm.complete(prompt, speculation=SpeculationParams(enabled=False), **given)
        drafted = llm.complete(prompt, speculation=SpeculationParams(lookup=True), **given)
        assert drafted.text == plain.text
        assert drafted.speculation is not None and (temperature or drafted.speculation.accepted > 0)
