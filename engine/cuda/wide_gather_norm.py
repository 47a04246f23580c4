"""Rows of several GPUs brought together by packets and normalized, in passes of many rows (``engine/cuda/wide_gather.py``).

    if a product has left chains: x = their sums plus the residual, in the own columns; store x
    give:  packet[i] of every owner = (x[i], number), for the own columns
    take:  wait until all packets of a row have the number; they are the row
    normalize and quantize some runs of 256 columns of the row

Formula: those of ``engine/cuda/products/quantize.py`` and ``engine/cuda/rms_norm.py``.
Shapes: part float32 [rows, own columns], or chains of the product that computes it, as in
    ``engine/cuda/products/warpgroup_matmul.py``; packets, state, alarm as in ``engine/cuda/gather.py``; q, d, sums as in
    ``engine/cuda/products/quantize.py``.  An owner has the columns first to last - 1 of each run of ``period`` ones.
Who owns what: a block quantizes some runs of 256 columns of a row, and takes all of the row, for its sum of squares.  It
    gives the own ones of these columns; or, if it adds chains, the columns of an equal share of the tiles of 16 columns and 8
    rows, whatever rows they belong to.
Reduction order: those of ``engine/cuda/products/matmul.py`` and ``engine/cuda/rms_norm.py``.
Bytes moved: 8 per own column and other owner over the links; 8 per column of a row and block of it, read again until it has
    come; chains once, 32 per own column, and 8 for the residual stream.

All blocks of a launch are resident at the same time.  A block takes packets after it has given all of its own.
"""

import numpy as np
from numba import cuda

from engine.cpu.rms_norm import NORM_CHAINS, norm_width
from engine.cuda.fold import fold256
from engine.cuda.gather import BLOCKS, PACKETS, PLACES, expire, is_own, make_give, own_place, patience
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    float_bits,
    fma,
    give_packet,
    inverse_root,
    lane_xor,
    let_next_begin,
    load_packet,
    pointer,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED, NARROW, RUN, WARPS, make_store
from engine.cuda.products.unpack import device
from engine.cuda.products.warpgroup_matmul import make_add_chains
from engine.cuda.runtime.compiler import F32P, U16P, U32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.gguf.quants import CHAINS

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741


@device
def transpose(x, lane):
    """Exchange x[e] of lane 4 g + q for x[q] of lane 4 g + e; x: float32 [4].  All lanes of a warp call it."""
    for k in range(2):
        odd = I(lane & I(1 << k)) != 0
        for j in range(2):
            low = 2 * j if k == 0 else j
            high = low + (1 << k)
            a, b = x[low], x[high]
            found = lane_xor(a if odd else b, I(1 << k))
            x[low], x[high] = found if odd else a, b if odd else found


