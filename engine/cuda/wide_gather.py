"""Columns of several GPUs brought together by packets, in passes of many rows (``engine/cuda/gather.py``).

    give:  packet[i] of every other owner = (x[i], number), for the words i that this owner has
    take:  wait until packet[i] of this owner has the number; x[i] is its value, for all other words
Formula: none, bits are copied; then those of ``engine/cuda/products/quantize.py``.
Shapes: part uint32 [runs, last - first] and out uint32 [runs, period], words of float32 rows; packets, state, alarm as in
    ``engine/cuda/gather.py``.  An owner has the words first to last - 1 of each run of ``period`` ones.
    In ``wide_gather_quantize`` gate, up float32 [rows, own columns], and out is q in a layout of ``quantize.BLOCKS``, whose
    words are exchanged.
Who owns what: in ``gather_words`` a thread gives, and takes, up to ``AT_ONCE`` words of a run at a time, with those of the
    other blocks of the run between them, for every n-th run.  In ``wide_gather_quantize`` a block quantizes and gives
    256 columns of 8 rows, and the first blocks take like this.
Reduction order: none.
Bytes moved: 8 per own word and other owner over the links, about 2.3 per own column of rows that are int8; 8 per word of
    other owners, read again until it has come.

As in passes of few rows, all blocks that wait are resident at the same time, and a block takes packets after it has given all
of its own.  Blocks that only give may be more than fit: they begin where others have ended, since those that take leave room,
and the product that follows finds room beside those that take.  ``engine/cuda/wide_gather_norm.py`` brings rows together that
are normalized.
"""

import numpy as np
from numba import cuda

from engine.cuda.gather import BLOCKS, PACKETS, PLACES, expire, patience
from engine.cuda.intrinsics import give_packet, let_next_begin, load_packet, wait_for_inputs
from engine.cuda.products.quantize import RUN, block_parts
from engine.cuda.products.unpack import device
from engine.cuda.products.warpgroup_chain import TARGET
from engine.cuda.products.wide_quantize import make_tile
from engine.cuda.runtime.compiler import F32P, U32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

AT_ONCE = 4
"""Words that a thread has in flight at a time."""

u32 = np.uint32
I = np.int32  # noqa: E741


@device
def take_words(begin, apart, run, runs_apart, runs, period, first, last, number, polls, here, state, alarm, out):
    """Store the words of other owners in out as soon as they have come: of every ``runs_apart``-th run, those from ``begin``
    on that are ``apart``."""
    words = cuda.local.array(AT_ONCE, np.uint32)
    numbers = cuda.local.array(AT_ONCE, np.uint32)
    own, others, most = I(last - first), I(period - I(last - first)), patience(polls, state)
    while run < runs:
        to, i = I(run * period), begin
        while i < others:
            left, missing = most, True
            while missing and left > 0:
                # All loads of a round are in flight at once.
                for k in range(AT_ONCE):
                    column = min(I(i + k * apart), I(others - 1))
                    words[k], numbers[k] = load_packet(here, I(to + column + (own if column >= first else I(0))))
                missing = False
                for k in range(AT_ONCE):
                    missing = missing or I(numbers[k]) != number
                left = I(left - 1)
            if missing:
                most = I(1)
                expire(state, alarm)
            for k in range(AT_ONCE):
                column = I(i + k * apart)
                if column < others:
                    out[I(to + column + (own if column >= first else I(0)))] = words[k]
            i = I(i + AT_ONCE * apart)
        run = I(run + runs_apart)


