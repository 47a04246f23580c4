"""Matrix products of many activation rows by warpgroups: the prompt pass on compute capability 9.0.

Formula: out[t, r] = sum_k weight[r, k] * x[t, k] (+ residual[t, r]).
Shapes: weights as records (``engine/cuda/products/repack.py``), activations in the blocks of
    ``engine/cuda/products/quantize.py``; out float32 [rows, R].  Up to three matrices of one format with the same activations
    are multiplied in one launch.
Who owns what: a block owns 128 weight rows and 128 activation rows, each of its two warpgroups 64 of the weight rows, and a
    warp 16 of them (``engine/cuda/products/warpgroup_chain.py``).
Reduction order: that of ``engine/cuda/products/matmul.py``: chain = fma(da_u, value_u, chain) for the units of a chain in
    rising order, result = ((0 + chain_0) + chain_1) + ... .  The sums inside a unit are of integers, exact in any order.
Bytes moved: the records once per 128 activation rows, the activations once per 128 weight rows, mostly from the L2 cache.
"""

import numpy as np
from numba import cuda

from engine.cuda.intrinsics import advance, bits_float, let_next_begin, pointer, vector4, wait_for_inputs
from engine.cuda.products.quantize import BLOCK_TILES, BLOCK_WORDS
from engine.cuda.products.warpgroup_chain import (
    APART,
    COLUMNS,
    TARGET,
    THREADS,
    WARPS,
    make_multiply,
    make_pipeline,
    record_words,
    shared_bytes,
)
from engine.cuda.runtime.compiler import F32P, U32P, Specialization, i32, kernel
from engine.cuda.runtime.kinds import KernelCode

I = np.int32  # noqa: E741


def geometry(format: str, rows: int, tiles: int) -> tuple[Specialization, tuple[int, int], int]:
    """(kernel, grid, threads per block) for ``rows`` activation rows and ``tiles`` tiles of 16 weight rows."""
    return matmul_warpgroups(format), (-(-rows // COLUMNS), -(-tiles // WARPS)), THREADS


@kernel(
    *(U32P, U32P, U32P, F32P, F32P, F32P, F32P, i32, i32, i32, i32, i32, i32, i32),
    *(i32, U32P, i32),
    threads=THREADS,
    blocks=1,
    shared=shared_bytes,
    target=TARGET,
)
def matmul_warpgroups(format: str) -> KernelCode:
    """Up to three matrices times the same activations: matrix m has tiles of 16 rows up to ends[m] (running over all three),
    rows[m] rows, and its own output; ``add``: whether the residual is added.

    Grid and threads: ``geometry``, for ends[last] tiles.
    """
    record = record_words(format)
    begin, fetch, fetch_record = make_pipeline(format)
    multiply = make_multiply(format, BLOCK_TILES)

    @cuda.jit
    def matmul_warpgroups(
        w0, w1, w2, out0, out1, out2, residual, add, end0, end1, end2, rows0, rows1, rows2, units, x, rows
    ):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.uint32, 128))
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        warp, lane = I(thread >> 5), I(thread & 31)
        begin(shared, thread)
        tile = I(cuda.blockIdx.y * WARPS + warp)
        there = tile < end2
        # Past the last tile it is the last again.
        tile = min(tile, I(end2 - 1))
        w, out, n_rows = w0, out0, rows0
        if tile >= end1:
            w, out, n_rows, tile = w2, out2, rows2, I(tile - end1)
        elif tile >= end0:
            w, out, n_rows, tile = w1, out1, rows1, I(tile - end0)
        records = advance(w, np.int64(I(tile * units)) * record)
        if lane == 0:
            fetch_record(shared, I(2 * warp), records)
        x = advance(x, np.int64(I(cuda.blockIdx.x * units)) * BLOCK_WORDS)
        wait_for_inputs()
        if thread == 0:
            fetch(shared, I(0), x)
        multiply(shared, thread, I(0), I(0), I(0), x, records, units, False, x, records)
        total = advance(shared, I(4 * thread))
        column, row = I(cuda.blockIdx.x * COLUMNS + 2 * (lane & 3)), I(16 * tile + (lane >> 2))
        low, high = there and row < n_rows, there and I(row + 8) < n_rows
        to = np.int64(column) * n_rows + row
        for n in range(BLOCK_TILES):
            sums = vector4(total, n * APART)
            for e in range(4):
                if I(column + (e & 1)) < rows and (high if e > 1 else low):
                    at, value = to + ((e & 1) * n_rows + 8 * (e >> 1)), bits_float(I(sums[e]))
                    if add != 0:
                        value = value + residual[at]
                    out[at] = value
            column, to = I(column + 8), to + np.int64(8 * n_rows)

    return matmul_warpgroups
