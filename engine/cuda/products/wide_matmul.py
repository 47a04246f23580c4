"""Matrix products of many activation rows on tensor cores: the prompt pass.

Formula: out[t, r] = sum_k weight[r, k] * x[t, k] (+ residual[t, r]).
Shapes: weights as records (``engine/cuda/products/repack.py``), activations in the layout of
    ``engine/cuda/products/quantize.py`` for a wide pass; out float32 [rows, R].  Up to three matrices of one format
    with the same activations are multiplied in one launch.
Who owns what: a block owns 128 weight rows and 128 activation rows, a warp 16 of the rows; lane 4 g + t rows g and g + 8
    for columns 2 t and 2 t + 1 of each 8.  Stages of 256 positions (``engine/cuda/products/wide_chain.py``) are copied
    to shared memory one ahead of the one in use.  On a GPU with too little of it, blocks are 64 by 64.
Reduction order: that of ``engine/cuda/products/matmul.py``: a warp processes the units of its rows from first to last,
    so it has one chain at a time, and adds each to the sum of those before it when it ends.
Bytes moved: the records once per 128 activation rows, the activations once per 128 weight rows.  Neighbouring blocks read the
    same records, so these come from memory once, and all else from the L2 cache.
"""

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import (
    advance,
    bits_float,
    copies_commit,
    copies_wait,
    copy4,
    keep4,
    let_next_begin,
    pointer,
    vector4,
    wait_for_inputs,
)
from engine.cuda.products.unpack import device
from engine.cuda.products.wide_chain import PipelineStage, make_wide, stage_of
from engine.cuda.runtime.compiler import F32P, U32P, Specialization, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.gguf.quants import CHAINS

f32 = np.float32
I = np.int32  # noqa: E741

STAGES = 2


@dataclass(frozen=True)
class BlockShape:
    """The part of a block: tiles of 8 columns, which are activation rows, and tiles of 16 weight rows, one per warp."""

    tiles: int
    row_tiles: int

    @property
    def threads(self) -> int:
        return 32 * self.row_tiles


LARGE = BlockShape(16, 8)
SMALL = BlockShape(8, 4)
"""For GPUs whose blocks may have 99 KiB of shared memory, the minimum from compute capability 8.0 on."""


def block_of(small: bool) -> BlockShape:
    """The shape of the blocks: ``SMALL`` or not."""
    return SMALL if small else LARGE


def threads(format: str, small: bool = False) -> int:
    """Threads of a block."""
    return block_of(small).threads


def shared_bytes(format: str, small: bool = False) -> int:
    """Shared memory of a block: stages, and the sums of chains that have ended."""
    block = block_of(small)
    return 4 * (STAGES * stage_of(T[format], block.tiles).words(block.row_tiles) + 4 * block.tiles * block.threads)


