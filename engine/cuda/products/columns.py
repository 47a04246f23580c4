"""The chain of a single activation row in units of 32 weights: eight units in the eight columns of a tensor core.

A tensor-core product has eight columns of activations, of which a single row would use one.  Here column j holds the
activations of unit j of eight successive units.  The product of the weights of unit j with all columns has the sums of unit j
in column j; its other columns are ignored.  After eight products, each lane has the sums of two rows in two units, and
computes their float parts.  With one column in use, all four lanes of a row would compute the float parts of every unit.

Formula: dot = sum_k q[k] * x[k], exact in int32; the float part of a unit is that of ``engine/cuda/products/matmul.py``.
Shapes: records of ``engine/cuda/products/repack.py``, activations of ``engine/cuda/products/quantize.py``.
Who owns what: lane 4 g + t passes the weights of rows g and g + 8 and the activations of the g-th unit; it owns the values of
    rows g and g + 8 in the units 2 t and 2 t + 1.  The chains of these rows go from lane to lane.
Reduction order: that of ``matmul.py``: chain = fma(da_u, value_u, chain) for each unit u in rising order.
Bytes moved: each record once from memory, the activations once per warp from the cache.

A group of up to eight units is one step:

    load the activations of the next group: those of its g-th unit, scales and sums of its units 2 t and 2 t + 1
    for i = 0 .. 7, if the unit exists:
        dots = q of record i * activations; lanes with t = i // 2 keep column i
    load the records of the next group in the registers of these
    value = d * dot (+ dm * sum), for two rows in two units
    load the factors of the next group
    for t = 0 .. 3: lane t adds two units to the chains of its rows, and passes them to the other lanes of the rows
"""

from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda

from engine.cuda.intrinsics import (
    advance,
    fma,
    lane_of_four,
    load2,
    settled,
    stream1,
    stream2,
    stream4,
    wait_for_inputs,
)
from engine.cuda.products.column_sums import column_sums
from engine.cuda.products.lanes import device, make_load, make_place
from engine.cuda.products.unpack import unpack
from engine.cuda.runtime.kinds import DeviceFunction
from engine.gguf.quants import FORMATS

f32 = np.float32
u32 = np.uint32
I = np.int32  # noqa: E741

GROUP = 8
"""Units that are multiplied before their values are added to the chains."""


class _Steps(NamedTuple):
    """The steps of the chains of one format.

    words, ends: of a lane for the records and for the factors of a group.
    roomy: whether there are registers for two groups in flight, for the activations of the next group, and for groups that
        end one chain and begin another.
    places(p, lane): where the lane's words of the first record are: first and second part of the quants, factors of unit 2 t.
    load(places, n, lane, words, ends): start loading n records, and the factors of units 2 t and 2 t + 1.
    activations(inputs, n, lane): those of the g-th of n units, and the scales and sums of units 2 t and 2 t + 1.
    group(words, ends, given, n, inputs, places, m, lane, low, high, halved, sums): add n units with activations ``given`` to
        the chains low and high of rows g and g + 8, and load what the next m need; returns low, high, the next activations.
        inputs: those of the next group.  Without room: those of this group, whose activations are loaded instead.
        halved: the chains end after four units, and are stored in ``sums``.
    """

    words: int
    ends: int
    roomy: bool
    places: DeviceFunction
    load: DeviceFunction
    activations: DeviceFunction
    group: DeviceFunction


def _make_piece(piece: tuple[int, int, str], before: int) -> tuple[DeviceFunction, DeviceFunction]:
    """Two device functions for a piece of a record: place(lane), where the lane's words of it are, and load(p, i, words),
    which starts loading them from p[i] into words[before], ..."""
    n, start, whose = piece
    share, load = make_place(whose), make_load(((n, 0, "warp"),), {1: stream1, 2: stream2, 4: stream4}, before)

    @device
    def place(lane):
        return I(start + n * share(lane))

    @device
    def load_at(p, i, words):
        load(advance(p, i), I(0), words)

    return place, load_at


