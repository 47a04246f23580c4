"""Columns of several GPUs brought together at each of them, by packets that GPUs write into each other's memory.

    give:  packet[t, i] of every other owner = (x[t, i], number), for the columns i that this owner has
    take:  wait until packet[t, i] of this owner has the number; x[t, i] is its value, for all other columns
Formula: none, bits are copied; then those of ``engine/cuda/products/quantize.py`` and ``engine/cuda/rms_norm.py``.
Shapes: part float32 [rows, own columns]; packets: here, p0 to p6 uint32 [rows, n, 2], the word of the value and the number of
    the exchange; out float32 [rows, n]; q, d, sums as in ``engine/cuda/products/quantize.py``; state, alarm int32 [1].
    The columns of an owner are those with first <= i % period < last, in rising order.
    In ``take_quantize``: packets [matrices, rows, n, 2].
Who owns what: a thread gives, and stores or quantizes, the element of one column.  In ``gather_norm_quantize`` every block
    also takes the whole row, for its sum of squares.
Reduction order: that of the kernels without packets.
Bytes moved: 8 per own element and other owner over the links; 8 per element, read again until it has come.

A packet is stored and loaded as one word of 64 bits, so that a value cannot come without its number, and no order of several
packets matters.  Numbers differ within a pass, and ``clear_packets`` ends a pass.  A packet that has not come after
``polls`` loads sets ``state``, so that later kernels of the pass wait no longer, and ``alarm`` in the memory of the host.
With polls = 0 a kernel only gives.

Packets may have been given by the product that computes the columns (``engine/cuda/products/matmul.py``).  Then no column
belongs to an owner here (first = last = 0): all of them are taken, before the kernel waits for its inputs.

Blocks that wait must not keep those away which give: there are at most ``BLOCKS`` for each multiprocessor.  The next kernel
begins early when all of them have begun.  What begins before the packets have come is of the same pass, and on another GPU
nothing of this pass waits for room: passes whose kernels wait run one after another on a GPU
(``engine/cuda/runtime/meeting.py``).
"""

import numpy as np
from numba import cuda