@kernel(U32P, i32, *PLACES, *PACKETS, U32P, threads=RUN, blocks=BLOCKS)
def gather_words(n_peers: int) -> KernelCode:
    """n: the words of all runs.  Grid: (blocks of a run, runs at a time)."""

    @cuda.jit
    def gather_words(
        part, runs, n, period, first, last, number, polls, here, p0, p1, p2, p3, p4, p5, p6, state, alarm, out
    ):
        let_next_begin()
        words = cuda.local.array(AT_ONCE, np.uint32)
        peers = (p0, p1, p2, p3, p4, p5, p6)
        own = I(last - first)
        apart, begin = I(cuda.gridDim.x * RUN), I(cuda.blockIdx.x * RUN + cuda.threadIdx.x)
        wait_for_inputs()
        run = I(cuda.blockIdx.y)
        while run < runs:
            source, to, i = I(run * own), I(run * period + first), begin
            while i < own:
                # All loads before the first store.
                for k in range(AT_ONCE):
                    if I(i + k * apart) < own:
                        words[k] = part[I(source + i + k * apart)]
                for k in range(AT_ONCE):
                    if I(i + k * apart) < own:
                        at = I(to + i + k * apart)
                        for p in range(n_peers):
                            give_packet(peers[p], at, I(words[k]), number)
                        if polls > 0:
                            out[at] = words[k]
                i = I(i + AT_ONCE * apart)
            run = I(run + cuda.gridDim.y)
        if polls > 0:
            run, step = I(cuda.blockIdx.y), I(cuda.gridDim.y)
            take_words(begin, apart, run, step, runs, period, first, last, number, polls, here, state, alarm, out)

    return gather_words


def make_put(n_peers: int) -> DeviceFunction:
    """The device function ``put((out, peers, number), at, word)``: out[at] = word, which is given to the other owners."""

    @device
    def put(to, at, word):
        out, peers, number = to
        out[at] = u32(word)
        for k in range(n_peers):
            give_packet(peers[k], at, I(word), number)

    return put


@device
def own_unit(run, period, first, last):
    """The number, among the units of all owners, of unit ``run`` of this owner."""
    own = I(last - first)
    return I(I(run // own) * period + first + I(run % own))


def make_take(layout: int) -> DeviceFunction:
    """The device function ``take(blocks, takers, n, period, first, last, number, polls, here, state, alarm, out)``: the first
    ``takers`` blocks of the grid take what other owners give, in a layout of ``quantize.BLOCKS``; blocks: those of rows; n,
    period, first, last: columns / 256."""
    words = block_parts(layout)[2]

    @device
    def take(blocks, takers, n, period, first, last, number, polls, here, state, alarm, out):
        block = I(cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x)
        if polls > 0 and block < takers:
            begin, apart, runs = I(block * RUN + cuda.threadIdx.x), I(takers * RUN), I(blocks * I(n // period))
            period, first, last = I(period * words), I(first * words), I(last * words)
            take_words(begin, apart, I(0), I(1), runs, period, first, last, number, polls, here, state, alarm, out)

    return take


@kernel(F32P, F32P, i32, *[f32_t] * 4, i32, *PLACES, *PACKETS, U32P, threads=RUN, blocks=2 * BLOCKS, target=TARGET)
def wide_gather_quantize(source: str, layout: int, n_peers: int) -> KernelCode:
    """The rows as int8 in a layout of ``quantize.BLOCKS``.  The own columns are ``source``(gate, up), as in ``quantize``; n,
    period, first and last count runs of 256 columns, and none has columns of several owners.

    takers: the number of blocks that take what others give.  Rows behind the last one of a block of rows are zeros.
    A warp quantizes a run of 256 columns, four neighbouring ones and four more for each lane.
    Grid: (tiles of all blocks of rows, own columns / 256).
    """
    quantize_tile, take = make_tile(source, layout, make_put(n_peers)), make_take(layout)

    @cuda.jit
    def wide_gather_quantize(
        gate, up, rows, a0, a1, a2, a3, takers, n, period, first, last, number, polls, here, p0, p1, p2, p3, p4, p5, p6,
        state, alarm, out,
    ):  # fmt: skip
        let_next_begin()
        # The masks tell the compiler that nothing is negative.
        tile, run, runs = I(cuda.blockIdx.x & 0xFFFF), I(cuda.blockIdx.y & 0xFFFF), I(cuda.gridDim.y & 0xFFFF)
        wait_for_inputs()
        to = out, (p0, p1, p2, p3, p4, p5, p6), number
        unit = own_unit(run, period, first, last)
        quantize_tile(gate, up, rows, a0, a1, a2, a3, tile, run, runs, unit, n, to)
        blocks = I(I(cuda.gridDim.x & 0xFFFF) // layout)
        take(blocks, takers, n, period, first, last, number, polls, here, state, alarm, out)

    return wide_gather_quantize
