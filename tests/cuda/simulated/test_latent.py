"""Latent attention in the simulator: the bits of the mirror, for chunks, whole operations, and the products of heads."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.arrays import Batch
from engine.cache.latent import LatentCache, LatentCacheSpec
from engine.cache.types import CHUNK, GROUP, Types, cache_type
from engine.cpu import latent_attention as mirror
from engine.cpu.operations.latent import pairs_of_heads
from engine.cuda import backend, indexer
from engine.cuda.attention import attend as attention
from engine.cuda.attention import latent as chunks_of_latents
from engine.cuda.attention import tiled as tiled_attention
from engine.cuda.latent import latent_rope
from engine.cuda.products.heads import HeadProducts
from engine.cuda.runtime.simulator import run
from engine.errors import DeviceError
from engine.ops.latent import Latent
from tests.batches import one_sequence
from tests.cpu.test_latent_attention import unset
from tests.cuda.simulated.test_operations import FORMATS_BY_NAME, F, activations, computed, cpu, gpu, same, weight
from tests.pages import layer_of
from tests.tiers import few

assert gpu

SCALE = F(0.3)
NO_LIMIT = 1 << 20


def agree(
    kind: str,
    positions: list[int],
    n_head: int,
    rank: int,
    n_rope: int,
    *,
    slices: int = 0,
    splits: int = 0,
    early: bool = True,
    group: int = GROUP,
    seed: int | None = 1,
    tiled: tuple[int, int] | None = None,
    mixed: list[int] | None = None,
    top_k: int = 0,
) -> None:
    """Attention of rows at ``positions`` over everything up to the last of them.  tiled: pairs of a thread and threads of a
    block of the kernel for prompts; None: the kernels of a step.  mixed: the slots of the rows, None: all have slot 1.
    top_k: the number of positions that are chosen for each row; 0: all."""
    rng = np.random.default_rng(sum(positions) + n_head + rank)
    rows, end = len(positions), max(positions) + 1
    of = cache_type(kind)
    at, sequences = np.array(positions, np.int32), np.array(mixed or [1] * rows, np.int32)
    shape, n_slots = LatentCacheSpec(rank + n_rope), int(sequences.max()) + 1
    cache: LatentCache = layer_of(shape, end, rows, Types(of, of), unset, n_sequences=n_slots)
    for slot in set(sequences.tolist()):
        own = int(at[sequences == slot].max()) + 1
        c, k = (rng.standard_normal((own, n)).astype(F) for n in (rank, n_rope))
        c[rng.random(c.shape) < 0.1] = -0.0
        c[:, 0] *= F(1e-45)  # small weights make sums of -0 of these
        places = np.arange(own, dtype=np.int32), np.full(own, slot, np.int32), cache.table
        mirror.append_rows(c, k, *places, cache.rows, 0, own)
    chunks = cache.table.shape[1]
    q, r = (2 * rng.standard_normal((rows, n_head, n)).astype(F) for n in (rank, n_rope))
    chosen, last, partials = np.full((rows, top_k), -1, np.int32), at, -(-top_k // CHUNK) if top_k else chunks
    if top_k:
        for t, p in enumerate(positions):
            some = np.sort(rng.permutation(p + 1)[:top_k])
            chosen[t, : some.size] = some
        last = np.minimum(at, top_k - 1).astype(np.int32)
    groups = -(-chunks // group)
    tops, parts = np.empty((rows, groups, n_head, 2), F), np.empty((rows, groups, n_head, rank), F)
    expected, out = np.empty_like(q), np.full_like(q, np.nan)
    places = last, sequences, cache.table
    mirror.attend_groups(group)(q, r, cache.rows, *places, chosen, SCALE, tops, parts, 0, rows * groups)
    mirror.join_parts(group)(tops, parts, last, expected, 0, rows * n_head)
    assert np.isfinite(expected).all()
    query, latents = np.concatenate([q, r], axis=2), cache.rows.reshape(-1).view(np.uint32)
    places = last, sequences, cache.table.reshape(-1)
    arguments: list[Any]
    if tiled is not None:
        width, pairs, (own, threads) = rank + n_rope, 32, tiled
        constants = kind, kind, width, rank, n_head, pairs, own, threads, own == 8, False, False, group, True
        arguments = [query.view(np.uint32), None, latents, latents, *places, None, None, out]
        arguments += [rows, cache.pages, chunks, 0, SCALE]
        grid = 1, -(-rows * n_head // pairs)
        run(tiled_attention.attend_tiles(*constants), grid, threads, arguments, seed=seed)
        same(out, expected)
        return
    half = of.bits == 16
    plan = chunks_of_latents.geometry(
        *(rows, n_head, rank, n_rope, half, partials, 1, NO_LIMIT, early and not top_k, mixed is not None),
        slices=slices,
        together=group,
        listed=top_k > 0,
    )
    weights, sums = (np.full(n, np.nan, F) for n in attention.scratch(rows, n_head, rank, partials))
    arguments = [query, latents, *places, weights, sums, 1 if mixed or top_k else rows, chunks, partials, SCALE]
    arguments += [chosen if top_k else None, top_k, int(mixed is not None)]
    across, most, alone = plan.attend_grid
    run(plan.attend, (across, splits or most, alone), plan.attend_block, arguments, seed=seed)
    given = [weights, sums, last, None, None, out, partials, 0]
    run(plan.combine, plan.combine_grid, plan.combine_block, given, seed=seed)
    same(out, expected)


@pytest.mark.parametrize(
    ("kind", "positions", "n_head", "rank", "n_rope", "slices"),
    few(
        [
            ("f16", [70], 3, 48, 16, 1),
            ("f32", [63, 64], 5, 36, 8, 1),
            ("f16", [62], 18, 16, 8, 1),
            ("f16", [3], 2, 48, 16, 2),
            ("f32", [20], 9, 32, 16, 4),
            ("f16", [127, 128, 129], 11, 40, 8, 3),
        ],
        2,
    ),
)
def test_chunks(kind: str, positions: list[int], n_head: int, rank: int, n_rope: int, slices: int) -> None:
    """Rows on both sides of a border and one before it, pairs that do not fill a block, more than a thread sums at once,
    slices with values and with none."""
    agree(kind, positions, n_head, rank, n_rope, slices=slices)


def test_several_chunks_and_groups() -> None:
    agree("f16", [330, 70], 2, 16, 8, splits=2, group=2, early=False)


@pytest.mark.parametrize(("kind", "n_head", "slices"), few([("f16", 3, 2), ("f32", 11, 0)], 0))
def test_rows_of_several_sequences(kind: str, n_head: int, slices: int) -> None:
    """Each row has the pages of its own sequence; the last row is the first one again."""
    agree(kind, [70, 71, 3, 129, 70], n_head, 24, 8, slices=slices, splits=2, mixed=[2, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("kind", "n_head", "slices", "top_k", "mixed"),
    few([("f16", 3, 2, 70, None), ("f32", 11, 0, 40, [2, 2, 0, 1, 2]), ("f16", 9, 1, 129, [1, 1, 0, 2, 1])], 2),
)
def test_chosen_positions(kind: str, n_head: int, slices: int, top_k: int, mixed: list[int] | None) -> None:
    """Rows that see fewer positions than are chosen, and more; lists of one chunk, and of several groups."""
    agree(kind, [70, 199, 3, 129, 70], n_head, 24, 8, slices=slices, splits=2, mixed=mixed, top_k=top_k, group=2)


def test_rows_of_several_sequences_use_the_kernel_of_one_row() -> None:
    sizes = 16, 512, 64, True, 512, 132, 227 << 10, True
    alone, mixed = (chunks_of_latents.geometry(rows, *sizes, mixed=rows > 1) for rows in (1, 5))
    assert mixed.attend == alone.attend
    # Together no more blocks than are resident at once.
    assert (alone.attend_grid, mixed.attend_grid) == ((1, 264, 1), (1, 52, 5))


@pytest.mark.parametrize(
    ("kind", "rank", "n_rope", "own", "threads"),
    few([("f16", 40, 8, 8, 64), ("f32", 16, 16, 4, 64), ("f16", 24, 8, 4, 64)]),
)
def test_rows_of_a_prompt(kind: str, rank: int, n_rope: int, own: int, threads: int) -> None:
    agree(kind, [*range(117, 134)], 3, rank, n_rope, tiled=(own, threads), group=2)


def test_the_order_of_threads_does_not_show() -> None:
    agree("f32", [64], 2, 16, 4, seed=1, splits=1)


@pytest.mark.parametrize(
    ("rows", "n_head", "blocks", "tasks"),
    [(1, 16, 1, 16), (1, 20, 1, 24), (1, 128, 4, 32), (3, 20, 2, 32), (2, 8, 1, 16)],
)
def test_one_block_has_all_heads_of_a_row(rows: int, n_head: int, blocks: int, tasks: int) -> None:
    plan = chunks_of_latents.geometry(rows, n_head, 512, 64, True, 64, 132, 227 << 10, True)
    assert plan.attend_grid[0] == blocks and plan.attend.constants[4] == tasks
    assert plan.attend.shared * 2 <= 227 << 10


def test_sizes_that_the_kernel_cannot_take() -> None:
    for rank, n_rope in ((34, 6), (32, 4)):
        with pytest.raises(DeviceError, match="rows of a multiple of 8 elements"):
            chunks_of_latents.geometry(1, 2, rank, n_rope, True, 8, 100, NO_LIMIT, False)
    with pytest.raises(DeviceError, match="do not fit into the GPU's shared memory"):
        chunks_of_latents.geometry(1, 2, 1 << 14, 64, True, 8, 100, 64 << 10, False)


@pytest.mark.parametrize(
    ("name", "rows", "n_head", "n_rows", "columns"),
    few(
        [
            ("Q8_0", 1, 3, 24, 96),
            ("Q5_0", 9, 2, 32, 96),
            ("Q4_K", 2, 2, 16, 256),
            ("F16", 2, 3, 9, 40),
            ("Q8_0", 17, 2, 24, 64),
            ("Q4_K", 1, 2, 40, 512),
            ("Q6_K", 17, 2, 16, 256),
            ("NVFP4", 3, 2, 16, 64),
        ],
        5,
    ),
)
def test_products_of_heads(gpu: backend.Backend, name: str, rows: int, n_head: int, n_rows: int, columns: int) -> None:
    """Also matrices that begin inside a record, and passes of more rows than a step."""
    w = replace(weight(FORMATS_BY_NAME[name], n_head * n_rows, columns), stack=n_head)
    x = activations(rows, n_head * columns)
    (theirs,) = cpu._expert_products(x.reshape(rows * n_head, columns), pairs_of_heads(rows, n_head), cpu.weight(w))
    a, matrix = gpu.upload(x), gpu.weight(w)
    (ours,) = computed(gpu, lambda: HeadProducts(gpu.recorder, rows, n_head).multiply(a, matrix))
    same(ours, theirs.reshape(rows, n_head, n_rows))


@pytest.mark.parametrize(("kind", "scaled"), [("f16", True), ("f32", False)])
def test_queries_and_rows(kind: str, scaled: bool) -> None:
    """Several elements and pairs of a lane."""
    rng, n_head, rank, n_rope, rows = np.random.default_rng(4), 2, 72, 76, 2
    q, r = (rng.standard_normal((rows, n_head, n)).astype(F) for n in (rank, n_rope))
    c, k = (rng.standard_normal((rows, n)).astype(F) for n in (rank, n_rope))
    at, norm = np.array([3, 130], np.int32), rng.standard_normal(rank).astype(F)
    angles = rng.uniform(-3, 3, (131, n_rope // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(F)
    factors = rng.uniform(0.5, 2, 131).astype(F)
    types = Types(cache_type(kind), cache_type(kind))
    mine, theirs = (
        layer_of(LatentCacheSpec(rank + n_rope), 3 * CHUNK, 2, types, np.zeros, n_sequences=3) for _ in "ab"
    )
    slots = np.array([2, 0], np.int32)
    latent: Latent[Any, Any] = Latent(n_head, 0, n_rope, rank, 0, 1.0, 1e-6, norm, None, None, table)
    cpu.remember_latent(latent, c, k, mine, Batch(at, at, slots, True))
    parts = [q, cpu.rope(r.copy(), at, table, False)]
    if scaled:
        parts = [part * factors[at][:, None, None] for part in parts]
    query = np.full((rows, n_head, rank + n_rope), np.nan, F)
    latents = theirs.rows.reshape(-1).view(np.uint32)
    given: list[Any] = [q, r, c, k, at, slots, theirs.table.reshape(-1), table, norm, factors, F(1e-6), n_head]
    kernel = latent_rope(kind == "f16", rank, n_rope, scaled, True)
    run(kernel, (n_head + 1, rows), 32, [*given, 3, 1, query, latents])
    same(query, np.concatenate(parts, axis=2))
    same(theirs.rows, mine.rows)
    # Not mixed: the slot of the first row is that of all.
    cpu.remember_latent(latent, c, k, mine, Batch(at, at, np.full(rows, 2, np.int32)))
    run(kernel, (n_head + 1, rows), 32, [*given, 3, 0, query, latents])
    same(theirs.rows, mine.rows)


def both_sides(gpu: backend.Backend, rng: np.random.Generator, scaled: bool, rope: int) -> tuple[Latent, Latent]:
    """Latent attention of two heads with latents of 32 elements, on the CPU and on the GPU."""
    n_head, nope, rank, d_v = 2, 32, 32, 32
    angles = rng.uniform(-3, 3, (2 * CHUNK, rope // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(F)
    matrices = (
        replace(weight(FORMATS_BY_NAME["Q8_0"], n_head * n, columns), stack=n_head)
        for n, columns in ((rank, nope), (d_v, rank))
    )
    factors = rng.uniform(0.5, 2, 2 * CHUNK).astype(F) if scaled else None
    k_b, v_b = matrices
    norm = rng.standard_normal(rank).astype(F)
    sizes = n_head, nope, rope, rank, d_v, float(SCALE), 1e-6
    mine: Latent[Any, Any] = Latent(*sizes, norm, cpu.weight(k_b), cpu.weight(v_b), table, factors)
    theirs: Latent[Any, Any] = Latent(
        *sizes, gpu.upload(norm), gpu.weight(k_b), gpu.weight(v_b), gpu.upload(table),
        None if factors is None else gpu.upload(factors),
    )  # fmt: skip
    return mine, theirs


def both_caches(
    gpu: backend.Backend, kind: str, width: int, n_sequences: int = 1, index: tuple[int, int] = (0, 0)
) -> list[LatentCache[Any]]:
    """Memory for two chunks of each sequence, on the CPU and on the GPU.  index: elements of keys of an indexer, and the
    number of positions that it chooses."""
    types = Types(cache_type(kind), cache_type(kind))
    sides: list[tuple[Any, Any]] = [(np.zeros, None), (gpu.zeros, gpu.store)]
    shape = LatentCacheSpec(width, *index)
    return [layer_of(shape, 2 * CHUNK, 32, types, zeros, store, n_sequences) for zeros, store in sides]


@pytest.mark.parametrize(
    ("kind", "rows", "scaled", "rope"),
    few(
        [
            ("f16", 2, True, 8),
            ("f32", 1, False, 8),
            ("f16", 17, False, 16),
            ("f32", 17, True, 8),
            ("f16", 1, False, 16),
        ],
        2,
    ),
)
def test_operations(gpu: backend.Backend, kind: str, rows: int, scaled: bool, rope: int) -> None:
    """A pass, and one after it; what is stored, too.  Prompts have a kernel of their own if widths allow it."""
    rng = np.random.default_rng(rows)
    mine, theirs = both_sides(gpu, rng, scaled, rope)
    caches = both_caches(gpu, kind, 32 + rope)
    first = 0
    for count in (rows, 1):
        widths = 64, 2 * rope, 32, rope
        x = [rng.standard_normal((count, n)).astype(F) for n in widths]
        at = np.arange(first, first + count, dtype=np.int32)
        expected = cpu.latent_attention(mine, x[0], x[1], x[2], x[3], caches[0], one_sequence(at))
        batch, y = one_sequence(at, gpu), [gpu.upload(part) for part in x]
        (found,) = computed(gpu, partial(gpu.latent_attention, theirs, y[0], y[1], y[2], y[3], caches[1], batch))
        same(found, expected)
        same(gpu.download(caches[1].rows), caches[0].rows)
        first += count
    at = np.array([first], np.int32)
    c, k = (rng.standard_normal((1, n)).astype(F) for n in (32, rope))
    cpu.remember_latent(mine, c, k, caches[0], one_sequence(at))
    batch = one_sequence(at, gpu)
    store = partial(gpu.remember_latent, theirs, gpu.upload(c), gpu.upload(k), caches[1], batch)
    gpu.start(gpu.record(store))
    same(gpu.download(caches[1].rows), caches[0].rows)


def indexed(ops: Any, latent: Any, x: list[Any], cache: Any, batch: Any, top_k: int) -> list[Any]:
    """The choice of positions, and attention to them."""
    ops.keep_keys(x[4], cache.keys, batch)
    chosen = ops.choose_rows(x[5], x[6], 0.25, 1, top_k, cache.keys, batch)
    return [chosen, ops.latent_attention(latent, x[0], x[1], x[2], x[3], cache, batch, chosen)]


@pytest.mark.parametrize(("kind", "mixed"), few([("f32", False), ("f16", True)], 2))
def test_operations_on_chosen_positions(
    gpu: backend.Backend, kind: str, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of more rows than a step, which chooses from its own rows, too; or rows of several sequences."""
    monkeypatch.setattr(indexer, "THREADS", 32)
    monkeypatch.setattr(indexer, "PARTS", 2)
    rng, rope, n_index, d_index, top_k = np.random.default_rng(3), 8, 3, 16, 5
    mine, theirs = both_sides(gpu, rng, False, rope)
    caches = both_caches(gpu, kind, 32 + rope, 3, (d_index, top_k))
    for array, on_device in zip(*([cache.rows, cache.keys.rows] for cache in caches if cache.keys), strict=True):
        array[:] = rng.standard_normal(array.shape).astype(F if kind == "f32" else np.float16).view(array.dtype)
        gpu.store(on_device, 0, array)
    at, slots = np.arange(60, 77, dtype=np.int32), np.ones(17, np.int32)
    if mixed:
        at, slots = np.array([63, 64, 2, 40], np.int32), np.array([1, 1, 0, 2], np.int32)
    widths = 64, 2 * rope, 32, rope, d_index, n_index * d_index, n_index
    x = [rng.standard_normal((at.size, n)).astype(F) for n in widths]
    y, batch = [gpu.upload(part) for part in x], Batch(gpu.upload(at), gpu.upload(at), gpu.upload(slots), mixed)
    expected = indexed(cpu, mine, x, caches[0], Batch(at, at, slots, mixed), top_k)
    found = computed(gpu, lambda: indexed(gpu, theirs, y, caches[1], batch, top_k))
    for one, other in zip(found, expected, strict=True):
        same(one, other)
    for array, on_device in zip(*([cache.rows, cache.keys.rows] for cache in caches if cache.keys), strict=True):
        same(gpu.download(on_device), array)