def _make_steps(type_: T, single: bool) -> _Steps:
    """The steps of the chains of a format; single: no chain ends inside a group."""
    fmt, size = unpack(type_), 4 * FORMATS[type_].block_bytes
    *pieces, end_piece = fmt.pieces
    n_words, n_end, second = fmt.words - end_piece[0], fmt.words, len(pieces) > 1
    place_first, load_first = _make_piece(pieces[0], 0)
    place_second, load_second = _make_piece(pieces[-1], n_words - pieces[-1][0])
    place_end, load_end = _make_piece(end_piece, n_words)
    factors, mins = fmt.factors, fmt.mins
    order, dots_of, offset = column_sums(type_)
    summed, roomy = mins or offset > 0, not second

    @device
    def places(p, lane):
        first = settled(advance(p, place_first(lane)))
        ends = settled(advance(p, I(2 * I(lane & 3) * size + place_end(lane))))
        return first, settled(advance(p, place_second(lane))) if second else first, ends

    @device
    def load_four(at, begin, n, words):
        for i in range(4):
            if begin + i < n:
                own = words[(begin + i) * n_words : (begin + i + 1) * n_words]
                load_first(at[0], (begin + i) * size, own)
                if second:
                    load_second(at[1], (begin + i) * size, own)

    @device
    def load_half(at, half, n, words):
        if n >= 4 * half + 4:
            load_four(at, 4 * half, 8, words)
        else:
            load_four(at, 4 * half, n, words)

    @device
    def load_ends(at, n, lane, ends):
        pair = I(2 * (lane & 3))
        if pair < n:
            load_end(at[2], 0, ends[:n_end])
        if I(pair + 1) < n:
            load_end(at[2], size, ends[n_end:])

    @device
    def load(at, n, lane, words, ends):
        load_half(at, 0, n, words)
        load_half(at, 1, n, words)
        load_ends(at, n, lane, ends)

    @device
    def value(f, high, dot, total):
        """The float part of row g, or g + 8 if ``high``."""
        if offset:
            dot = I(dot - I(offset * total))
        result = f[1 if high else 0] * f32(dot)
        return fma(f[3 if high else 2], f32(total), result) if mins else result

    @device
    def activations(inputs, n, lane):
        pair, (x, xd, xs) = I(2 * I(lane & 3)), inputs
        x0, x1, da0, da1, sum0, sum1 = u32(0), u32(0), f32(0.0), f32(0.0), I(0), I(0)
        if I(lane >> 2) < n:
            x0, x1 = load2(x, 0)
        if pair < n:
            da0 = xd[0]
            if summed:
                sum0 = I(xs[0])
        if I(pair + 1) < n:
            da1 = xd[8]
            if summed:
                sum1 = I(xs[8])
        return x0, x1, da0, da1, sum0, sum1

    @device
    def group(words, ends, given, n, inputs, at, m, lane, low, high, halved, sums):
        own = given if roomy else activations(inputs, n, lane)
        t, (x0, x1, da0, da1, sum0, sum1) = I(lane & 3), own
        there, both = I(2 * t) < n, I(2 * t + 1) < n
        following = activations(inputs, m, lane) if roomy else given
        y = order(x0, x1)
        low0, low1, high0, high1 = I(0), I(0), I(0), I(0)
        for half in range(2):
            # Products of units that do not exist are not used, so one condition is enough for four.
            if half == 0 or n > 4:
                for i in range(4 * half, 4 * half + 4):
                    dots = dots_of(words[i * n_words : (i + 1) * n_words], y)
                    if t == i // 2:
                        if i % 2 == 0:
                            low0, high0 = dots[0], dots[2]
                        else:
                            low1, high1 = dots[1], dots[3]
            load_half(at, half, m, words)
        # The values of units that do not exist are zeros, like their da.  They can change the sign of a chain that is zero,
        # which the sum of the chains, beginning with +0, does not depend on.
        value0, value1, value8, value9 = f32(0.0), f32(0.0), f32(0.0), f32(0.0)
        f0, f1 = factors(ends[:n_end]), factors(ends[n_end:])
        if there:
            value0, value8 = value(f0, False, low0, sum0), value(f0, True, high0, sum0)
        if both:
            value1, value9 = value(f1, False, low1, sum1), value(f1, True, high1, sum1)
        load_ends(at, m, lane, ends)
        for k in range(4):
            if roomy and not single and k == 2 and halved:
                _store(sums, lane, low, high)
                low, high = f32(0.0), f32(0.0)
            low, high = fma(da0, value0, low), fma(da0, value8, high)
            low, high = fma(da1, value1, low), fma(da1, value9, high)
            low, high = lane_of_four(low, I(k)), lane_of_four(high, I(k))
        return low, high, following

    return _Steps(GROUP * n_words, 2 * n_end, roomy, places, load, activations, group)


@device
def _store(sums, lane, low, high):
    """Store the chains of 16 rows."""
    if lane & 3 == 0:
        sums[lane >> 2], sums[8 + (lane >> 2)] = low, high


@device
def _inputs(q, d, s, first, column, lane):
    """Where the activations of the g-th unit after ``first``, and the scales and sums of the 2 t-th are."""
    pair = I(2 * (lane & 3))
    at = I(I(first + pair) * 8 + column)
    x = advance(q, I(I(I(first + I(lane >> 2)) * 8 + column) * 8 + pair))
    return x, advance(d, at), advance(s, at)


