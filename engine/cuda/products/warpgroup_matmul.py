"""Matrix products of many activation rows by warpgroups: the prompt pass on compute capability 9.0.

Formula: out[t, r] = sum_k weight[r, k] * x[t, k] (+ residual[t, r]).
Shapes: weights as records (``engine/cuda/products/repack.py``), activations in the blocks of
    ``engine/cuda/products/quantize.py``; out float32 [rows, R].  Up to three matrices of one format with the same activations
    are multiplied in one launch.
Who owns what: a block owns 128 weight rows and 128 activation rows, each of its two warpgroups 64 of the weight rows, and a
    warp 16 of them; lane 4 g + t rows g and g + 8 for columns 2 t and 2 t + 1 of each 8.
Reduction order: that of ``engine/cuda/products/matmul.py``: chain = fma(da_u, value_u, chain) for the units of a chain in
    rising order, result = ((0 + chain_0) + chain_1) + ... .  The sums inside a unit are of integers, exact in any order.
Bytes moved: the records once per 128 activation rows, the activations once per 128 weight rows, mostly from the L2 cache.

The tensor cores multiply weights that already contain the scales of their sub-blocks, q * s.  These need more than 8 bits, so
they are two planes of bytes, 2**shift * high + low, and no sum has to be multiplied by a scale:

    a block, for each unit u of its rows:
        thread 0: wait until all warps have released the stage of unit u + 1, start copying the activations of this unit
        each warp: start copying its record of unit u + 1, wait for that of unit u
        each warp: planes of its 16 rows
        wait for the activations of unit u
        each warpgroup: dots = 2**shift * (high plane * x) + low plane * x; least = minimums * sums of x
        each lane: value = d * dot (+ dm * least), chain = fma(da, value, chain)
        each warp: release the stage
        where a chain ends: total = total + chain, in shared memory

The two warpgroups share the stages of activations and do not wait for each other otherwise.  So one of them unpacks and adds
while the tensor cores work for the other.
"""

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import (
    advance,
    bits_float,
    fma,
    keep4,
    let_next_begin,
    pointer,
    vector2,
    vector4,
    wait_for_inputs,
)
from engine.cuda.products.quantize import BLOCK_SCALES_AT, BLOCK_SUMS_AT, BLOCK_TILES, BLOCK_WORDS
from engine.cuda.products.unpack import Unpack, device, unpack
from engine.cuda.products.wide_chain import SHARED_LOADS, make_end, make_minimums
from engine.cuda.runtime.compiler import F32P, U32P, Specialization, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.cuda.warpgroups import (
    barrier_arrive,
    barrier_expect,
    barrier_init,
    barrier_wait,
    barriers_ready,
    bulk_copy,
    make_half_products,
    make_plane_products,
)
from engine.gguf.quants import CHAINS, FORMATS

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

FORMATS_OF_PLANES = ("Q4_K", "Q5_K", "Q6_K")
"""The formats whose weights times scales are two planes of bytes here."""

TARGET = (9, 0)
"""The compute capability that has these products."""

THREADS = 256
WARPS = THREADS // 32
STAGES = 3
COLUMNS = 8 * BLOCK_TILES
N_DOTS = COLUMNS // 2
APART = 4 * THREADS
"""Words from a thread's sums of a tile of 8 columns to those of the next."""


def _record_words(format: str) -> int:
    return 4 * FORMATS[T[format]].unit_bytes


def _stage_words(format: str) -> int:
    """Words of a stage: those of a block of activations; the sums are last and only copied if the format has minimums."""
    return BLOCK_WORDS if unpack(T[format]).mins else BLOCK_SUMS_AT


def _barriers_at(format: str) -> int:
    return N_DOTS * THREADS + STAGES * _stage_words(format) + 2 * WARPS * _record_words(format)


def shared_bytes(format: str) -> int:
    """Shared memory of a block: the sums of chains that have ended, stages, two records for each warp, and barriers."""
    return 4 * (_barriers_at(format) + 2 * (2 * STAGES + 2 * WARPS))


def takes(format: str, compute_capability: tuple[int, int], shared_memory: int) -> bool:
    """Whether the kernel exists for a format on a device whose blocks may have ``shared_memory`` bytes."""
    if format not in FORMATS_OF_PLANES or compute_capability != TARGET:
        return False
    return shared_bytes(format) <= shared_memory


