"""Joining the chunks of attention on the way to int8, in passes of many rows: ``engine/cuda/attention/combine.py`` with four
elements for each lane.

Formula: that of ``combine``, then that of ``engine/cuda/products/quantize.py``.
Shapes: weights, sums, gate, sink as in ``combine``, d_v a multiple of 32; q in a layout of ``quantize.BLOCKS``, which also
    contains the scales and sums.
Who owns what: a block owns 256 elements of four rows, and a warp 128 of one row, lane l elements 4 l to 4 l + 3.  So the
    factors of a head's chunks are computed once for 128 elements instead of once for 32.
Reduction order: that of ``combine``.
Bytes moved: 8 + 4 d_v per (row, head, chunk) in, about 1.2 per element out, and 4 for its gate.

    a warp, for each head of its elements, usually one:
        for 32 chunks at a time:
            a lane: the factors of one chunk
            for 8 of the chunks at a time: join them to groups, and these to the result; load the next 8
        divide, rotate back, multiply by the gate
    both warps of a run of 256: its largest magnitude; quantize
"""

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK, GROUP
from engine.cuda.attention.combine import join_sink
from engine.cuda.attention.join import LANES, make_factors, make_rising_max
from engine.cuda.attention.sight import sight
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    exp,
    float_bits,
    fma,
    lane_from,
    lane_xor,
    lanes_max,
    let_next_begin,
    load2,
    load4,
    pointer,
    sigmoid,
    wait_for_inputs,
)
from engine.cuda.products.quantize import ALIGNED, RUN, WARPS, block_parts, pack_four, two_sums, unit_scale, write_word
from engine.cuda.products.unpack import device
from engine.cuda.products.warpgroup_chain import TARGET
from engine.cuda.runtime.compiler import F32P, I32P, U32P, i32, kernel
from engine.cuda.runtime.kinds import DeviceFunction, KernelCode

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

PART = 128
"""Elements of a head that a warp owns."""
ROWS = 4
"""Rows of a block."""
AT_ONCE = 8
"""Chunks that a warp loads at a time."""
RESIDENT = 3
"""Blocks that should fit on a multiprocessor."""


def grid(rows: int, columns: int) -> tuple[int, int]:
    """The grid for ``rows`` rows of ``columns`` elements."""
    return columns // RUN, -(-rows // ROWS)


def _make_turn(rotated: int) -> DeviceFunction:
    """The device function ``turn(x, lane)``: rotate blocks of ``rotated`` elements back, of which a lane has four in x."""
    unit, exchanges = F(rotated**-0.5), rotated.bit_length() - 3

    @device
    def turn(x, lane):
        a, b, c, d = x[0] + x[1], x[0] - x[1], x[2] + x[3], x[2] - x[3]
        x[0], x[1], x[2], x[3] = a + c, b + d, a - c, b - d
        for k in range(exchanges):
            for e in range(4):
                other = lane_xor(x[e], I(1 << k))
                x[e] = other - x[e] if lane & (1 << k) else x[e] + other
        for e in range(4):
            x[e] = x[e] * unit

    return turn


