"""The work of a block of two warpgroups on a tile of a product: 128 weight rows times up to 128 columns, over all units.

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

The columns of a tile are a block of the layout ``BLOCKS`` (``engine/cuda/products/quantize.py``); lane 4 g + t of a warp has
rows g and g + 8 of its 16 weight rows, and columns 2 t and 2 t + 1 of each 8.
"""

from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import advance, bits_float, fma, keep4, vector2
from engine.cuda.products.quantize import BLOCK_SCALES_AT, BLOCK_SUMS_AT, BLOCK_TILES, BLOCK_WORDS
from engine.cuda.products.unpack import Unpack, device, unpack
from engine.cuda.products.wide_chain import SHARED_LOADS, make_end, make_minimums
from engine.cuda.runtime.kinds import DeviceFunction
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


def record_words(format: str) -> int:
    """Words of the record of 16 rows of a unit."""
    return 4 * FORMATS[T[format]].unit_bytes


def _stage_words(format: str) -> int:
    """Words of a stage: those of a block of activations; the sums are last and only copied if the format has minimums."""
    return BLOCK_WORDS if unpack(T[format]).mins else BLOCK_SUMS_AT


def _barriers_at(format: str) -> int:
    return N_DOTS * THREADS + STAGES * _stage_words(format) + 2 * WARPS * record_words(format)


def shared_bytes(format: str, *_: object) -> int:
    """Shared memory of a block: the sums of chains that have ended, stages, two records for each warp, and barriers."""
    return 4 * (_barriers_at(format) + 2 * (2 * STAGES + 2 * WARPS))


def takes(format: str, compute_capability: tuple[int, int], shared_memory: int) -> bool:
    """Whether warpgroups multiply a format on a device whose blocks may have ``shared_memory`` bytes."""
    if format not in FORMATS_OF_PLANES or compute_capability != TARGET:
        return False
    return shared_bytes(format) <= shared_memory


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


# --- the pipeline ------------------------------------------------------------------------------------------------


class Pipeline(NamedTuple):
    """Device functions of the copies of a block.

    begin(shared, thread): make the barriers; all threads call it.
    fetch(shared, k, x): start copying a block of activations into stage k; thread 0 calls it.
    fetch_record(shared, place, records): start copying a record to place 2 w or 2 w + 1 of warp w; a lane of it calls it.
    """

    begin: DeviceFunction
    fetch: DeviceFunction
    fetch_record: DeviceFunction


def make_pipeline(format: str) -> Pipeline:
    """The device functions of a format."""
    record, n_stage, barriers_at = record_words(format), _stage_words(format), _barriers_at(format)
    stages_at = N_DOTS * THREADS
    records_at = stages_at + STAGES * n_stage
    full, empty, loaded = barriers_at, barriers_at + 2 * STAGES, barriers_at + 4 * STAGES

    @device
    def begin(shared, thread):
        if thread == 0:
            for k in range(STAGES):
                barrier_init(shared, I(full + 2 * k), I(1))
                barrier_init(shared, I(empty + 2 * k), I(WARPS))
            for k in range(2 * WARPS):
                barrier_init(shared, I(loaded + 2 * k), I(1))
            barriers_ready()
        cuda.syncthreads()

    @device
    def fetch(shared, k, x):
        barrier_expect(shared, I(full + 2 * k), I(4 * n_stage))
        bulk_copy(shared, I(stages_at + k * n_stage), x, I(4 * n_stage), shared, I(full + 2 * k))

    @device
    def fetch_record(shared, place, records):
        barrier_expect(shared, I(loaded + 2 * place), I(4 * record))
        bulk_copy(shared, I(records_at + place * record), records, I(4 * record), shared, I(loaded + 2 * place))

    return Pipeline(begin, fetch, fetch_record)


def make_multiply(format: str, tiles: int, follows: bool = False) -> DeviceFunction:
    """The device function multiply(shared, thread, k, parity, n, x, records, units, more, next_x, next_records): the products
    of a block's tile for the first ``tiles`` tiles of 8 columns.  Returns k, parity and n for the tile after it.

    k: the stage of the first unit of ``x``, whose copy has been started, and its parity; n: the units that the block has
    processed; records: the warp's, of which the first has been started.  more: if other tiles may follow (``follows``),
    whether one does, and its first stage and record are ``next_x`` and ``next_records``.
    The sums are in shared memory: those of the thread for tile t of columns at [APART * t + 4 * thread], 4 words.
    """
    fmt = unpack(T[format], False)
    record, n_stage, barriers_at = record_words(format), _stage_words(format), _barriers_at(format)
    stages_at, n_dots = N_DOTS * THREADS, 4 * tiles
    records_at = stages_at + STAGES * n_stage
    full, empty, loaded = barriers_at, barriers_at + 2 * STAGES, barriers_at + 4 * STAGES
    load, header, factors, mins, n_words = fmt.make_load(SHARED_LOADS), fmt.header, fmt.factors, fmt.mins, fmt.words
    planes_of, minimums = make_planes(fmt), make_minimums(fmt)
    close, end = _make_close(mins, tiles), make_end(tiles, APART)
    plane_products = make_plane_products(8 * tiles, _shift(fmt), fmt.offset > 0, 2 if tiles > 8 else 1)
    half_products = make_half_products(8 * tiles)
    _, fetch, fetch_record = make_pipeline(format)

    @device
    def multiply(shared, thread, k, parity, n, x, records, units, more, next_x, next_records):
        acc = cuda.local.array(n_dots, np.float32)
        dots = cuda.local.array(n_dots, np.int32)
        least = cuda.local.array(n_dots, np.float32)
        planes = cuda.local.array(64, np.uint32)
        words = cuda.local.array(n_words, np.uint32)
        warp, lane = I(thread >> 5), I(thread & 31)
        total = advance(shared, I(4 * thread))
        for j in range(n_dots):
            acc[j], least[j] = f32(0.0), f32(0.0)
        for t in range(tiles):
            keep4(total, t * APART, f32(0.0), f32(0.0), f32(0.0), f32(0.0))
        length = I((units + CHAINS - 1) // CHAINS)
        u, left = I(0), length
        while u < units:
            x, records = advance(x, BLOCK_WORDS), advance(records, record)
            ahead, place = I(u + 1) < units, I(2 * warp + (n & 1))
            if follows and not ahead:
                ahead = more
                x, records = next_x, next_records
            if lane == 0 and ahead:
                # The products of the unit before this one have used what was there.
                fetch_record(shared, I(place ^ 1), records)
            if thread == 0 and ahead:
                after = I(k + 1) if k < STAGES - 1 else I(0)
                # The phase that ended when the stage was last released; before it has been used, parity 1 has ended.
                barrier_wait(shared, I(empty + 2 * after), I(parity ^ 1) if after > 0 else parity)
                fetch(shared, after, x)
            barrier_wait(shared, I(loaded + 2 * place), I((n >> 1) & 1))
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
            u, n, left, k = I(u + 1), I(n + 1), I(left - 1), I(k + 1)
            if left == 0 or u == units:
                end(acc, total)
                left = length
            if k == STAGES:
                k, parity = I(0), I(parity ^ 1)
        return k, parity, n

    return multiply
