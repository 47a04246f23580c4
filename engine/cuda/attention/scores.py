"""Scores of keys in place: the parts of ``engine/cuda/attention/direct.py`` that turn keys into scores.

Formula, order: ``engine/cpu/quantized_cache.py``, and for float keys ``engine/cpu/attention.py``; shapes:
``engine/cache/types.py``.
"""

import numpy as np

from engine.cache.types import BLOCK, CHUNK, CacheType
from engine.cuda.intrinsics import advance, bits_float, fma, load1, load2, mma32, vector2
from engine.cuda.products.unpack import device, high_half, low_half, nibbles
from engine.cuda.runtime.kinds import DeviceFunction

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

PAIRS = 8
"""(row, head) pairs that a tensor core serves: the columns of its tile."""


# --- scores of quantized keys ----------------------------------------------------------------------------------


def make_own_keys(of: CacheType, d_k: int) -> DeviceFunction:
    """The device function ``own(keys, lane, tile)``: pointers to the integers and scales of a lane's two positions among the
    16 of a tensor-core tile: 8 dimensions of each block, and all scales."""
    bits, integers = of.bits, of.integer_words(d_k)

    @device
    def own(keys, lane, tile):
        g, t = I((lane >> 2) & 7), I(lane & 3)
        position = I(16 * tile + 2 * g)
        at = I(((t >> 1) * CHUNK + position) * 4 + 2 * (t & 1)) if bits == 8 else I(position * 4 + t)
        return advance(keys, at), advance(keys, I(integers + 8 * tile + g))

    return own


def _make_key_load(bits: int, part: int, at: int, scale_at: int) -> DeviceFunction:
    """The device function ``load(key, scale, words, scales)``: load the lane's part of a block of two adjacent positions: 8
    dimensions of each, and the scales of both in one word, ``at`` and ``scale_at`` words further, as number ``part``."""

    @device
    def load(key, scale, words, scales):
        if bits == 8:
            a = load2(key, at)
            b = load2(key, at + 4)
            words[4 * part], words[4 * part + 1] = a[0], a[1]
            words[4 * part + 2], words[4 * part + 3] = b[0], b[1]
        else:
            words[2 * part] = load1(key, at)
            words[2 * part + 1] = load1(key, at + 4)
        scales[part] = load1(scale, scale_at)

    return load


def _make_key_use(bits: int, part: int, acc_at: int) -> DeviceFunction:
    """The device function ``use(words, scales, b0, b1, d0, d1, z0, z1, acc)``: add block number ``part`` to the scores of two
    positions and two pairs, acc[acc_at : acc_at + 4].

    b0, b1: words of all pairs as a tensor-core lane takes them; d0, d1: scales of the lane's two pairs; z0, z1: eight times
    the sums of their integers, since integers of four bits are stored plus 8.
    """

    @device
    def use(words, scales, b0, b1, d0, d1, z0, z1, acc):
        if bits == 8:
            a0, a2, a1, a3 = words[4 * part], words[4 * part + 1], words[4 * part + 2], words[4 * part + 3]
            s0, s1, s2, s3 = mma32(a0, a1, a2, a3, b0, b1)
        else:
            a, b = words[2 * part], words[2 * part + 1]
            sums = mma32(nibbles(a, 0), nibbles(b, 0), nibbles(a, 4), nibbles(b, 4), b0, b1)
            s0, s1, s2, s3 = I(sums[0] - z0), I(sums[1] - z1), I(sums[2] - z0), I(sums[3] - z1)
        x, y = low_half(scales[part]), high_half(scales[part])
        acc[acc_at] = fma(d0 * x, F(s0), acc[acc_at])
        acc[acc_at + 1] = fma(d1 * x, F(s1), acc[acc_at + 1])
        acc[acc_at + 2] = fma(d0 * y, F(s2), acc[acc_at + 2])
        acc[acc_at + 3] = fma(d1 * y, F(s3), acc[acc_at + 3])

    return use


