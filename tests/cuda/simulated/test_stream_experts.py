"""Products with experts that few rows each have chosen, in the simulator: the bits of the mirror, whatever the pairs."""

from typing import Any

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cuda.products import repack, stream_experts
from engine.cuda.products.experts import NOTHING, Finish, tiles
from engine.cuda.runtime.simulator import run
from engine.ops.weight import Weight
from tests.cuda.simulated.test_experts import by_expert, launched, mixture, other, packed
from tests.cuda.simulated.test_operations import FORMATS_BY_NAME, F, activations, cpu, gpu, same, weight
from tests.cuda.simulated.test_warpgroup_experts import LARGE, finished
from tests.tiers import few

assert gpu


@pytest.mark.whole
@pytest.mark.parametrize(
    ("formats", "counts", "n_used", "most", "units", "n_rows", "n_blocks", "narrow", "finish"),
    few(
        [
            # Experts without pairs, items of one, two and four tiles of columns, two items of an expert; blocks begin and end
            # within items; chains of two units.
            ("Q4_K Q4_K", (9, 0, 0, 33, 1), 2, 4, 9, 24, 3, False, NOTHING),
            # More blocks than tiles, an expert that has a record less than others.
            ("Q6_K", (1, 2, 0), 1, 4, 2, 8, 7, False, Finish(True, True)),
            # More tiles than warps.
            ("Q5_K", (0, 3, 10), 1, 2, 1, 272, 1, False, Finish(False, True)),
            # The layout of few rows, with sums of 16 bits.
            ("Q4_K Q4_K", (3, 9), 2, 2, 1, 40, 2, True, NOTHING),
            # A second stage of a few units; units of 32 with sums, of 16, and records of four units.
            ("Q4_1 Q4_1", (5, 0, 9), 2, 2, 9, 24, 2, False, Finish(True, False)),
            ("MXFP4", (5, 0, 9), 1, 1, 10, 24, 2, False, NOTHING),
            ("NVFP4", (2, 11), 1, 2, 20, 16, 2, False, NOTHING),
            # A pass of 256 rows: more items than blocks, of every size, with the fewest blocks per expert.
            ("Q4_K", tuple(k * 5 % 37 for k in range(28)) + (3, 29), 2, 4, 1, 16, 7, False, NOTHING),
        ],
        4,
    ),
)
def test_products(
    formats: str,
    counts: tuple[int, ...],
    n_used: int,
    most: int,
    units: int,
    n_rows: int,
    n_blocks: int,
    narrow: bool,
    finish: Finish,
) -> None:
    """``counts``: the pairs of each expert, in any order."""
    entries, n_expert, pairs = [FORMATS_BY_NAME[name] for name in formats.split()], len(counts), sum(counts)
    unit = entries[0].unit
    ids = np.repeat(np.arange(n_expert, dtype=np.int32), counts)
    np.random.default_rng(pairs).shuffle(ids)
    listed, items = by_expert(ids, n_expert, 8 * most, True)
    x = activations(-(-pairs // n_used), unit * units)
    stacks = [weight(entries[0], n_expert * n_rows, unit * units), other(entries[0], n_expert * n_rows, unit * units)]
    outs = [np.full((pairs, n_rows), np.nan, F) for _ in entries]
    records = [repack.repack_rows(w.format, w.data) for w in stacks[: len(entries)]]
    factors, biases = activations(2, n_expert), activations(2, n_expert * n_rows)
    end = len(entries) * tiles(n_rows)
    arguments: list[Any] = [
        *(records[0], records[-1], outs[0], outs[-1], items, listed, factors[0], factors[1], biases[0], biases[1]),
        *(tiles(n_rows), end, n_rows, *packed(unit, x, not narrow)),
    ]
    run(
        *stream_experts.geometry(entries[0].name, n_used, most, units, narrow, n_blocks, finish),
        arguments,
    )
    for k, out in enumerate(outs):
        for e in range(n_expert):
            own = Weight("w", entries[0], unit * units, stacks[k].data[e * n_rows : (e + 1) * n_rows])
            at = np.flatnonzero(ids == e)
            if at.size:
                y = cpu.matmul(x[at // n_used], own)[0]
                if finish != NOTHING:
                    y = finished(y, factors[k, e], biases[k, e * n_rows : (e + 1) * n_rows], finish)
                same(out[at], y)


def test_a_mixture(gpu: Any) -> None:
    """Gate, up and down share a list of pairs."""
    gpu.device.shared_memory = LARGE
    names = launched(gpu, mixture("Q4_K Q4_K Q8_0", 2, 1, 256, 32, ""), 17, normalized=False)
    product = ["quantize", "matmul_experts_streamed"]
    assert names == ["matmul_float_wide", product[0], "route", "sort_pairs", product[1], *product, "join"]


@pytest.mark.thorough
def test_few_rows(gpu: Any) -> None:
    """Up to 16 rows, with a network that every row uses and gate and up in two formats."""
    gpu.device.shared_memory = LARGE
    names = launched(gpu, mixture("Q6_K Q4_K Q4_K", 2, 1, 256, 256, "Q4_K Q4_K Q8_0"), 3)
    product = ["sort_pairs", "matmul_experts_streamed", "matmul_experts_streamed"]
    common = ["rms_norm_quantize", "matmul_quantized", "quantize", "matmul_quantized"]
    last = ["quantize", "matmul_experts_streamed", "join"]
    assert names == ["rms_norm_router", "route", *product, *common, *last]


def test_units_of_32(gpu: Any) -> None:
    """Gate and up in such units have other products."""
    gpu.device.shared_memory = LARGE
    names = launched(gpu, mixture("Q8_0 Q8_0 Q8_0", 2, 1, 32, 32), 17, normalized=False)
    assert "matmul_experts_wide" in names and "matmul_experts_streamed" not in names


def test_room() -> None:
    """Rows of many units leave less room, or none."""
    assert [stream_experts.tiles_for("Q4_K", units) for units in (8, 16, 24, 56)] == [4, 2, 1, 0]
