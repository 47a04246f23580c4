"""What a warp does with a chunk of integer keys and values (cache types i8 and i12), for 16 queries, on tensor cores.

    scores = 0
    for each block of dimensions:
        I = integer products of the queries and the keys          two of a query's bytes, 8 h + l, times one or two of a key's
        scores = fma(dq * dk, float32(I), scores)
    scores = softcap(scores, cap log2(e)) if there is a cap
    p = 2**(scores - maximum), l = sum of p
    for each block of values:
        P = integers of p * dv, 2**E above all of them            as bytes, 16 h + l
        o = 2**(E - 11) * float32(integer products of P and the values)

Formula: ``engine/cpu/integer_attention.py``.
Shapes: keys, values: words of a chunk (``engine/cache/types.py``), in shared or global memory, rows ``pitch`` words apart;
    queries in the layout of a tensor core: words [d_k / 32, 2, 32 lanes, 4], h and l, and scales float32 [blocks, 16].
Who owns what: lane 4 g + t owns queries g and g + 8 (r = 0, 1), and of each 16 positions, or dimensions of a value, numbers
    4 t .. 4 t + 3 (e).  A product has eight columns: one has those of the words at 2 g of a row, another those at 2 g + 1.
    So each lane gets the scores of the positions whose weights it passes to the next product.
Reduction order: that of the mirror; integers are exact in any order.
Bytes moved: those of the chunk, once per warp.
"""

import numpy as np
from numba import cuda

from engine.cache.types import CHUNK, CacheType
from engine.cpu.integer_attention import LN_2, WEIGHT
from engine.cpu.integer_cache import LOG2_E
from engine.cuda.attention.tile import make_each
from engine.cuda.intrinsics import (
    advance,
    bits_float,
    exp2,
    float_bits,
    fma,
    lane_xor,
    lane_xor_int,
    mma32_onto,
    round_product,
    softcap,
    unless_overflow,
    vector4,
)
from engine.cuda.products.unpack import device, high_half, low_half, nibbles
from engine.cuda.runtime.kinds import DeviceFunction
from engine.gguf.quants import TINY

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

PAIRS = 16
"""(row, head) pairs of a warp."""
STRIPS = CHUNK // 16
"""Runs of 16 positions of a chunk."""
SCORES = 8 * STRIPS
"""Scores of a lane: [strip, r, e]."""


@device
def _add(acc, at, a, b0, b1):
    """Add a tensor-core product to the sums acc[at : at + 4]."""
    sums = mma32_onto(a[0], a[1], a[2], a[3], b0, b1, acc[at], acc[at + 1], acc[at + 2], acc[at + 3])
    for k in range(4):
        acc[at + k] = sums[k]