from engine.cpu.rms_norm import NORM_CHAINS, norm_width
from engine.cpu.runtime.flags import EXPIRED
from engine.cuda.fold import fold256
from engine.cuda.intrinsics import (
    ACTIVATIONS,
    announce,
    awaited,
    bits_float,
    float_bits,
    fma,
    give_packet,
    inverse_root,
    let_next_begin,
    load_packet,
    pointer,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED, NARROW, RUN, WARPS, make_store
from engine.cuda.products.unpack import device
from engine.cuda.runtime.compiler import F32P, I32P, U16P, U32P, i32, kernel
from engine.cuda.runtime.compiler import f32 as f32_t
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode
from engine.ops.activation import KINDS

PEERS = 7
"""The most other owners."""

BLOCKS = 2
"""The most blocks for each multiprocessor."""

POLLS = 1 << 22
"""The number of times that a packet is loaded before its owner is given up.  Each takes about a microsecond."""

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

PLACES = (i32, i32, i32, i32, i32, i32)
"""The types of n, period, first, last, number, polls."""

PACKETS = (U32P, *[U32P] * PEERS, I32P, I32P)
"""The types of here, the packets of the other owners, state and alarm."""


@kernel(U32P, i32, i32, I32P, threads=RUN)
def clear_packets() -> KernelCode:
    """No packet has come to any place: here uint32 [n] of each, which are ``apart`` words apart.

    Grid: (ceil(n / 1024), places).
    """

    @cuda.jit
    def clear_packets(here, n, apart, state):
        let_next_begin()
        wait_for_inputs()
        place, i = I(I(cuda.blockIdx.y) * apart), I(cuda.blockIdx.x * 4 * RUN + cuda.threadIdx.x)
        for _ in range(4):
            if i < n:
                here[I(place + i)] = u32(0)
            i = I(i + RUN)
        if cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0 and cuda.threadIdx.x == 0:
            state[0] = I(0)

    return clear_packets


@device
def is_own(i, period, first, last):
    """Whether column i is one of this owner."""
    within = I(i % period)
    return within >= first and within < last


@device
def own_place(i, period, first, last):
    """The place of column i among those of this owner."""
    return I(I(i // period) * I(last - first) + I(i % period) - first)


@device
def own_columns(n, period, first, last):
    """The number of columns of this owner."""
    return I(I(n // period) * I(last - first))


@device
def expire(state, alarm):
    """Note that a packet has not come."""
    wait_for_inputs()
    state[0] = I(EXPIRED)
    announce(alarm, I(0), I(EXPIRED))


@device
def patience(polls, state):
    """How often a packet is loaded: once if one has not come before."""
    return I(1) if awaited(state, I(0)) != 0 else polls


def make_give(n_peers: int) -> DeviceFunction:
    """The device function ``give(peers, at, x, number)``: the packet ``at`` of every other owner = (x, number)."""

    @device
    def give(peers, at, x, number):
        for k in range(n_peers):
            give_packet(peers[k], at, float_bits(x), number)

    return give


@device
def take(here, at, number, left, state, alarm):
    """The value of the packet ``at`` as soon as it has the number."""
    value, found = load_packet(here, at)
    while I(found) != number and left > 1:
        left = I(left - 1)
        value, found = load_packet(here, at)
    if I(found) != number:
        expire(state, alarm)
    return bits_float(I(value))


def make_together(unit: int, n_peers: int, layout: int) -> DeviceFunction:
    """A device function that brings the elements of a block of 256 together and quantizes them as ``make_store`` does:
    ``together(x, inside, own, t, run, n, number, polls, here, peers, state, alarm, tops, q, d, sums)``.

    x: the element of the thread if it is ``own``, which is given to the other owners; else it is taken.  All threads of the
    block call it; inside: whether the element exists, the same for a whole warp.
    """
    store, give = make_store(unit, layout), make_give(n_peers)

    @device
    def together(x, inside, own, t, run, n, number, polls, here, peers, state, alarm, tops, q, d, sums):
        at = I(I(t * n) + I(run * RUN) + cuda.threadIdx.x)
        if own:
            give(peers, at, x, number)
        elif inside and polls > 0:
            x = take(here, at, number, patience(polls, state), state, alarm)
        if polls > 0:
            store(x, inside, t, run, n, tops, q, d, sums)

    return together


@kernel(F32P, *PLACES, *PACKETS, F32P, threads=RUN, blocks=BLOCKS)
def gather(n_peers: int) -> KernelCode:
    """Grid: (ceil(n / 256), rows)."""
    give = make_give(n_peers)

    @cuda.jit
    def gather(part, n, period, first, last, number, polls, here, p0, p1, p2, p3, p4, p5, p6, state, alarm, out):
        let_next_begin()
        t, i = I(cuda.blockIdx.y), I(cuda.blockIdx.x * RUN + cuda.threadIdx.x)
        at, x = I(t * n + i), f32(0.0)
        if first < last:
            wait_for_inputs()
        if i < n:
            if is_own(i, period, first, last):
                x = part[t * own_columns(n, period, first, last) + own_place(i, period, first, last)]
                give((p0, p1, p2, p3, p4, p5, p6), at, x, number)
                # For kernels that take whole rows.
                give_packet(here, at, float_bits(x), number)
            elif polls > 0:
                x = take(here, at, number, patience(polls, state), state, alarm)
        wait_for_inputs()
        if polls > 0 and i < n:
            out[at] = x

    return gather


@kernel(F32P, F32P, f32_t, f32_t, f32_t, f32_t, *PLACES, *PACKETS, U32P, F32P, U16P, threads=RUN, blocks=BLOCKS)
def gather_quantize(unit: int, source: str, n_peers: int, layout: int = NARROW) -> KernelCode:
    """The rows as int8 with one scale per ``unit`` values.  The own columns are ``source``(gate, up), as in ``quantize``.

    Grid: (ceil(n / 256), rows).
    """
    together = make_together(unit, n_peers, layout)
    plain, gated = source == "plain", source != "plain" and KINDS[source][0]
    of = ACTIVATIONS.get(source)

    @cuda.jit
    def gather_quantize(
        gate, up, a0, a1, a2, a3, n, period, first, last, number, polls, here, p0, p1, p2, p3, p4, p5, p6, state, alarm, q,
        d, sums,
    ):  # fmt: skip
        let_next_begin()
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        t, run = I(cuda.blockIdx.y), I(cuda.blockIdx.x)
        i, x = I(run * RUN + cuda.threadIdx.x), f32(0.0)
        inside = i < n
        own = inside and is_own(i, period, first, last)
        wait_for_inputs()
        if own:
            place = I(t * own_columns(n, period, first, last) + own_place(i, period, first, last))
            x = up[place]
            if not plain:
                x = of(gate[place] if gated else f32(0.0), x, a0, a1, a2, a3)
        peers = p0, p1, p2, p3, p4, p5, p6
        together(x, inside, own, t, run, n, number, polls, here, peers, state, alarm, tops, q, d, sums)

    return gather_quantize


@kernel(i32, i32, i32, f32_t, f32_t, f32_t, f32_t, U32P, I32P, I32P, U32P, F32P, U16P, threads=RUN, blocks=BLOCKS)
def take_quantize(unit: int, source: str, layout: int = NARROW) -> KernelCode:
    """The rows as int8 with one scale per ``unit`` values: ``source``(gate, up) of columns that products have given, as in
    ``quantize``.  Packets [m, t, i]: those of gate, if there is one, come before those of up.

    Grid: (rows, ceil(n / 256)).
    """
    store = make_store(unit, layout)
    plain, gated = source == "plain", source != "plain" and KINDS[source][0]
    of = ACTIVATIONS.get(source)

    @cuda.jit
    def take_quantize(n, number, polls, a0, a1, a2, a3, here, state, alarm, q, d, sums):
        let_next_begin()
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        t, run = I(cuda.blockIdx.x), I(cuda.blockIdx.y)
        i = I(run * RUN + cuda.threadIdx.x)
        at, x, inside = I(t * n + i), f32(0.0), i < n
        if inside and polls > 0:
            at_up, left = I(at + cuda.gridDim.x * n) if gated else at, patience(polls, state)
            gate, first = load_packet(here, at)
            up, second = load_packet(here, at_up)
            while (I(first) != number or I(second) != number) and left > 1:
                left = I(left - 1)
                gate, first = load_packet(here, at)
                up, second = load_packet(here, at_up)
            if I(first) != number or I(second) != number:
                expire(state, alarm)
            x = bits_float(I(up))
            if not plain:
                x = of(bits_float(I(gate)), x, a0, a1, a2, a3)
        wait_for_inputs()
        if polls > 0:
            store(x, inside, t, run, n, tops, q, d, sums)

    return take_quantize


@kernel(F32P, F32P, f32_t, *PLACES, *PACKETS, U32P, F32P, U16P, threads=RUN, blocks=BLOCKS)
def gather_norm_quantize(unit: int, n: int, n_peers: int, layout: int = NARROW) -> KernelCode:
    """The rows, normalized, as int8 with one scale per ``unit`` values.

    Grid: (ceil(n / 256), rows).
    """
    store, give, width = make_store(unit, layout), make_give(n_peers), norm_width.py_func(n)
    n_x = -(-n // width)
    exact = n % width == 0 and width == NORM_CHAINS

    @cuda.jit
    def gather_norm_quantize(
        part,
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
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        words = cuda.local.array(n_x, np.uint32)
        numbers = cuda.local.array(n_x, np.uint32)
        thread, t, run = I(cuda.threadIdx.x), I(cuda.blockIdx.y), I(cuda.blockIdx.x)
        i = I(run * RUN + thread)
        inside, row, factor = i < n, I(t * n), f32(0.0)
        if inside:
            factor = weight[i]
        if first < last:
            wait_for_inputs()
        if inside and is_own(i, period, first, last):
            mine = part[t * own_columns(n, period, first, last) + own_place(i, period, first, last)]
            give((p0, p1, p2, p3, p4, p5, p6), I(row + i), mine, number)
            give_packet(here, I(row + i), float_bits(mine), number)
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
        x = f32(0.0)
        if polls > 0:
            total = f32(0.0)
            for k in range(n_x):
                found = bits_float(I(words[k]))
                if not exact and (thread >= width or I(thread + k * width) >= n):
                    found = f32(0.0)
                total = fma(found, found, total)
                if k == run:
                    x = found
            x = x * inverse_root(fold256(total, chains), f32(n), eps) * factor
        wait_for_inputs()
        if polls > 0:
            store(x, inside, t, run, n, tops, q, d, sums)

    return gather_norm_quantize
