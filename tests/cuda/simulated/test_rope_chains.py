"""engine/cuda/rope_chains.py in the simulator: what the CPU stores in its cache, and its queries, from the same chains."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.arrays import Batch, Thinned
from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cache.kv import AttentionCacheSpec
from engine.cache.types import Types, cache_type
from engine.cpu.integer_cache import LOG2_E
from engine.cuda import rope_chains
from engine.cuda.attention import launches
from engine.cuda.products import warpgroup_chain, warpgroup_matmul
from engine.cuda.runtime.simulator import run
from engine.cuda.runtime.tensor import Tensor
from engine.ops.heads import Heads
from tests.cuda.simulated.test_operations import FORMATS_BY_NAME, activations, cpu, gpu, weight
from tests.cuda.simulated.test_rope import EPS, SCALE, on_cpu
from tests.cuda.simulated.test_wide_matmul import LARGE
from tests.pages import layer_of
from tests.tiers import few

assert gpu

N_CTX = 320


def batch_of(rows: int, mixed: bool = True) -> Batch[np.ndarray]:
    """Rows of two sequences, or of one, which have dropped tokens."""
    i = np.arange(rows, dtype=np.int32)
    slots = i % 2 if mixed else np.ones_like(i)
    return Batch(3 * i + 9, 3 * i + 9, slots, mixed, thinned=Thinned(i[:0], 2 * i + 5))


def sums_of(chains: np.ndarray, n_chains: int, rows: int) -> np.ndarray:
    """The results [rows, 16 strips] of chains [blocks, strips, 8, tiles, 8, 4, 2, 2]: lane 4 g + t has weight rows g and
    g + 8 for activation rows 2 t and 2 t + 1."""
    total = np.zeros_like(chains[:, :, 0])
    for c in range(n_chains):
        total += chains[:, :, c]
    blocks, strips, tiles = total.shape[:3]
    return np.ascontiguousarray(total.transpose(0, 2, 4, 6, 1, 5, 3).reshape(8 * tiles * blocks, 16 * strips)[:rows])


def agree(
    rows: int,
    d_k: int,
    d_v: int,
    *,
    types: str = "f16",
    n_rot: int | None = None,
    neox: bool = True,
    normed: bool = True,
    biased: bool = False,
    v_normed: bool = False,
    norm_after: bool = False,
    scaled: bool = False,
    mixed: bool = True,
    n_head: int = 1,
    n_head_kv: int = 1,
    tiles: int = 4,
    n_chains: int = 8,
) -> None:
    rng = np.random.default_rng(rows + d_k)
    sizes = n_head * d_k, n_head_kv * d_k, n_head_kv * d_v
    blocks, n_rot = -(-rows // (8 * tiles)), d_k if n_rot is None else n_rot
    chains = rng.standard_normal((blocks, sum(sizes) // 16, 8, tiles, 8, 4, 2, 2)).astype(np.float32)
    chains[:, :, n_chains:] = np.nan
    q, k, v = np.split(sums_of(chains, n_chains, rows), np.cumsum(sizes)[:2], axis=1)
    biases: Any = tuple(rng.normal(size=size).astype(np.float32) for size in sizes) if biased else None
    norms = [rng.normal(size=d_k).astype(np.float32) if normed else None for _ in range(2)]
    angles = rng.uniform(-3, 3, (N_CTX, n_rot // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32) if n_rot else None
    factors = rng.uniform(0.5, 2, N_CTX).astype(np.float32) if scaled else None
    kinds = Types(cache_type(types), cache_type(types))
    shape, batch = AttentionCacheSpec(n_head_kv, d_k, d_v), batch_of(rows, mixed)
    cache, mine = (layer_of(shape, N_CTX, rows, kinds, np.zeros, n_sequences=2) for _ in range(2))
    heads: Heads[Any] = Heads(n_head, n_head_kv, d_k, d_v, neox, float(SCALE), float(EPS), v_normed=v_normed)
    heads = replace(heads, q_norm=norms[0], k_norm=norms[1], biases=biases)
    heads = replace(heads, norm_after=norm_after, query_scales=factors)
    expected = on_cpu(heads, q.copy(), k.copy(), v.copy(), cache, batch, table)

    found = [np.full(x.shape, 0x55, x.dtype) for x in expected]
    scale = np.float32(float(SCALE) * LOG2_E) if kinds.k.whole else SCALE
    arguments = [chains, n_chains, rows, batch.positions, batch.thinned.places if batch.thinned else None]
    arguments += [batch.sequences, mine.table, table, *norms, *(biases or [None] * 3), factors, EPS, scale, n_head]
    arguments += [mine.pages, mine.table.shape[1], int(mixed), found[0], found[-1], mine.keys, mine.values]
    constants = neox, normed, biased, v_normed, norm_after, scaled, tiles
    kernel = rope_chains.rope_chains(types, types, d_k, d_v, n_rot, *constants)
    run(kernel, rope_chains.grid(rows, n_head, n_head_kv), rope_chains.BLOCK, arguments, seed=1)
    for a, b in zip((*expected, cache.keys, cache.values), (*found, mine.keys, mine.values), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("types", ["f16", "i8", "q8_0"])
@pytest.mark.parametrize(("rows", "d"), [(17, 128), (48, 64)])
@pytest.mark.parametrize(("normed", "biased"), [(True, False), (False, True)])
@pytest.mark.parametrize("neox", [True, False])
def test_heads(types: str, rows: int, d: int, normed: bool, biased: bool, neox: bool) -> None:
    """Tiles that are not full, and a second block of the product."""
    agree(rows, d, d, types=types, normed=normed, biased=biased, neox=neox, n_chains=8 if normed else 5)


@pytest.mark.parametrize(
    "given",
    few(
        [
            # Tiles of a block without rows; heads whose keys and values differ in size.
            {"rows": 17, "d_k": 48, "d_v": 16, "tiles": 8, "n_head": 2, "n_head_kv": 2, "n_rot": 16, "mixed": False},
            # More strips than warps.
            {"rows": 17, "d_k": 32, "d_v": 256, "types": "f32", "v_normed": True, "norm_after": True, "scaled": True},
            {"rows": 17, "d_k": 192, "d_v": 64, "n_rot": 0, "n_head": 3},
        ],
        1,
    ),
)
def test_sizes(given: dict[str, Any]) -> None:
    agree(**given)


# --- when it is launched ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formats", "gated", "expected"),
    few(
        [
            (("Q4_K", "Q4_K", "Q4_K"), False, ["rope_chains"]),
            (("Q4_K", "Q4_K", "Q6_K"), False, ["rope_chains"]),
            # Gates are read later.
            (("Q4_K", "Q4_K", "Q4_K"), True, ["matmul_chains", "rope"]),
            # Weight rows of queries are the last ones.
            (("Q6_K", "Q4_K", "Q4_K"), False, ["matmul_chains", "rope"]),
        ],
        1,
    ),
)
def test_a_pass_of_many_rows(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, formats: tuple[str, ...], gated: bool, expected: list[str]
) -> None:
    """The launch after a product whose blocks share chains adds these, if it can; the bits do not depend on it."""
    gpu.device.shared_memory, rows, d = LARGE, 48, 32
    shape = warpgroup_chain.TileShape(8, 2, 2)
    monkeypatch.setattr(warpgroup_matmul, "launches_of", lambda _, n, *__: ((n, shape),))
    heads: Heads[Any] = Heads(1, 1, d, d, True, float(SCALE), float(EPS), gated=gated)
    spec, kinds = AttentionCacheSpec(1, d, d), Types(cache_type("f16"), cache_type("f16"))
    theirs, ours = (layer_of(spec, N_CTX, rows, kinds, ops.zeros, ops.store, 2) for ops in (cpu, gpu))
    x, sizes = activations(rows, 512), (2 * d if gated else d, d, d)
    matrices = [weight(FORMATS_BY_NAME[of], n, 512) for of, n in zip(formats, sizes, strict=True)]
    table = np.random.default_rng(0).normal(size=(N_CTX, 2, d // 2)).astype(np.float32)
    batch = replace(batch_of(rows), thinned=None)
    positions, slots, given, angles = (gpu.upload(each) for each in (batch.positions, batch.sequences, x, table))
    held, on_gpu = [gpu.weight(w) for w in matrices], Batch[Tensor](positions, positions, slots, True)

    def forward() -> Tensor:
        q, k, v = gpu.matmul(given, *held)
        (query,), _ = launches.rotate(gpu.recorder, heads, q, k, v, ours, on_gpu, angles)
        return query

    plan = gpu.record(forward)
    names = [launch.kernel.kernel.name for launch in plan.launches]
    assert names[1:] == ["matmul_warpgroups", *expected]
    gpu.start(plan)
    q, k, v = cpu.matmul(x, *matrices)
    (query,) = on_cpu(heads, np.ascontiguousarray(q[:, :d]), k, v, theirs, batch, table)
    assert gpu.download(plan.result).tobytes() == query.tobytes()
    for name in ("keys", "values"):
        assert gpu.download(getattr(ours, name)).tobytes() == getattr(theirs, name).tobytes()