def make_scores(
    of: CacheType,
    d_k: int,
    pitch: int,
    low_pitch: int,
    load: DeviceFunction,
    at_once: int,
    cap: float,
    strips: int = STRIPS,
) -> DeviceFunction:
    """The device function ``scores(query, dq, keys, lows, scales, lane, s)``: the lane's scores of the first ``strips``
    strips from the pointers on, s [8 strips].

    keys, lows, scales: the chunk's bytes, the low bits of i12, and the float16 scales; load: a load of two words from there;
    ``at_once``: strips of 16 positions whose sums are in registers at the same time; ``cap``: of scores, 0 for none.
    """
    block, low_bits = of.block(d_k), of.bits == 12
    blocks, steps = d_k // block, block // 32
    n_acc = 8 * at_once
    n_low = n_acc if low_bits else 1
    capped, most_score = cap > 0.0, F(cap * LOG2_E)

    @device
    def multiply(at, first, query, key, low_key, high, low, high_of_low, low_of_low):
        """Add dimensions 32 at .. 32 at + 31 to the sums of some strips."""
        x_high, x_low = vector4(query, 256 * at), vector4(query, 256 * at + 128)
        for m in range(at_once):
            column = 16 * (first + m)
            one, other = load(key, I(8 * at * pitch) + column), load(key, I((8 * at + 1) * pitch) + column)
            for e in range(2):
                _add(high, 8 * m + 4 * e, x_high, one[e], other[e])
                _add(low, 8 * m + 4 * e, x_low, one[e], other[e])
            if low_bits:
                both = load(low_key, I(4 * at * low_pitch) + column)
                for e in range(2):
                    w, z = nibbles(both[e], 0), nibbles(both[e], 4)
                    _add(high_of_low, 8 * m + 4 * e, x_high, w, z)
                    _add(low_of_low, 8 * m + 4 * e, x_low, w, z)

    @device
    def take_strips(i, b, x, y, query, key, low_key, scale, s):
        """Add a block to the scores of strips ``at_once`` * i and those after it; x, y: its scales of the two queries."""
        high = cuda.local.array(n_acc, np.int32)
        low = cuda.local.array(n_acc, np.int32)
        high_of_low = cuda.local.array(n_low, np.int32)
        low_of_low = cuda.local.array(n_low, np.int32)
        first = at_once * i
        for k in range(n_acc):
            high[k] = I(0)
            low[k] = I(0)
            if low_bits:
                high_of_low[k] = I(0)
                low_of_low[k] = I(0)
        for step in range(steps):
            multiply(I(I(b * steps) + step), first, query, key, low_key, high, low, high_of_low, low_of_low)
        for m in range(at_once):
            halves = load(scale, I(32 * b) + 8 * (first + m))
            for e in range(2):
                # Positions 4 t + e and 4 t + 2 + e.
                near = high_half(halves[0]) if e else low_half(halves[0])
                far = high_half(halves[1]) if e else low_half(halves[1])
                for c in range(4):
                    k = 8 * m + 4 * e + c
                    total = I(I(8 * high[k]) + low[k])
                    if low_bits:
                        total = I(I(16 * total) + I(I(8 * high_of_low[k]) + low_of_low[k]))
                    d = (y if c > 1 else x) * (far if c & 1 else near)
                    to = 8 * (first + m) + 4 * (c >> 1) + 2 * (c & 1) + e
                    s[to] = fma(d, F(total), s[to])

    take_all_strips = make_each(strips // at_once, take_strips)

    @device
    def scores(query, dq, keys, lows, scales, lane, s):
        g, t = I(lane >> 2), I(lane & 3)
        key = advance(keys, I(I(2 * t) * pitch + 2 * g))
        low_key = advance(lows, I(t * low_pitch + 2 * g))
        for k in range(8 * strips):
            s[k] = F(0.0)
        # A loop, because the code of a chunk has to fit into the instruction cache.
        for b in range(blocks):
            x, y = dq[I(PAIRS * b) + g], dq[I(PAIRS * b) + g + 8]
            take_all_strips(0, I(b), x, y, advance(query, 4 * lane), key, low_key, advance(scales, 2 * t), s)
        if capped:
            for k in range(8 * strips):
                s[k] = softcap(s[k], most_score)

    return scores


def make_hide(strips: int) -> DeviceFunction:
    """The device function ``hide(s, r, first, last, t)``: set the scores of query r at positions outside [first, last) of so
    many strips to -inf."""

    @device
    def hide(s, r, first, last, t):
        for m in range(strips):
            for e in range(4):
                position = I(16 * m + e) + I(4 * t)
                if position < first or position >= last:
                    s[8 * m + 4 * r + e] = F(-np.inf)

    return hide


hide = make_hide(STRIPS)


@device
def sum_of_lanes(a, b, c, d, lane):
    """The levels 8 to 1 of the halving tree of 64 weights: a, b, c, d are the sums of the lane's positions that are 16 apart.
    Afterwards a lane has position t of four."""
    upper, odd = lane & 2 != 0, lane & 1 != 0
    kept, other = (c if upper else a), (d if upper else b)
    kept = kept + lane_xor(a if upper else c, I(2))
    other = other + lane_xor(b if upper else d, I(2))
    total = (other if odd else kept) + lane_xor(kept if odd else other, I(1))
    total = total + lane_xor(total, I(2))
    return total + lane_xor(total, I(1))


@device
def weigh(s, r, lane):
    """Turn the scores of query r into weights 2**(score - maximum), all 0 if no position is visible; returns ln 2 * maximum
    and the sum of the weights, which is 0 only then."""
    top = s[4 * r]
    for m in range(STRIPS):
        for e in range(4):
            top = max(top, s[8 * m + 4 * r + e])
    top = max(top, lane_xor(top, I(1)))
    top = max(top, lane_xor(top, I(2)))
    base = top if top > F(-np.inf) else F(0.0)
    for m in range(STRIPS):
        for e in range(4):
            s[8 * m + 4 * r + e] = exp2(s[8 * m + 4 * r + e] - base)
    # The halving tree of 64: 32 and 16 apart in the lane, 8 and less in others.
    a = (s[4 * r] + s[16 + 4 * r]) + (s[8 + 4 * r] + s[24 + 4 * r])
    b = (s[4 * r + 1] + s[16 + 4 * r + 1]) + (s[8 + 4 * r + 1] + s[24 + 4 * r + 1])
    c = (s[4 * r + 2] + s[16 + 4 * r + 2]) + (s[8 + 4 * r + 2] + s[24 + 4 * r + 2])
    d = (s[4 * r + 3] + s[16 + 4 * r + 3]) + (s[8 + 4 * r + 3] + s[24 + 4 * r + 3])
    # What joins chunks subtracts this maximum, and a product that feeds a sum is an fma.
    return fma(top, LN_2, F(-0.0)), sum_of_lanes(a, b, c, d, lane)


def make_products(load: DeviceFunction, strips: int) -> DeviceFunction:
    """The device function ``products(p, r, scales, t, w)``: the weights p of query r times the float16 scales of a block of
    the values, to w [4 strips]; returns the bits of the lane's largest."""

    @device
    def products(p, r, scales, t, w):
        bits = I(0)
        for m in range(strips):
            halves = load(scales, 8 * m + 2 * t)
            for e in range(4):
                half = halves[e >> 1]
                d = high_half(half) if e & 1 else low_half(half)
                # The scales of hidden positions may be anything: 0 * NaN and 0 * inf count as 0.  Where a weight is NaN, so
                # is the sum of weights.
                w[4 * m + e] = max(F(0.0), p[8 * m + 4 * r + e] * d)
                bits = max(bits, I(float_bits(w[4 * m + e])))
        return bits

    return products


@device
def power_above(bits):
    """(2**(11 - E), 2**(E - 11)), where the float32 of these bits, the largest product of a chunk, is below 2**E; (0, 0) if
    it counts as 0, NaN in place of the second if it is not finite."""
    exponent = I(bits >> I(23))
    up = bits_float(I(I(264 - exponent) << I(23)))
    factor = unless_overflow(bits_float(bits), bits_float(I(I(exponent - 10) << I(23))))
    if bits_float(bits) < TINY:
        up, factor = F(0.0), F(0.0)
    return up, factor


@device
def to_bytes(w, m, up):
    """The integers P of the four products w[4 m : 4 m + 4], as words of the bytes P // 16 and P % 16."""
    even, odd = U(0), U(0)
    for e in range(2):
        value = U(min(I(WEIGHT), round_product(w[4 * m + 2 * e], up)))
        after = U(min(I(WEIGHT), round_product(w[4 * m + 2 * e + 1], up)))
        even, odd = U(even | U(value << U(16 * e))), U(odd | U(after << U(16 * e)))
    # The bytes of positions 0, 2 and 1, 3.
    low = U(U(even & U(0x000F000F)) | U(U(odd & U(0x000F000F)) << U(8)))
    return U(U(U(even >> U(4)) & U(0x007F007F)) | U(U(U(odd >> U(4)) & U(0x007F007F)) << U(8))), low


def make_integers(load: DeviceFunction) -> DeviceFunction:
    """The device function ``integers(p, r, scales, t, high, low)``: the integers P of query r, from its weights p and the
    float16 scales of a block of the chunk's values: bytes P // 16 and P % 16 of four positions per word, to high and low
    [strip, r]; returns 2**(E - 11), or 0 if all are 0, or NaN if a product is not finite."""

    n_w, products = 4 * STRIPS, make_products(load, STRIPS)

    @device
    def integers(p, r, scales, t, high, low):
        w = cuda.local.array(n_w, np.float32)
        bits = products(p, r, scales, t, w)
        bits = max(bits, lane_xor_int(bits, I(1)))
        bits = max(bits, lane_xor_int(bits, I(2)))
        up, factor = power_above(bits)
        for m in range(STRIPS):
            high[2 * m + r], low[2 * m + r] = to_bytes(w, m, up)
        return factor

    return integers


def make_values(of: CacheType, d_v: int, pitch: int, low_pitch: int, load: DeviceFunction) -> DeviceFunction:
    """The device function ``values(words, lows, b, n, high, low, x, y, lane, o)``: the weighted sums of dimensions 16 n ..
    16 n + 15 of block b of the values at ``words``, whose low bits are at ``lows``: the lane's, times x (r = 0) or y (r = 1),
    to o [r, e].  high, low: what ``integers`` found."""
    block, low_bits = of.block(d_v), of.bits == 12
    half, n_low = block // 2, 8 if low_bits else 1

    @device
    def values(words, lows, b, n, high, low, x, y, lane, o):
        upper = cuda.local.array(8, np.int32)
        lower = cuda.local.array(8, np.int32)
        upper_of_low = cuda.local.array(n_low, np.int32)
        lower_of_low = cuda.local.array(n_low, np.int32)
        for k in range(8):
            upper[k] = I(0)
            lower[k] = I(0)
            if low_bits:
                upper_of_low[k] = I(0)
                lower_of_low[k] = I(0)
        g, t = I(lane >> 2), I(lane & 3)
        value = advance(words, I(t * pitch + 2 * g))
        low_value = advance(lows, I(t * low_pitch + 2 * g))
        for step in range(CHUNK // 32):
            a = high[4 * step], high[4 * step + 1], high[4 * step + 2], high[4 * step + 3]
            c = low[4 * step], low[4 * step + 1], low[4 * step + 2], low[4 * step + 3]
            column = I(I(b * block) + 16 * n)
            one, other = load(value, 8 * step * pitch + column), load(value, (8 * step + 4) * pitch + column)
            for e in range(2):
                _add(upper, 4 * e, a, one[e], other[e])
                _add(lower, 4 * e, c, one[e], other[e])
            if low_bits:
                upper_half = I(16 * n) >= I(half)
                column = I(I(b * half) + I(I(16 * n) - (I(half) if upper_half else I(0))))
                shift = I(4) if upper_half else I(0)
                one, other = (
                    load(low_value, 8 * step * low_pitch + column),
                    load(low_value, (8 * step + 4) * low_pitch + column),
                )
                for e in range(2):
                    w, z = nibbles(one[e], shift), nibbles(other[e], shift)
                    _add(upper_of_low, 4 * e, a, w, z)
                    _add(lower_of_low, 4 * e, c, w, z)
        for e in range(2):
            for k in range(4):
                i = 4 * e + k
                total = I(I(16 * upper[i]) + lower[i])
                if low_bits:
                    total = I(I(16 * total) + I(I(16 * upper_of_low[i]) + lower_of_low[i]))
                o[4 * (k >> 1) + 2 * (k & 1) + e] = (y if k > 1 else x) * F(total)

    return values