def geometry(format: str, rows: int, tiles: int) -> tuple[Specialization, tuple[int, int], int]:
    """(kernel, grid, threads per block) for ``rows`` activation rows and ``tiles`` tiles of 16 weight rows."""
    return matmul_warpgroups(format), (-(-rows // COLUMNS), -(-tiles // WARPS)), THREADS


# --- planes ------------------------------------------------------------------------------------------------------


def _shift(fmt: Unpack) -> int:
    return 6 if fmt.offset else 3


def _make_split(offset: int) -> DeviceFunction:
    """The device function split(q, s): the bytes of both planes of four weights v = (q - offset) * s, which are in
    -4096 .. 4096: v >> 6, signed, and v & 63.  Two weights are multiplied at a time, with 2**14 added, so that no product
    borrows from the other."""

    @device
    def split(q, s):
        even, odd = u32(q & u32(0x00FF00FF)), u32((q >> u32(8)) & u32(0x00FF00FF))
        bias = u32(u32(0x40004000) - u32(u32(offset * 0x00010001) * s))
        even, odd = u32(even * s + bias), u32(odd * s + bias)
        high = u32((u32(even >> u32(6)) & u32(0x00FF00FF)) | (u32(odd << u32(2)) & u32(0xFF00FF00)))
        low = u32((even & u32(0x003F003F)) | (u32(odd << u32(8)) & u32(0x3F003F00)))
        return high, low

    return split


@device
def _split_scale(q, s):
    """The bytes of both planes of four weights q * s, with s in 0 .. 63 and q at most 31: q * (s >> 3) and q * (s & 7)."""
    return u32(q * u32(s >> u32(3))), u32(q * u32(s & u32(7)))


def make_planes(fmt: Unpack) -> DeviceFunction:
    """The device function planes(words, header, out): the lane's words of both planes of a record, uint32 [64], for
    ``plane_products``."""
    block, scale, sixteen = fmt.block, fmt.scale, fmt.group == 16
    split = _make_split(fmt.offset) if fmt.offset else _split_scale

    @device
    def part(words, h, j, out):
        q = block(words, j)
        for k in range(4):
            s = u32(scale(h, k % 2, 2 * j + k // 2 if sixteen else j))
            out[4 * j + k], out[32 + 4 * j + k] = split(q[k], s)

    @device
    def planes(words, h, out):
        part(words, h, 0, out)
        part(words, h, 1, out)
        part(words, h, 2, out)
        part(words, h, 3, out)
        part(words, h, 4, out)
        part(words, h, 5, out)
        part(words, h, 6, out)
        part(words, h, 7, out)

    return planes


def _make_close(mins: bool, n: int) -> DeviceFunction:
    """The device function close(scales, f, dots, least, acc): the floating-point part of a unit, for n tiles of columns,
    without a loop; scales are the lane's, of the first tile."""
    if n > 1:
        part, further = _make_close(mins, n // 2), n // 2
        middle, end = 4 * further, 4 * n

        @device
        def close(scales, f, dots, least, acc):
            part(scales, f, dots[:middle], least[:middle], acc[:middle])
            part(advance(scales, 8 * further), f, dots[middle:end], least[middle:end], acc[middle:end])

        return close

    @device
    def close_one(scales, f, dots, least, acc):
        da = vector2(scales, 0)
        for k in range(4):
            value = f[k // 2] * f32(dots[k])
            if mins:
                value = fma(f[2 + k // 2], least[k], value)
            acc[k] = fma(bits_float(I(da[k % 2])), value, acc[k])

    return close_one


# --- the kernel --------------------------------------------------------------------------------------------------


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
    fmt = unpack(T[format], False)
    record, n_stage, barriers_at = _record_words(format), _stage_words(format), _barriers_at(format)
    stages_at = N_DOTS * THREADS
    records_at = stages_at + STAGES * n_stage
    full, empty, loaded = barriers_at, barriers_at + 2 * STAGES, barriers_at + 4 * STAGES
    load, header, factors, mins, n_words = fmt.make_load(SHARED_LOADS), fmt.header, fmt.factors, fmt.mins, fmt.words
    planes_of, minimums = make_planes(fmt), make_minimums(fmt)
    close, end = _make_close(mins, BLOCK_TILES), make_end(BLOCK_TILES, APART)
    plane_products = make_plane_products(COLUMNS, _shift(fmt), fmt.offset > 0)
    half_products = make_half_products(COLUMNS)

    @device
    def fetch(shared, k, x):
        """Start copying a block of activations into stage k."""
        barrier_expect(shared, I(full + 2 * k), I(4 * n_stage))
        bulk_copy(shared, I(stages_at + k * n_stage), x, I(4 * n_stage), shared, I(full + 2 * k))

    @device
    def fetch_record(shared, place, records):
        """Start copying a record to a place."""
        barrier_expect(shared, I(loaded + 2 * place), I(4 * record))
        bulk_copy(shared, I(records_at + place * record), records, I(4 * record), shared, I(loaded + 2 * place))

    @cuda.jit
    def matmul_warpgroups(
        w0, w1, w2, out0, out1, out2, residual, add, end0, end1, end2, rows0, rows1, rows2, units, x, rows
    ):
        let_next_begin()
        shared = pointer(cuda.shared.array(0, np.uint32, 128))
        acc = cuda.local.array(N_DOTS, np.float32)
        dots = cuda.local.array(N_DOTS, np.int32)
        least = cuda.local.array(N_DOTS, np.float32)
        planes = cuda.local.array(64, np.uint32)
        words = cuda.local.array(n_words, np.uint32)
        thread = I(cuda.threadIdx.x & (THREADS - 1))
        warp, lane = I(thread >> 5), I(thread & 31)
        if thread == 0:
            for k in range(STAGES):
                barrier_init(shared, I(full + 2 * k), I(1))
                barrier_init(shared, I(empty + 2 * k), I(WARPS))
            for k in range(2 * WARPS):
                barrier_init(shared, I(loaded + 2 * k), I(1))
            barriers_ready()
        cuda.syncthreads()
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
        total = advance(shared, I(4 * thread))
        for k in range(N_DOTS):
            acc[k], least[k] = f32(0.0), f32(0.0)
        for n in range(BLOCK_TILES):
            keep4(total, n * APART, f32(0.0), f32(0.0), f32(0.0), f32(0.0))
        length = I((units + CHAINS - 1) // CHAINS)
        x = advance(x, np.int64(I(cuda.blockIdx.x * units)) * BLOCK_WORDS)
        wait_for_inputs()
        if thread == 0:
            fetch(shared, I(0), x)
        u, left, k, parity = I(0), length, I(0), I(0)
        while u < units:
            x, records = advance(x, BLOCK_WORDS), advance(records, record)
            ahead, place = I(u + 1) < units, I(2 * warp + (u & 1))
            if lane == 0 and ahead:
                # The products of unit u - 1 have used what was there.
                fetch_record(shared, I(place ^ 1), records)
            if thread == 0 and ahead:
                after = I(k + 1) if k < STAGES - 1 else I(0)
                # The phase that ended when the stage was last released; before it has been used, parity 1 has ended.
                barrier_wait(shared, I(empty + 2 * after), I(parity ^ 1) if after > 0 else parity)
                fetch(shared, after, x)
            barrier_wait(shared, I(loaded + 2 * place), I((u >> 1) & 1))
            cuda.syncwarp()
            load(advance(shared, I(records_at + place * record)), lane, words)
            h, f = header(words), factors(words)
            planes_of(words, h, planes)
            m = (u32(0), u32(0), u32(0), u32(0))
            if mins:
                m = minimums(h, lane)
            stage = I(stages_at + k * n_stage)
            barrier_wait(shared, I(full + 2 * k), parity)
            cuda.syncwarp()
            plane_products(planes, shared, stage, dots)
            if mins:
                half_products(m, shared, I(stage + BLOCK_SUMS_AT), least)
            close(advance(shared, I(stage + BLOCK_SCALES_AT + 2 * (lane & 3))), f, dots, least, acc)
            cuda.syncwarp()
            if lane == 0:
                barrier_arrive(shared, I(empty + 2 * k))
            u, left, k = I(u + 1), I(left - 1), I(k + 1)
            if left == 0 or u == units:
                end(acc, total)
                left = length
            if k == STAGES:
                k, parity = I(0), I(parity ^ 1)
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