def test_operations_on_rows_of_several_sequences(gpu: backend.Backend) -> None:
    """A pass of three sequences, of which one row is repeated, gives each row the bits that it has in a pass of its own
    sequence alone, and stores the same."""
    rng, rope = np.random.default_rng(3), 8
    mine, theirs = both_sides(gpu, rng, True, rope)
    caches, alone = both_caches(gpu, "f16", 32 + rope, 3), both_caches(gpu, "f16", 32 + rope, 3)[0]
    for cache in (caches[0], alone):
        cache.rows[:] = np.random.default_rng(4).standard_normal(cache.rows.shape).astype(np.float16).view(np.uint16)
    gpu.store(caches[1].rows, 0, alone.rows)
    at, slots = np.array([63, 64, 2, 40, 63], np.int32), np.array([1, 1, 0, 2, 1], np.int32)
    x = [rng.standard_normal((5, n)).astype(F) for n in (64, 2 * rope, 32, rope)]
    for part in x:
        part[4] = part[0]
    expected = cpu.latent_attention(mine, x[0], x[1], x[2], x[3], caches[0], Batch(at, at, slots, True))
    p, batch = [gpu.upload(part) for part in x], Batch(gpu.upload(at), gpu.upload(at), gpu.upload(slots), True)
    (found,) = computed(gpu, lambda: gpu.latent_attention(theirs, p[0], p[1], p[2], p[3], caches[1], batch))
    same(found, expected)
    for rows in (slice(2), slice(2, 3), slice(3, 4)):
        q, r, c, k = (part[rows].copy() for part in x)
        own = cpu.latent_attention(mine, q, r, c, k, alone, Batch(at[rows], at[rows], slots[rows]))
        same(own, expected[rows])
    same(expected[4], expected[0])
    same(gpu.download(caches[1].rows), caches[0].rows)
    same(alone.rows, caches[0].rows)