def make_give_sums(n: int, n_peers: int, tiles: int, add: bool) -> DeviceFunction:
    """A device function that adds the chains of a product with blocks of ``tiles`` tiles of 8 rows, and the residual if
    ``add``, and stores and gives the sums:
    ``give_sums(chains, n_chains, residual, out, rows, first, own, number, here, peers)``.

    own: the columns of the product, which are those from ``first`` on of the rows.  A thread owns the results of a lane for a
    tile of 16 columns and 8 rows.  Warps of all blocks have tiles in turn, so that blocks have equally many.
    """
    add_chains, give = make_add_chains(tiles), make_give(n_peers)

    @device
    def give_sums(chains, n_chains, residual, out, rows, first, own, number, here, peers):
        sums = cuda.local.array(4, np.float32)
        rest = cuda.local.array(4, np.float32)
        lane, strips = I(cuda.threadIdx.x & 31), I((own + 15) >> 4)
        # A strip: 16 columns of the rows of a block of the product.
        count = I(I(u32(rows + 8 * tiles - 1) // u32(8 * tiles)) * strips * tiles)
        blocks, block = I(cuda.gridDim.x * cuda.gridDim.y), I(cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x)
        i = I(I(cuda.threadIdx.x >> 5) * blocks + block)
        while i < count:
            strip = I(u32(i) // u32(tiles))
            tile, above = I(i - strip * tiles), I(u32(strip) // u32(strips))
            # A lane has two columns of two rows, and gives one column of four rows: so a warp stores the packets of 16
            # columns of a row at once, a whole line of 128 bytes.
            row = I(8 * I(above * tiles + tile) + (lane & 1))
            column = I(I(16 * I(strip - above * strips) + (lane >> 2)) + 4 * (lane & 2))
            if add:
                # In flight with the chains: not under the conditions of the stores, to which compilers would move them.
                for e in range(4):
                    rest[e] = residual[I(min(I(row + 2 * e), I(rows - 1)) * own + min(column, I(own - 1)))]
                cuda.syncwarp()
            at = np.int64(strip) * (CHAINS * tiles * 128) + I(128 * tile + 4 * lane)
            add_chains(advance(chains, at), n_chains, sums)
            transpose(sums, lane)
            for e in range(4):
                t = I(row + 2 * e)
                if t < rows and column < own:
                    x = sums[e] + rest[e] if add else sums[e]
                    to = I(t * n + first + column)
                    give(peers, to, x, number)
                    # For kernels that take whole rows.
                    give_packet(here, to, float_bits(x), number)
                    out[I(t * own + column)] = x
            i = I(i + WARPS * blocks)

    return give_sums


@kernel(
    *(F32P, i32, F32P, F32P, F32P, f32_t, *PLACES, *PACKETS, U32P, F32P, U16P),
    threads=RUN,
    blocks=BLOCKS,
)
def wide_gather_norm_quantize(
    unit: int, n: int, n_peers: int, layout: int = NARROW, runs: int = 1, tiles: int = 0, add: bool = False
) -> KernelCode:
    """The rows, normalized, as int8 with one scale per ``unit`` values; a block quantizes ``runs`` runs of 256 columns.

    tiles: if not 0, ``part`` are chains that blocks of a product have shared, with as many tiles of 8 rows; the sums of
    the first ``n_chains`` ones, and of the residual if ``add``, are given and stored in ``out``.  Then period = n.
    Grid: (ceil(n / (256 runs)), rows).
    """
    store, give, width = make_store(unit, layout), make_give(n_peers), norm_width.py_func(n)
    give_sums = make_give_sums(n, n_peers, max(tiles, 1), add)
    n_x, n_tops = -(-n // width), WARPS * min(runs, 2)
    exact = n % width == 0 and width == NORM_CHAINS

    @cuda.jit
    def wide_gather_norm_quantize(
        part,
        n_chains,
        residual,
        out,
        weight,
        eps,
        columns,
        period,
        first,
        last,
        number,
        polls,
        here,
        p0,
        p1,
        p2,
        p3,
        p4,
        p5,
        p6,
        state,
        alarm,
        q,
        d,
        sums,
    ):
        let_next_begin()
        chains = cuda.shared.array(NORM_CHAINS, np.float32)
        tops = pointer(cuda.shared.array(n_tops, np.int32, ALIGNED))
        words = cuda.local.array(n_x, np.uint32)
        numbers = cuda.local.array(n_x, np.uint32)
        values = cuda.local.array(runs, np.float32)
        factors = cuda.local.array(runs, np.float32)
        peers = p0, p1, p2, p3, p4, p5, p6
        thread, t, begin = I(cuda.threadIdx.x), I(cuda.blockIdx.y), I(cuda.blockIdx.x * runs)
        i, row = I(begin * RUN + thread), I(t * n)
        for j in range(runs):
            values[j], factors[j] = f32(0.0), f32(0.0)
            if I(i + j * RUN) < n:
                factors[j] = weight[I(i + j * RUN)]
        wait_for_inputs()
        if tiles > 0:
            give_sums(part, n_chains, residual, out, I(cuda.gridDim.y), first, I(last - first), number, here, peers)
        else:
            own = I(I(n // period) * I(last - first))
            # All loads before the first store.
            for j in range(runs):
                column = I(i + j * RUN)
                if column < n and is_own(column, period, first, last):
                    values[j] = part[t * own + own_place(column, period, first, last)]
            for j in range(runs):
                column = I(i + j * RUN)
                if column < n and is_own(column, period, first, last):
                    give(peers, I(row + column), values[j], number)
                    give_packet(here, I(row + column), float_bits(values[j]), number)
        left, missing = patience(polls, state) if polls > 0 else I(0), polls > 0
        while missing and left > 0:
            # All loads of a round are in flight at once.
            for k in range(n_x):
                j = I(thread + k * width)
                words[k], numbers[k] = load_packet(here, I(row + j) if exact or (thread < width and j < n) else row)
            missing = False
            for k in range(n_x):
                missing = missing or I(numbers[k]) != number
            left = I(left - 1)
        if missing:
            expire(state, alarm)
        r = f32(0.0)
        if polls > 0:
            total = f32(0.0)
            for k in range(n_x):
                x = bits_float(I(words[k]))
                if not exact and (thread >= width or I(thread + k * width) >= n):
                    x = f32(0.0)
                total = fma(x, x, total)
                for j in range(runs):
                    if k == I(begin + j):
                        values[j] = x
            r = inverse_root(fold256(total, chains), f32(n), eps)
            for j in range(runs):
                run = I(begin + j)
                if runs == 1 or I(run * RUN) < n:
                    # Slow warps may still read what they have found in the run before.
                    own_tops = advance(tops, WARPS * (j & 1))
                    store(values[j] * r * factors[j], I(i + j * RUN) < n, t, run, n, own_tops, q, d, sums)

    return wide_gather_norm_quantize