def make_quantized_scores(bits: int, d_k: int, tiles: int) -> tuple[int, int, DeviceFunction, DeviceFunction]:
    """(words, scales, load, score): the registers for the first keys, ``load(key, scale, words, scales)``, which loads them,
    and the device function ``score(key, scale, words, scales, query, d, acc)``, which writes the scores of 1 or 4 tensor-core
    tiles of 16 positions each to acc [4 tiles].

    A unit is a block of 32 dimensions and up to two tiles: once a unit has been used, the one that is ``ahead`` units further
    is loaded into its registers.
    """
    blocks = d_k // BLOCK
    n = next(n for n in (4, 3, 2, 1) if blocks % n == 0)
    apart, scales_apart = BLOCK * bits // 32 * CHUNK, CHUNK // 2
    wide = min(2, tiles)
    per_block = tiles // wide
    units, rounds = n * per_block, blocks // n
    ahead = units if bits == 4 or units < 6 else units // 2 if rounds == 1 else per_block
    n_parts = ahead * wide
    n_words, n_acc = n_parts * bits // 2, 4 * tiles

    def make_load(unit: int, k: int) -> DeviceFunction:
        block, tile = unit // per_block, unit % per_block * wide + k
        return _make_key_load(bits, unit % ahead * wide + k, block * apart + tile * 64, block * scales_apart + tile * 8)

    def make_unit_load(unit: int) -> DeviceFunction:
        first, last = make_load(unit, 0), make_load(unit, wide - 1)

        @device
        def load(key, scale, words, scales):
            first(key, scale, words, scales)
            if wide > 1:
                last(key, scale, words, scales)

        return load

    def make_first_loads(unit: int) -> DeviceFunction:
        load, rest = make_unit_load(unit), make_first_loads(unit + 1) if unit + 1 < ahead else None
        more = unit + 1 < ahead

        @device
        def loads(key, scale, words, scales):
            load(key, scale, words, scales)
            if more:
                rest(key, scale, words, scales)

        return loads

    def make_from(unit: int) -> DeviceFunction:
        """The units from ``unit`` to the last of this round."""
        rest = make_from(unit + 1) if unit + 1 < units else None
        last, opens, within = unit + 1 == units, unit % per_block == 0, unit + ahead < units
        at, part, acc_at = unit // per_block * PAIRS, unit % ahead * wide, unit % per_block * wide * 4
        use0, use1 = (_make_key_use(bits, part + k, acc_at + 4 * k) for k in (0, wide - 1))
        load = make_unit_load(unit + ahead)

        @device
        def step(key, scale, words, scales, query, d, b0, b1, d0, d1, z0, z1, more, acc):
            if opens:
                b0, b1 = vector2(query, 8 * at)
                low, high = vector2(d, at)
                d0, d1 = bits_float(I(low)), bits_float(I(high))
                if bits == 4:
                    eights = U(0x08080808)
                    sums = mma32(eights, eights, eights, eights, b0, b1)
                    z0, z1 = sums[0], sums[1]
            use0(words, scales, b0, b1, d0, d1, z0, z1, acc)
            if wide > 1:
                use1(words, scales, b0, b1, d0, d1, z0, z1, acc)
            if within or more:
                load(key, scale, words, scales)
            if not last:
                rest(key, scale, words, scales, query, d, b0, b1, d0, d1, z0, z1, more, acc)

        return step

    load, step = make_first_loads(0), make_from(0)

    @device
    def score(key, scale, words, scales, query, d, acc):
        for k in range(n_acc):
            acc[k] = F(0.0)
        if rounds == 1:
            step(key, scale, words, scales, query, d, U(0), U(0), F(0.0), F(0.0), I(0), I(0), False, acc)
        else:
            left = I(rounds - 1)
            while left >= 0:
                more = left > 0
                step(key, scale, words, scales, query, d, U(0), U(0), F(0.0), F(0.0), I(0), I(0), more, acc)
                key, scale = advance(key, n * apart), advance(scale, n * scales_apart)
                query, d = advance(query, n * PAIRS * 8), advance(d, n * PAIRS)
                left = I(left - 1)

    return n_words, n_parts, load, score


# --- scores of float keys --------------------------------------------------------------------------------------


def make_float_run(half: bool, of_warp: int, n: int) -> DeviceFunction:
    """The device function ``run(key, scaled, total)``: the next n dimensions, for two positions and the warp's pairs."""
    if n > 1:
        low, high = make_float_run(half, of_warp, n // 2), make_float_run(half, of_warp, n - n // 2)
        key_apart, scaled_apart = n // 2 * (CHUNK // 2 if half else CHUNK), n // 2 * of_warp

        @device
        def run(key, scaled, total):
            low(key, scaled, total)
            high(advance(key, key_apart), advance(scaled, scaled_apart), total)

        return run

    @device
    def run_one(key, scaled, total):
        if half:
            a, b = low_half(key[0]), high_half(key[0])
        else:
            a, b = bits_float(I(key[0])), bits_float(I(key[1]))
        for h in range(of_warp):
            total[2 * h] = fma(bits_float(I(scaled[h])), a, total[2 * h])
            total[2 * h + 1] = fma(bits_float(I(scaled[h])), b, total[2 * h + 1])

    return run_one
