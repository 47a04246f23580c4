"""Latent attention in the simulator: the bits of the mirror, for chunks, whole operations, and the products of heads."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.arrays import Pass
from engine.cache.latent import LatentCache, LatentShape
from engine.cache.types import CHUNK, GROUP, Types, cache_type
from engine.cpu import latent_attention as mirror
from engine.cpu.latent_operations import pairs_of_heads
from engine.cuda import backend
from engine.cuda.attention import attend as attention
from engine.cuda.attention import latent as chunks_of_latents
from engine.cuda.attention import tiled as tiled_attention
from engine.cuda.latent import latent_rope
from engine.cuda.products.heads import HeadProducts
from engine.cuda.runtime.simulator import run
from engine.errors import DeviceError
from engine.models.latent import Latent
from tests.cuda.simulated.test_operations import FORMATS_BY_NAME, F, activations, computed, cpu, gpu, same, weight
from tests.tiers import few

assert gpu

SCALE = F(0.3)
NO_LIMIT = 1 << 20


def unset(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Rows that have never been written are NaN."""
    array: np.ndarray = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint16)[:] = 0x7E01 if dtype == np.uint16 else 0x7FC1
    return array


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
    seed: int | None = None,
    tiled: tuple[int, int] | None = None,
) -> None:
    """Attention of rows at ``positions`` over everything up to the last of them.  tiled: pairs of a thread and threads of a
    block of the kernel for prompts; None: the kernels of a step."""
    rng = np.random.default_rng(sum(positions) + n_head + rank)
    rows, end = len(positions), max(positions) + 1
    of = cache_type(kind)
    cache: LatentCache = LatentShape(rank + n_rope).layer(end, rows, Types(of, of), unset)
    c, k = (rng.standard_normal((end, n)).astype(F) for n in (rank, n_rope))
    c[rng.random(c.shape) < 0.1] = -0.0
    c[:, 0] *= F(1e-45)  # small weights make sums of -0 of these
    mirror.append_rows(c, k, np.arange(end, dtype=np.int32), cache.rows, 0, end)
    at = np.array(positions, np.int32)
    q, r = (2 * rng.standard_normal((rows, n_head, n)).astype(F) for n in (rank, n_rope))
    groups = -(-cache.chunks // group)
    tops, parts = np.empty((rows, groups, n_head, 2), F), np.empty((rows, groups, n_head, rank), F)
    expected, out = np.empty_like(q), np.full_like(q, np.nan)
    mirror.attend_groups(group)(q, r, cache.rows, at, SCALE, tops, parts, 0, rows * groups)
    mirror.join_parts(group)(tops, parts, at, expected, 0, rows * n_head)
    assert np.isfinite(expected).all()
    query, ring = np.concatenate([q, r], axis=2), cache.rows.reshape(-1).view(np.uint32)
    arguments: list[Any]
    if tiled is not None:
        width, pairs, (own, threads) = rank + n_rope, 32, tiled
        constants = kind, kind, width, rank, n_head, pairs, own, threads, own == 8, False, False, group, True
        arguments = [query.view(np.uint32), None, ring, ring, at, None, None, out, rows, cache.chunks, 0, SCALE]
        grid = 1, -(-rows * n_head // pairs)
        run(tiled_attention.attend_tiles(*constants), grid, threads, arguments, seed=seed)
        same(out, expected)
        return
    half, n_slots = of.bits == 16, cache.chunks
    plan = chunks_of_latents.geometry(
        *(rows, n_head, rank, n_rope, half, n_slots, 1, NO_LIMIT, early), slices=slices, together=group
    )
    weights, sums = (np.full(n, np.nan, F) for n in attention.scratch(rows, n_head, rank, n_slots))
    arguments = [query, ring, at, weights, sums, rows, cache.chunks, n_slots, SCALE]
    run(plan.attend, (plan.attend_grid[0], splits or plan.attend_grid[1]), plan.attend_block, arguments, seed=seed)
    given = [weights, sums, at, None, None, out, n_slots, 0]
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
            ("Q8_0", 1, 3, 24, 64),
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
    mine, theirs = (LatentShape(rank + n_rope).layer(2 * CHUNK, 2, types, np.zeros) for _ in range(2))
    latent: Latent[Any, Any] = Latent(n_head, 0, n_rope, rank, 0, 1.0, 1e-6, norm, None, None, table)
    cpu.remember_latent(latent, c, k, mine, Pass(at, at))
    parts = [q, cpu.rope(r.copy(), at, table, False)]
    if scaled:
        parts = [part * factors[at][:, None, None] for part in parts]
    query = np.full((rows, n_head, rank + n_rope), np.nan, F)
    ring = theirs.rows.reshape(-1).view(np.uint32)
    given = [q, r, c, k, at, table, norm, factors, F(1e-6), n_head, theirs.chunks, query, ring]
    run(latent_rope(kind == "f16", rank, n_rope, scaled, True), (n_head + 1, rows), 32, given)
    same(query, np.concatenate(parts, axis=2))
    same(theirs.rows, mine.rows)


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
    rng, n_head, nope, rank, d_v = np.random.default_rng(rows), 2, 32, 32, 32
    angles = rng.uniform(-3, 3, (64, rope // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(F)
    matrices = (
        replace(weight(FORMATS_BY_NAME["Q8_0"], n_head * n, columns), stack=n_head)
        for n, columns in ((rank, nope), (d_v, rank))
    )
    factors = rng.uniform(0.5, 2, 64).astype(F) if scaled else None
    k_b, v_b = matrices
    norm = rng.standard_normal(rank).astype(F)
    sizes = n_head, nope, rope, rank, d_v, float(SCALE), 1e-6
    mine: Latent[Any, Any] = Latent(*sizes, norm, cpu.weight(k_b), cpu.weight(v_b), table, factors)
    theirs: Latent[Any, Any] = Latent(
        *sizes, gpu.upload(norm), gpu.weight(k_b), gpu.weight(v_b), gpu.upload(table),
        None if factors is None else gpu.upload(factors),
    )  # fmt: skip
    types = Types(cache_type(kind), cache_type(kind))
    caches = [LatentShape(rank + rope).layer(2 * CHUNK, 32, types, ops.zeros) for ops in (cpu, gpu)]
    first = 0
    for count in (rows, 1):
        widths = n_head * nope, n_head * rope, rank, rope
        x = [rng.standard_normal((count, n)).astype(F) for n in widths]
        at = np.arange(first, first + count, dtype=np.int32)
        expected = cpu.latent_attention(mine, x[0], x[1], x[2], x[3], caches[0], Pass(at, at))
        batch, y = Pass(gpu.upload(at), gpu.upload(at)), [gpu.upload(part) for part in x]
        (found,) = computed(gpu, partial(gpu.latent_attention, theirs, y[0], y[1], y[2], y[3], caches[1], batch))
        same(found, expected)
        same(gpu.download(caches[1].rows), caches[0].rows)
        first += count
    at = np.array([first], np.int32)
    c, k = (rng.standard_normal((1, n)).astype(F) for n in (rank, rope))
    cpu.remember_latent(mine, c, k, caches[0], Pass(at, at))
    batch = Pass(gpu.upload(at), gpu.upload(at))
    store = partial(gpu.remember_latent, theirs, gpu.upload(c), gpu.upload(k), caches[1], batch)
    gpu.start(gpu.record(store))
    same(gpu.download(caches[1].rows), caches[0].rows)