def geometry(format: str, rows: int, tiles: int, most: int) -> tuple[Specialization, tuple[int, int], int]:
    """(kernel, grid, threads per block) for ``rows`` activation rows and ``tiles`` tiles of 16 weight rows, if a block may
    have ``most`` bytes of shared memory."""
    small = shared_bytes(format) > most
    block = block_of(small)
    grid = -(-rows // (8 * block.tiles)), -(-tiles // block.row_tiles)
    return matmul_wide(format, *((True,) if small else ())), grid, block.threads


def make_fetch_records(shape: PipelineStage) -> DeviceFunction:
    """The device function ``fetch(own, records, left, lane)``: start copying a warp's records of a stage; left: the number of
    units that are still to come, including this stage's."""
    large, record, own_words = shape.units == 1, shape.record, shape.units * shape.record
    rounds, exact = -(-own_words // 128), own_words % 128 == 0

    @device
    def fetch(own, records, left, lane):
        first = I(4 * lane)
        own, records = advance(own, first), advance(records, first)
        length = I(own_words) if large else min(I(own_words), I(left * record))
        for k in range(rounds):
            if (large and exact) or first + 128 * k < length:
                copy4(own, 128 * k, records, 128 * k, I(1))

    return fetch


def make_fetch(format: str, block: BlockShape) -> DeviceFunction:
    """The device function ``fetch(stage, records, q, d, s, tile, last, u, units, thread)``: start copying the units from u of
    a block's activations, from tile ``tile`` on, and of the records of one of its row tiles, that of the warp, into a stage.
    Tiles after ``last`` repeat ``last``, and their results are not used."""
    tiles, threads = block.tiles, block.threads
    shape = stage_of(T[format], tiles)
    n_sums = shape.sums
    sums_at, scales_at, records_at = shape.sums_at, shape.scales_at, shape.records_at
    large = shape.units == 1
    rounds, step, n_columns = tiles * 128 // threads, threads // 128, 8 * tiles
    unit_words = 512 // shape.units
    # Vectors of the scales of a tile, and of all tiles.
    vectors = 2 * shape.units
    shift, all_vectors = vectors.bit_length() - 1, tiles * vectors
    scale_rounds, full = -(-all_vectors // threads), all_vectors % threads == 0
    own_words, fetch_records = shape.units * shape.record, make_fetch_records(shape)
    plane = 32 * tiles

    @device
    def fetch(stage, records, q, d, s, tile, last, u, units, thread):
        # There may be fewer units than a stage has.
        here = I(1) if large or I(thread & 127) * 4 < unit_words * (units - u) else I(0)
        x, n = advance(q, I(I(thread & 127) * 4 + u * unit_words)), I(tile + (thread >> 7))
        to, pitch = advance(stage, I(4 * thread)), I(units * unit_words)
        for k in range(rounds):
            copy4(to, k * (4 * threads), x, np.int64(I(min(n, last) * pitch)), here)
            n = I(n + step)
        if large:
            if n_sums > 0:
                # Two vectors of each column, in two planes.
                half, column = I(thread // n_columns), I(thread % n_columns)
                n = min(I(tile + (column >> 3)), last)
                from_ = np.int64(I(I(I(n * units + u) * 8 + (column & 7)) * 12 + 4 * half))
                copy4(stage, I(sums_at + half * plane + 4 * column), s, from_, I(1))
            if thread < 2 * tiles:
                n = min(I(tile + (thread >> 1)), last)
                copy4(stage, I(scales_at + 4 * thread), d, np.int64(I(I(n * units + u) * 8 + 4 * (thread & 1))), I(1))
        else:
            for k in range(scale_rounds):
                i = I(thread + k * threads)
                if full or i < all_vectors:
                    own = I(i & (vectors - 1))
                    n = min(I(tile + (i >> shift)), last)
                    here = I(1) if 4 * own < 8 * (units - u) else I(0)
                    from_ = np.int64(I(I(n * units + u) * 8 + 4 * own))
                    if n_sums > 0:
                        copy4(stage, I(sums_at + 4 * i), s, from_, here)
                    copy4(stage, I(scales_at + 4 * i), d, from_, here)
        own = advance(stage, I(records_at + I(thread >> 5) * own_words))
        fetch_records(own, records, I(units - u), I(thread & 31))

    return fetch


@kernel(
    *(U32P, U32P, U32P, F32P, F32P, F32P, F32P, i32, i32, i32, i32, i32, i32, i32),
    *(i32, U32P, F32P, U32P, i32),
    threads=threads,
    blocks=1,
    shared=shared_bytes,
)
def matmul_wide(format: str, small: bool = False) -> KernelCode:
    """Up to three matrices times the same activations: matrix m has tiles of 16 rows up to ends[m] (running over all three),
    rows[m] rows, and its own output; ``add``: whether the residual is added.

    ``small``: whether blocks are ``SMALL``.  Grid and threads: ``geometry``, for ends[last] tiles.
    """
    block = block_of(small)
    tiles, row_tiles, threads = block.tiles, block.row_tiles, block.threads
    shape = stage_of(T[format], tiles)
    per_stage, record, records_at = shape.units, shape.record, shape.records_at
    n_stage, own_words, n_acc = shape.words(row_tiles), shape.units * shape.record, 4 * tiles
    total_at, apart = STAGES * n_stage, 4 * threads
    fetch, wide = make_fetch(format, block), make_wide(T[format], shape, tiles, apart)

    @cuda.jit
    def matmul_wide(
        w0, w1, w2, out0, out1, out2, residual, add, end0, end1, end2, rows0, rows1, rows2, units, q, d, s, rows
    ):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.uint32, 16))
        acc = cuda.local.array(n_acc, np.float32)
        thread = I(cuda.threadIdx.x & (threads - 1))
        warp, lane = I(thread >> 5), I(thread & 31)
        first, last = I(cuda.blockIdx.x * tiles), I((rows - 1) >> 3)
        tile = I(cuda.blockIdx.y * row_tiles + warp)
        there = tile < end2
        # Past the last tile it is the last again.
        tile = min(tile, I(end2 - 1))
        w, out, n_rows = w0, out0, rows0
        if tile >= end1:
            w, out, n_rows, tile = w2, out2, rows2, I(tile - end1)
        elif tile >= end0:
            w, out, n_rows, tile = w1, out1, rows1, I(tile - end0)
        total = advance(shared, I(total_at + 4 * thread))
        for k in range(n_acc):
            acc[k] = f32(0.0)
        for n in range(tiles):
            keep4(total, n * apart, f32(0.0), f32(0.0), f32(0.0), f32(0.0))
        length = I((units + CHAINS - 1) // CHAINS)
        records = advance(w, np.int64(I(tile * units)) * record)
        wait_for_inputs()
        fetch(shared, records, q, d, s, first, last, I(0), units, thread)
        copies_commit()
        u, used = I(0), I(0)
        while u < units:
            copies_wait()
            cuda.syncthreads()
            records = advance(records, own_words)
            ahead, free = I(u + per_stage), I(n_stage - used)
            if ahead < units:
                fetch(advance(shared, free), records, q, d, s, first, last, ahead, units, thread)
                copies_commit()
            stage = advance(shared, used)
            mine = advance(stage, I(records_at + warp * own_words))
            wide(stage, mine, lane, u, units, length, acc, total)
            u, used = ahead, free
        column, row = I(first * 8 + 2 * (lane & 3)), I(16 * tile + (lane >> 2))
        if there:
            for n in range(tiles):
                sums = vector4(total, n * apart)
                for k in range(4):
                    t, r = I(column + 8 * n + (k & 1)), I(row + 8 * (k >> 1))
                    if t < rows and r < n_rows:
                        at = np.int64(t) * n_rows + r
                        value = bits_float(I(sums[k]))
                        if add != 0:
                            value = value + residual[at]
                        out[at] = value

    return matmul_wide