@device
def _after(inputs, n):
    """The inputs of n units later."""
    return advance(inputs[0], I(64 * n)), advance(inputs[1], I(8 * n)), advance(inputs[2], I(8 * n))


@device
def _moved(places, n):
    """Places n words later."""
    return settled(advance(places[0], n)), settled(advance(places[1], n)), settled(advance(places[2], n))


def make_columns_chain(type_: T, gathered: bool, deep: bool) -> DeviceFunction:
    """The device function chain(records, first, last, units, rows, q, d, s, acc) of ``engine/cuda/products/chain.py``, for
    one activation row: the chain of units [first, last) of rows g and g + 8 in acc[0] and acc[2].  A gathered chain takes
    places instead of ``rows``; a deep one has two groups of records in flight if there are enough registers."""
    n_words, n_ends, roomy, places, load, activations, group = _make_steps(type_, True)
    size, deep = 4 * FORMATS[type_].block_bytes, deep and roomy
    ahead = 2 * GROUP if deep else GROUP

    @device
    def chain(p, first, last, units, rows, q, d, s, acc):
        lane = settled(I(cuda.threadIdx.x & 31))
        words = cuda.local.array(n_words, np.uint32)
        ends = cuda.local.array(n_ends, np.uint32)
        at, left = places(p, lane), I(last - first)
        load(at, left, lane, words, ends)
        if deep:
            other_words = cuda.local.array(n_words, np.uint32)
            other_ends = cuda.local.array(n_ends, np.uint32)
            load(_moved(at, GROUP * size), I(left - GROUP), lane, other_words, other_ends)
        wait_for_inputs()
        inputs = _inputs(q, d, s, first, rows[1] if gathered else I(0), lane)
        given = activations(inputs, left, lane)
        if deep:
            other_given = activations(_after(inputs, I(GROUP)), I(left - GROUP), lane)
        low, high = f32(0.0), f32(0.0)
        while left > 0:
            at, next_inputs = _moved(at, ahead * size), _after(inputs, I(ahead))
            from_, m = next_inputs if roomy else inputs, I(left - ahead)
            low, high, given = group(words, ends, given, left, from_, at, m, lane, low, high, False, acc)
            inputs = next_inputs
            left = I(left - GROUP)
            if deep:
                if left > 0:
                    at8, from8, m = _moved(at, GROUP * size), _after(inputs, I(GROUP)), I(left - ahead)
                    low, high, other_given = group(
                        other_words, other_ends, other_given, left, from8, at8, m, lane, low, high, False, acc
                    )
                left = I(left - GROUP)
        acc[0], acc[2] = low, high

    return chain


def make_columns_chains(type_: T) -> DeviceFunction:
    """The device function chains(records, first, last, length, column, q, d, s, sums): wait for the inputs, then compute the
    chains of units [first, last), ``length`` units each, and put those of rows 0 .. 15 into sums[16 c : 16 c + 16] for c = 0,
    1, ...; first: the first unit of a chain; column: the place of the scale of the activation row's first unit."""
    n_words, n_ends, roomy, places, load, activations, group = _make_steps(type_, False)
    size = 4 * FORMATS[type_].block_bytes

    @device
    def chains(p, first, last, length, column, q, d, s, sums):
        lane = settled(I(cuda.threadIdx.x & 31))
        words = cuda.local.array(n_words, np.uint32)
        ends = cuda.local.array(n_ends, np.uint32)
        end = min(I(first + length), last)
        n, at, start = min(I(GROUP), I(end - first)), places(p, lane), first
        load(at, n, lane, words, ends)
        wait_for_inputs()
        inputs = _inputs(q, d, s, first, column, lane)
        given = activations(inputs, n, lane)
        low, high, halved = f32(0.0), f32(0.0), False
        while start < last:
            following = I(start + n)
            ended = following == end
            next_sums = advance(sums, I(16)) if halved else sums
            if ended:
                end = min(I(end + length), last)
            # The next group continues in the next chain only if its first half ends a chain.
            m, next_end, next_halved = min(I(GROUP), I(end - following)), end, False
            if roomy and I(end - following) == 4 and end < last:
                next_end, next_halved = min(I(end + length), last), True
                m = I(4 + min(I(4), I(next_end - end)))
            at, next_inputs = _moved(at, I(n * size)), _after(inputs, n)
            from_ = next_inputs if roomy else inputs
            low, high, given = group(words, ends, given, n, from_, at, m, lane, low, high, halved, sums)
            inputs = next_inputs
            sums = next_sums
            if ended:
                _store(sums, lane, low, high)
                low, high, sums = f32(0.0), f32(0.0), advance(sums, I(16))
            start, n, end, halved = following, m, next_end, next_halved

    return chains
