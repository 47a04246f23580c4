"""engine/cuda/rope.py in the simulator: what the CPU stores in its cache, and its queries."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.arrays import Batch, Thinned
from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cache.kv import AttentionCache, AttentionCacheSpec
from engine.cache.types import CHUNK, Types, cache_type
from engine.cpu.integer_cache import LOG2_E
from engine.cuda import rope
from engine.cuda.runtime.simulator import run
from engine.ops.heads import Heads
from tests.mirror import Mirror as Backend
from tests.pages import layer_of

EPS = np.float32(1e-6)
SCALE = np.float32(0.3)
N_HEAD, N_HEAD_KV = 3, 2
POSITIONS = np.array([127, 128, 300], np.int32)
PLACES = np.array([63, 64, 172], np.int32)
"""Of a sequence that has dropped chunks."""


def on_cpu(
    heads: Heads[Any],
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    cache: AttentionCache[Any],
    batch: Batch[Any],
    table: np.ndarray | None,
) -> list[np.ndarray]:
    """Store keys and values, if there are any, and return rotated queries in the form that the cache type asks for."""
    ops = Backend(1)
    if heads.n_head_kv:
        ops.remember(heads, k, v, cache, batch, table)
    if heads.n_head:
        (q,) = ops._prepared(heads, [q], batch, table)
    else:
        q = np.empty((batch.rows, 0, heads.d_k), np.float32)
    if cache.k_type.whole:
        integers, scales = ops.integer_queries(q, float(SCALE), cache.k_type)
        return [np.stack([integers >> 3, integers & 7], axis=2).astype(np.int8), scales]
    return [*ops.int8_queries(q, float(SCALE), cache.k_type)] if cache.k_type.quantized else [q]


def agree(
    d_k: int,
    d_v: int,
    n_rot: int,
    *,
    types: tuple[str, str] = ("f16", "f16"),
    neox: bool = True,
    normed: bool = True,
    biased: bool = False,
    early: bool = False,
    gated: bool = False,
    v_normed: bool = False,
    one: bool = False,
    norm_after: bool = False,
    scaled: bool = False,
    n_head: int = N_HEAD,
    n_head_kv: int = N_HEAD_KV,
    mixed: bool = True,
) -> None:
    """q, k and v as slices of one matrix product, some of whose columns belong to none of them; ``one``: v is k; ``mixed``:
    the rows belong to two sequences, otherwise only the first slot counts."""
    rng = np.random.default_rng(d_k + d_v)
    rows = POSITIONS.size
    sizes = n_head * d_k * (2 if gated else 1), n_head_kv * d_k, n_head_kv * d_v
    product = rng.normal(size=(rows, sum(sizes) + 5)).astype(np.float32)
    product[1] *= np.float32(2.0**-110)  # blocks that count as zero, where nothing is normalized
    flat, stride = product.reshape(-1), product.shape[1]
    starts = 0, sizes[0], sizes[0] + (0 if one else sizes[1])
    biases = [rng.normal(size=size).astype(np.float32) for size in (n_head * d_k, *sizes[1:])]
    norms = [rng.normal(size=d_k).astype(np.float32) for _ in range(2)]
    angles = rng.uniform(-3, 3, (301, n_rot // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32) if n_rot else None
    factors = rng.uniform(0.5, 2, 301).astype(np.float32) if scaled else None
    shape, kinds = AttentionCacheSpec(N_HEAD_KV, d_k, d_v), Types(*map(cache_type, types))
    cache, mine = (
        layer_of(shape, 301, 1, kinds, lambda s, t: rng.integers(0, 999, s).astype(t), n_sequences=2) for _ in range(2)
    )
    for name in ("keys", "values"):
        getattr(mine, name)[...] = getattr(cache, name)
    slots = np.array([1, 1, 0] if mixed else [1, 1, 1], np.int32)
    given_slots = slots if mixed else np.array([1, 77, 77], np.int32)
    batch = Batch(POSITIONS, POSITIONS, slots, mixed, thinned=Thinned(POSITIONS[:0], PLACES))

    heads: Heads[np.ndarray] = Heads(
        n_head, n_head_kv, d_k, d_v, neox, float(SCALE), float(EPS), gated=gated, v_normed=v_normed
    )
    heads = replace(heads, norm_after=norm_after, query_scales=factors)
    heads = replace(heads, biases=(biases[0], biases[1], biases[2]) if biased else None)
    heads = replace(heads, q_norm=norms[0] if normed else None, k_norm=norms[1] if normed else None)
    q, k, v = (product[:, start : start + size].copy() for start, size in zip(starts, sizes, strict=True))
    if gated:
        # The gates of a head follow its queries.
        q = np.ascontiguousarray(q.reshape(rows, n_head, 2, d_k)[:, :, 0]).reshape(rows, -1)
    expected = on_cpu(heads, q, k, v, cache, batch, table)

    found = [np.full(x.shape, 0x55, x.dtype) for x in expected]
    new = np.full((rows, n_head_kv, d_k + d_v), 0xFFFFFFFF, np.uint32)
    slices = [flat[start:] for start in starts]
    weights = (norms if normed else [None, None]) + (biases if biased else [None] * 3)
    scale = np.float32(float(SCALE) * LOG2_E) if cache.k_type.whole else SCALE
    arguments = [
        *slices,
        *[stride] * 3,
        POSITIONS,
        PLACES,
        given_slots,
        mine.table,
        table,
        *weights,
        factors,
        EPS,
        scale,
        n_head,
    ]
    arguments += [mine.pages, mine.table.shape[1], int(mixed), found[0], found[-1], new, mine.keys, mine.values]
    constants = neox, normed, biased, early, gated, v_normed, True, norm_after, scaled
    specialization = rope.rope(*types, d_k, d_v, n_rot, *constants)
    run(specialization, rope.grid(rows, n_head, n_head_kv), rope.BLOCK, arguments)
    for a, b in zip(expected, found, strict=True):
        assert a.tobytes() == b.tobytes()
    for name in ("keys", "values"):
        assert getattr(mine, name).tobytes() == getattr(cache, name).tobytes()
    if rope.notes(cache.k_type, cache.v_type):
        place, lane = cache.table[slots, PLACES // CHUNK], PLACES % CHUNK
        stored = cache.keys[:n_head_kv, place, :, lane], cache.values[:n_head_kv, place, lane].swapaxes(0, 1)
        appended = np.concatenate(stored, axis=2)
        assert np.array_equal(new, appended.view(f"u{appended.itemsize}"))


F16, F32 = ("f16", "f16"), ("f32", "f32")


@pytest.mark.covering(2)
@pytest.mark.parametrize("types", [F16, F32])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("d_k", [2, 16, 80, 128])
def test_heads(d_k: int, neox: bool, types: tuple[str, str]) -> None:
    agree(d_k, d_k + 6, d_k, types=types, neox=neox, early=types == F16)


@pytest.mark.parametrize("d_k", [256, 258, 512])
def test_heads_with_more_elements_than_chains(d_k: int) -> None:
    agree(d_k, 32, d_k, biased=True)


@pytest.mark.covering(2)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("neox", [True, False])
def test_with_and_without(normed: bool, biased: bool, neox: bool) -> None:
    agree(40, 24, 40, neox=neox, normed=normed, biased=biased, early=biased)


@pytest.mark.covering(2)
@pytest.mark.parametrize("types", [F16, ("q8_0", "q4_0")])
@pytest.mark.parametrize("n_rot", [0, 16, 96])
@pytest.mark.parametrize("norm_after", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_norms_after_rotation_and_factors(types: tuple[str, str], n_rot: int, norm_after: bool, scaled: bool) -> None:
    """Also without a rotation, and with one of some elements."""
    agree(96, 32, n_rot, types=types, neox=n_rot == 16, biased=True, early=scaled, norm_after=norm_after, scaled=scaled)


def test_heads_without_rotation_or_norm() -> None:
    agree(64, 32, 0, normed=False)


@pytest.mark.parametrize("types", [F16, ("q8_0", "q4_0"), ("i8", "i8")])
def test_rows_of_one_sequence(types: tuple[str, str]) -> None:
    """Only the slot of the first row is read."""
    agree(32, 32, 32, types=types, early=True, mixed=False)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("n_rot", [2, 34])
def test_only_some_elements_rotate(n_rot: int, neox: bool) -> None:
    agree(48, 16, n_rot, types=F32, neox=neox)


@pytest.mark.parametrize(("d_k", "n_rot", "biased"), [(64, 16, False), (40, 24, True), (256, 64, False)])
def test_gates_are_left_alone(d_k: int, n_rot: int, biased: bool) -> None:
    agree(d_k, d_k, n_rot, biased=biased, early=True, gated=True)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("types", [F16, ("q8_0", "q4_0")])
def test_keys_and_values_without_queries(types: tuple[str, str], gated: bool) -> None:
    agree(64, 32, 16, types=types, early=True, gated=gated, n_head=0)


@pytest.mark.parametrize("types", [F16, ("q4_0", "q8_0")])
def test_queries_alone(types: tuple[str, str]) -> None:
    agree(64, 32, 64, types=types, early=True, n_head_kv=0)


# --- quantized caches ------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("k_type", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("v_type", ["f32", "f16", "q8_0", "q4_0"])
def test_types(k_type: str, v_type: str, normed: bool) -> None:
    agree(96, 32, 64, types=(k_type, v_type), normed=normed, v_normed=normed, early=normed)


@pytest.mark.parametrize("types", [("q8_0", "q8_0"), ("q4_0", "q4_0")])
@pytest.mark.parametrize("neox", [True, False])
def test_heads_of_quantized_caches(types: tuple[str, str], neox: bool) -> None:
    agree(32, 96, 32, types=types, neox=neox, normed=False, biased=True)
    agree(512, 512, 512, types=types, neox=neox, v_normed=True, one=True)


@pytest.mark.parametrize("types", [F16, ("q8_0", "q8_0")])
def test_values_that_are_the_keys(types: tuple[str, str]) -> None:
    """Values directly from the product: normalized on their own and not rotated by position."""
    agree(96, 96, 96, types=types, v_normed=True, one=True, biased=False)


@pytest.mark.covering(2)
@pytest.mark.parametrize("of", ["i8", "i12"])
@pytest.mark.parametrize("d", [32, 64, 96, 128, 512])
def test_integers(d: int, of: str) -> None:
    agree(d, d if d == 128 else 64, min(d, 128), types=(of, of), normed=of == "i8", early=d == 64)