def _make_batch(pitch: int, group: int) -> tuple[DeviceFunction, DeviceFunction]:
    """Two device functions for ``AT_ONCE`` chunks, in groups of at most as many, ``pitch`` from chunk to chunk.

    ``fetch(sums, begin, count, x)``: start loading the lane's elements into x [AT_ONCE, 4]; zeros for what is not from chunk
    ``begin`` on before ``count``.
    ``join(first, x, factor, share, term, a, b, element, total)``: join the chunks of each group, and the groups to element
    [4] and total, which it returns.  factor, share, term [32]: those of ``make_factors``, of which the first chunk has number
    ``first``; a, b: the factors that join a group, in the lane of its first chunk.
    """
    assert group <= AT_ONCE

    @device
    def fetch(sums, begin, count, x):
        for k in range(AT_ONCE):
            four = load4(sums, I(min(max(I(k), begin), I(count - 1)) * pitch))
            inside = k >= begin and k < count
            for e in range(4):
                x[k, e] = bits_float(I(four[e])) if inside else F(0.0)

    @device
    def join(first, x, factor, share, term, a, b, element, total):
        own = cuda.local.array(4, np.float32)
        for g in range(AT_ONCE // group):
            mass = F(0.0)
            for e in range(4):
                own[e] = F(0.0)
            for k in range(g * group, (g + 1) * group):
                f, s = factor[first + k], share[first + k]
                for e in range(4):
                    # What is joined already is left as it is.
                    own[e] = x[k, e] if group == 1 else fma(own[e], f, s * x[k, e])
                mass = fma(mass, f, term[first + k])
            of_groups, of_new = lane_from(a, I(first + g * group)), lane_from(b, I(first + g * group))
            for e in range(4):
                element[e] = fma(element[e], of_groups, of_new * own[e])
            total = fma(total, of_groups, of_new * mass)
        return total

    return fetch, join


def make_attended(
    d_v: int, early: bool, gated: bool, rotated: int, sinks: bool, group: int, ready: bool, spans: bool
) -> DeviceFunction:
    """The device function ``attended(weights, sums, positions, gate, sink, row, at, inside, columns, partials, window,
    element)``: element [4] = those from at + 4 lane on of a row of ``columns`` elements, n_head * d_v, with its chunks joined
    as in ``wide_combine_quantize``, whose constants these are; zeros unless ``inside``.

    All threads of a block of 256 call it, before their inputs are complete; ``at`` is a multiple of 128, the same for a warp,
    and so is ``inside``.
    """
    shift = CHUNK.bit_length() - 1
    if ready:
        shift, group = shift + group.bit_length() - 1, 1
    last, turn = group - 1, _make_turn(max(rotated, 4))
    fetch, join = _make_batch(d_v, group)
    find_factors, rising_max = make_factors(group), make_rising_max(group, LANES)
    first_visible, last_visible, _ = sight(spans)

    @device
    def joined(weights, sums, begin, n, x, factor, share, term, element):
        """element = the sum of the values of a head's chunks from ``begin`` on before n; returns their maximum and mass."""
        lane = I(cuda.threadIdx.x & 31)
        pair = load2(weights, 2 * min(max(lane, begin), I(n - 1)))
        fetch(sums, begin, n, x)
        for e in range(4):
            element[e] = F(0.0)
        maximum, total = F(-np.inf), F(0.0)
        while n > 0:
            there = lane >= begin and lane < n
            m = bits_float(I(pair[0])) if there else F(-np.inf)
            own = find_factors(m, bits_float(I(pair[1])), there, lane, factor, share, term)
            # The same for the groups: the largest m up to this lane's, which is -inf if there is no such group.
            top = rising_max(own, lane) if n > group else own
            before = lane_from(top, max(I(lane - group), I(0)))
            before = max(maximum, before) if lane >= group else maximum
            highest = max(maximum, top)
            maximum = lane_from(highest, min(I(n - 1), I(LANES - 1)))
            a = exp(before - highest)
            b = exp(own - highest)
            a = a if lane & ~last < n else F(1.0)
            b = b if lane & ~last < n else F(-0.0)
            cuda.syncwarp()
            first = I(0)
            while first < LANES and first < n:
                total = join(first, x, factor, share, term, a, b, element, total)
                first = I(first + AT_ONCE)
                if first < n:
                    fetch(advance(sums, first * d_v), I(0), I(n - first), x)
            cuda.syncwarp()
            n, begin = I(n - LANES), I(0)
            weights, sums = advance(weights, 2 * LANES), advance(sums, LANES * d_v)
            if n > 0:
                pair = load2(weights, 2 * min(lane, I(n - 1)))
        return maximum, total

    @device
    def attended(weights, sums, positions, gate, sink, row, at, inside, columns, partials, window, element):
        factors = pointer(cuda.shared.array(RUN, np.float32, ALIGNED))
        shares = pointer(cuda.shared.array(RUN, np.float32, ALIGNED))
        terms = pointer(cuda.shared.array(RUN, np.float32, ALIGNED))
        x = cuda.local.array((AT_ONCE, 4), np.float32)
        values = cuda.local.array(4, np.float32)
        # The mask tells the compiler that nothing is negative.
        thread = I(cuda.threadIdx.x & (RUN - 1))
        lane, of_warp = I(thread & 31), I(thread & ~31)
        factor, share, term = advance(factors, of_warp), advance(shares, of_warp), advance(terms, of_warp)
        for e in range(4):
            element[e] = F(0.0)
        if inside:
            if not early:
                wait_for_inputs()
            place = positions[row]
            first_chunk = I(first_visible(place, window) >> shift)
            # Chunks are counted from the beginning of a group, which the row may not see.
            begin = I(first_chunk & last)
            n = I((last_visible(place) >> shift) - first_chunk + 1 + begin)
            if early:
                wait_for_inputs()
            n_head, head = I(U(columns) // U(d_v)), I(U(at) // U(d_v))
            # Smaller heads than the part of a warp, or parts of two, follow one another.
            while head * d_v < at + PART:
                s = F(0.0)
                if sinks:
                    s = sink[head]
                own = I(at + 4 * lane - head * d_v)
                mine, own = own >= 0 and own < d_v, min(max(own, I(0)), I(d_v - 4))
                of_row = I(row * n_head + head)
                pairs = I(of_row * partials - begin)
                of_head = advance(sums, np.int64(pairs) * d_v + own)
                maximum, total = joined(advance(weights, 2 * pairs), of_head, begin, n, x, factor, share, term, values)
                a = F(1.0)
                if sinks:
                    a, total = join_sink(maximum, total, s)
                for e in range(4):
                    if sinks:
                        values[e] = values[e] * a
                    values[e] = values[e] / total
                if rotated:
                    turn(values, lane)
                if gated:
                    four = load4(gate, I(of_row * (2 * d_v) + d_v + own))
                    for e in range(4):
                        values[e] = values[e] * sigmoid(bits_float(I(four[e])))
                for e in range(4):
                    element[e] = values[e] if mine else element[e]
                head = I(head + 1)

    return attended


def make_store(layout: int, put: DeviceFunction = write_word) -> DeviceFunction:
    """The device function ``store(x, inside, t, run, units, tops, to)``: quantize the positions from 256 run of row t, which
    has ``units`` runs, in a layout of ``quantize.BLOCKS``; ``put(to, at, word)`` stores a word.

    All threads of the block call it: two warps have 128 positions each, and a lane four of these in x.  inside: whether the
    row exists; tops: shared memory, int32 [8].
    """
    scales_at, sums_at, block_words = block_parts(layout)

    @device
    def store(x, inside, t, run, units, tops, to):
        thread = I(cuda.threadIdx.x & (RUN - 1))
        warp, lane, half = I(thread >> 5), I(thread & 31), I((thread >> 5) & 1)
        bits = I(0)
        for e in range(4):
            bits = max(bits, I(float_bits(x[e]) & I(0x7FFFFFFF)))
        bits = lanes_max(bits)
        tops[warp] = bits
        cuda.syncthreads()
        amax, inverse = unit_scale(max(bits, tops[I(warp ^ 1)]))
        word, total, following = pack_four(x, 0, inverse)
        if inside:
            n, column = I(t >> 3), I(t & 7)
            block = I(U(n) // U(layout))
            tile, base = I(n - block * layout), I(I(block * units + run) * block_words)
            put(to, I(base + I(tile * 16 + 8 * half + (lane >> 2)) * 32 + 4 * column + (lane & 3)), word)
            if lane & 7 == 0:
                at = I(base + sums_at + tile * 64 + 32 * half + 4 * column + (lane >> 3))
                put(to, at, two_sums(total, following))
            if thread & 63 == 0:
                put(to, I(base + scales_at + tile * 8 + column), float_bits(amax / F(127.0)))

    return store


@kernel(
    *(F32P, F32P, I32P, F32P, F32P, U32P, i32, i32, i32, i32, i32),
    threads=RUN,
    blocks=RESIDENT,
    target=TARGET,
)
def wide_combine_quantize(
    layout: int,
    d_v: int,
    early: bool,
    gated: bool,
    rotated: int = 0,
    sinks: bool = False,
    group: int = GROUP,
    ready: bool = False,
    spans: bool = False,
) -> KernelCode:
    """Join the chunks of many rows, ``group`` of them at a time, and the groups; quantize the result to int8 in a layout of
    ``quantize.BLOCKS``.

    Arguments: weights, sums, positions, gate, sink, q, columns (n_head * d_v, a multiple of 256), partials, window, first
    (the number of the first row in q), rows.  The constants are those of ``combine_quantize``,
    with group up to ``AT_ONCE``.
    Grid: ``grid(rows, columns)``, blocks of 256.
    """
    attended, store = make_attended(d_v, early, gated, rotated, sinks, group, ready, spans), make_store(layout)

    @cuda.jit
    def wide_combine_quantize(weights, sums, positions, gate, sink, q, columns, partials, window, first, rows):
        let_next_begin()
        tops = pointer(cuda.shared.array(WARPS, np.int32, ALIGNED))
        x = cuda.local.array(4, np.float32)
        # The masks tell the compiler that nothing is negative.
        warp, run = I((cuda.threadIdx.x & (RUN - 1)) >> 5), I(cuda.blockIdx.x & 0xFFFF)
        row, at = I(I(cuda.blockIdx.y & 0xFFFF) * ROWS + (warp >> 1)), I(run * RUN + (warp & 1) * PART)
        inside = row < rows
        attended(weights, sums, positions, gate, sink, row, at, inside, columns, partials, window, x)
        wait_for_inputs()
        store(x, inside, I(first + row), run, I(columns >> 8), tops, q)

    return wide_combine_quantize
