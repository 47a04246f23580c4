"""Products of many rows with experts, by warpgroups, in the simulator: the bits of the mirror, however pairs are spread."""

from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cuda.products import repack, stream_experts, warpgroup_experts
from engine.cuda.products.experts import NOTHING, Finish, tiles
from engine.cuda.products.quantize import BLOCK_SCALES_AT, BLOCK_SUMS_AT, BLOCK_WORDS
from engine.cuda.products.warpgroup_experts import COLUMNS
from engine.cuda.runtime.simulator import run
from engine.ops.weight import Weight
from tests.cuda.simulated.test_experts import by_expert, launched, mixture, other
from tests.cuda.simulated.test_operations import FORMATS_BY_NAME, F, activations, cpu, gpu, same, weight
from tests.tiers import few

assert gpu

LARGE = 227 << 10
"""Bytes of shared memory that blocks of an H100 may have."""


def blocks(x: np.ndarray) -> np.ndarray:
    """Rows in the layout ``BLOCKS``, by the documented places: words uint32 [blocks, units, BLOCK_WORDS]."""
    (rows, columns), n = x.shape, -(-x.shape[0] // COLUMNS)
    units = columns // 256
    q, d, s = cpu._quantize(x, 256)
    q, s = q.reshape(rows, units, 16, 16).view(np.uint32), s.reshape(rows, units, 2, 8)
    out = np.full((n, units, BLOCK_WORDS), 0xFFFFFFFF, np.uint32)
    for t in range(rows):
        own, tile, c = out[t // COLUMNS], t % COLUMNS // 8, t % 8
        for j in range(16):
            own[:, 512 * tile + 32 * j + 4 * c :][:, :4] = q[t, :, j]
        own[:, BLOCK_SCALES_AT + 8 * tile + c] = d[t].view(np.uint32)
        for h in range(2):
            own[:, BLOCK_SUMS_AT + 64 * tile + 32 * h + 4 * c :][:, :4] = s[t, :, h].astype(np.float16).view(np.uint32)
    return out


@pytest.mark.parametrize(
    ("formats", "counts", "n_used", "units", "n_rows", "n_blocks", "finish"),
    few(
        [
            # An item of all columns and one of a single pair, of an expert that has a record less than others; then experts
            # without pairs, and one more than half of the columns; one block multiplies everything and uses stages again.
            ("Q6_K", (129, 0, 0, 65), 1, 2, 24, 1, NOTHING),
            # Two matrices, whose rows are not whole blocks; a block per tile, and one more.
            ("Q4_K Q4_K", (2, 0, 17), 2, 1, 72, 5, Finish(True, True)),
            ("Q5_K", (0, 64, 65), 1, 1, 136, 3, NOTHING),
            ("Q4_K", (1, 0, 0, 0, 17, 0), 3, 9, 8, 2, Finish(False, True)),
            ("Q6_K Q6_K", (0, 0, 300, 0), 2, 1, 8, 2, Finish(True, False)),
            # Tables in shared memory, and small records.
            ("IQ3_S IQ3_S", (0, 65, 3), 2, 2, 72, 2, NOTHING),
            ("IQ2_XS", (17, 0, 2), 1, 9, 24, 1, NOTHING),
            ("IQ4_XS", (3, 0, 70), 1, 3, 72, 2, Finish(True, True)),
        ],
        2,
    ),
)
def test_products(
    formats: str, counts: tuple[int, ...], n_used: int, units: int, n_rows: int, n_blocks: int, finish: Finish
) -> None:
    """``counts``: the pairs of each expert, in any order."""
    entries, n_expert, pairs = [FORMATS_BY_NAME[name] for name in formats.split()], len(counts), sum(counts)
    ids = np.repeat(np.arange(n_expert, dtype=np.int32), counts)
    np.random.default_rng(pairs).shuffle(ids)
    listed, items = by_expert(ids, n_expert, COLUMNS)
    x = activations(-(-pairs // n_used), 256 * units)
    q = np.full((len(items), units, BLOCK_WORDS), 0xFFFFFFFF, np.uint32)
    arguments: list[Any] = [x, x, 256 * units, *[0.0] * 4, items, listed, q, q.view(np.uint16)]
    kernel = warpgroup_experts.quantize_pairs("plain", n_used)
    run(kernel, (len(items), units), warpgroup_experts.QUANTIZERS, arguments)
    for (_, start, count, _), found in zip(items, q, strict=True):
        same(found, blocks(x[listed[start : start + count] // n_used])[0] if count else np.full_like(found, 0xFFFFFFFF))
    stacks = [weight(entries[0], n_expert * n_rows, 256 * units), other(entries[0], n_expert * n_rows, 256 * units)]
    outs = [np.full((pairs, n_rows), np.nan, F) for _ in entries]
    records = [repack.repack_rows(w.format, w.data) for w in stacks[: len(entries)]]
    factors, biases = activations(2, n_expert), activations(2, n_expert * n_rows)
    end = len(entries) * tiles(n_rows)
    arguments = [
        *(records[0], records[-1], outs[0], outs[-1], items, listed, factors[0], factors[1], biases[0], biases[1]),
        *(len(items), tiles(n_rows), end, n_rows, units, q),
    ]
    run(*warpgroup_experts.geometry(entries[0].name, units, len(items), end, n_blocks, finish), arguments)
    for k, out in enumerate(outs):
        for e in range(n_expert):
            own = Weight("w", entries[0], 256 * units, stacks[k].data[e * n_rows : (e + 1) * n_rows])
            at = np.flatnonzero(ids == e)
            if at.size:
                y = cpu.matmul(x[at // n_used], own)[0]
                if finish != NOTHING:
                    y = finished(y, factors[k, e], biases[k, e * n_rows : (e + 1) * n_rows], finish)
                same(out[at], y)


def finished(y: np.ndarray, factor: F, bias: np.ndarray, finish: Finish) -> np.ndarray:
    """y * factor + bias, rounded once, with what there is: in float64 the product is exact."""
    if not finish.biased:
        return y * factor
    return (y.astype(np.float64) * factor + bias).astype(F) if finish.scaled else y + bias


@pytest.mark.parametrize("shared", few(["", "Q4_K Q4_K Q8_0"], 1))
def test_a_mixture(gpu: Any, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Down in another kind of format has its own items."""
    monkeypatch.setattr(stream_experts, "MOST_PAIRS", 4)
    gpu.device.shared_memory = LARGE
    names = launched(gpu, mixture("Q4_K Q4_K Q8_0", 2, 1, 256, 32, shared), 17, normalized=False)
    first = ["matmul_float_wide", "route", "sort_pairs", "quantize_pairs", "matmul_experts_warpgroups"]
    common = ["wide_quantize", "matmul_warpgroups", "quantize", "matmul_wide"] if shared else []
    assert names == [*first, *common, "quantize", "sort_pairs", "matmul_experts_wide", "join"]


@pytest.mark.thorough
def test_down(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up in two formats, of what the router reads, too; and down with an activation row per pair."""
    monkeypatch.setattr(stream_experts, "MOST_PAIRS", 4)
    gpu.device.shared_memory = LARGE
    names = launched(gpu, mixture("Q6_K Q4_K Q5_K", 2, 1, 256, 256), 17)
    product = ["quantize_pairs", "matmul_experts_warpgroups"]
    assert names == ["rms_norm", "matmul_float_wide", "route", "sort_pairs", *product, *product, *product, "join"]
