"""Chunks joined and quantized with four elements for each lane, against the kernel that has one."""

import numpy as np
import pytest

from engine.cuda.intrinsics import SIMULATED

if not SIMULATED:
    pytest.skip("needs NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from engine.cache.types import CHUNK
from engine.cuda.attention import attend as attention
from engine.cuda.attention import combine, join, wide_combine
from engine.cuda.products import quantize
from engine.cuda.runtime.simulator import run
from engine.verify.layout import activations
from tests.tiers import few

LAYOUT = 4


@pytest.mark.parametrize(
    ("positions", "n_head", "d_v", "window", "gated", "rotated", "sunk", "group"),
    few(
        [
            ([5, 64, 200, 2080, 700], 2, 128, 0, False, 128, False, 8),
            ([130, 40 * CHUNK], 8, 96, 70, False, 32, True, 8),
            ([70 * CHUNK], 2, 128, 0, True, 32, True, 8),
            ([1000, 40 * CHUNK, 41 * CHUNK - 1], 1, 256, 37 * CHUNK, True, 64, False, 2),
            ([2047, 2048, 9], 4, 128, 3, False, 0, True, 4),
            ([300], 1, 512, 0, False, 128, False, 8),
            ([100, 600, 64], 4, 64, 0, True, 64, True, 8),
            ([9, 2100], 8, 32, 0, True, 0, False, 8),
        ],
        3,
    ),
)
def test_chunks_joined_and_quantized(
    positions: list[int], n_head: int, d_v: int, window: int, gated: bool, rotated: int, sunk: bool, group: int
) -> None:
    """One to three times 32 chunks, of rows behind others, a block of which is not full; the groups joined before, too."""
    rng, first = np.random.default_rng(sum(positions)), 6
    rows, columns, at = len(positions), n_head * d_v, np.array(positions, np.int32)
    n_partials = attention.partials(max(positions) + 1, window)
    firsts = [(max(0, position - window + 1) if window else 0) // CHUNK for position in positions]
    weights = rng.normal(size=(rows, n_head, n_partials, 2)).astype(np.float32)
    weights[..., 1] = np.exp(weights[..., 1])
    weights[:, :, ::3, 0] = 0.25  # equally large in some chunks
    sums = rng.normal(size=(rows, n_head, n_partials, d_v)).astype(np.float32)
    sums[rng.random(sums.shape) < 0.1] = -0.0
    sums[..., ::7] = -0.0
    for row, position in enumerate(positions):
        seen = position // CHUNK - firsts[row] + 1
        weights[row, :, seen:], sums[row, :, seen:] = np.nan, np.nan
    gate = rng.normal(size=(rows, n_head, 2, d_v)).astype(np.float32) * np.float32(5) if gated else None
    sinks = rng.normal(size=n_head).astype(np.float32) * np.float32(3) if sunk else None
    n_words = quantize.activation_words(256, first + rows, columns, LAYOUT)[0]
    given = [weights, sums, at, gate, sinks]
    narrow = [np.zeros(n, np.uint32) for n in quantize.activation_words(256, rows, columns)]
    kinds = d_v, True, gated, rotated, sunk, group
    grid, of_rows = (columns // quantize.RUN, rows), [columns, n_partials, window, 0]
    run(combine.combine_quantize(256, *kinds), grid, quantize.RUN, [*given, *narrow, *of_rows], seed=1)
    integers, scales, sums_of_q = activations(256, rows, columns, *narrow)
    # Those of 16 positions, which the other layout has as float16.
    sums_of_q = sums_of_q.reshape(rows, -1, 24)[..., :16].astype(np.float16)
    expected = [x.tobytes() for x in (integers, scales, sums_of_q)]

    def found(parts: list[np.ndarray | None], partials: int, ready: bool) -> list[bytes]:
        q = np.zeros(n_words, np.uint32)
        kernel = wide_combine.wide_combine_quantize(LAYOUT, *kinds, ready)
        arguments = [*parts, q, columns, partials, window, first, rows]
        run(kernel, wide_combine.grid(rows, columns), quantize.RUN, arguments, seed=1)
        blocks = q.reshape(-1, quantize.block_parts(LAYOUT)[2])
        return [x[first:].tobytes() for x in activations(256, first + rows, columns, blocks)]

    assert found(given, n_partials, False) == expected
    n_groups = join.group_partials(n_partials, group)
    inner = [np.full((rows, n_head, n_groups, n), np.nan, np.float32) for n in (2, d_v)]
    blocks = join.grid(n_partials, n_head, rows, group)
    run(
        join.join_chunks(d_v, True, group),
        blocks,
        d_v,
        [weights, sums, at, *inner, n_partials, n_groups, window],
        seed=1,
    )
    assert found([*inner, *given[2:]], n_groups, True) == expected
