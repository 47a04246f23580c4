"""Scores of keys where they lie: the parts of ``engine/cuda/direct_attention.py`` that turn keys into scores.

Formula, order: ``engine/cpu/quantized_cache.py``, and of float keys ``engine/cpu/attention.py``; shapes:
``engine/cache/types.py``.
"""

from typing import Any

import numpy as np
from numba import cuda

from engine.cache.types import BLOCK, CHUNK
from engine.cuda.intrinsics import advance, bits_float, fma, load1, load2, mma32
from engine.cuda.unpack import device, high_half, low_half, minus, nibbles

F = np.float32
I = np.int32  # noqa: E741

PAIRS = 8
"""(row, head) pairs that a tensor core serves: the columns of its tile."""


# --- scores of quantized keys ----------------------------------------------------------------------------------


def _make_key_load(bits: int, first: int, n: int) -> Any:
    """The device function ``load(key, scale, words, scales)``: blocks first .. first + n - 1 of two positions side by side,
    the lane's part: 8 dimensions of each, and the scales of both in a word."""
    if n > 1:
        low, high = _make_key_load(bits, first, n // 2), _make_key_load(bits, first + n // 2, n - n // 2)

        @device
        def load(key, scale, words, scales):  # type: ignore[no-untyped-def]
            low(key, scale, words, scales)
            high(key, scale, words, scales)

        return load

    apart = BLOCK * bits // 32 * CHUNK

    @device
    def load_one(key, scale, words, scales):  # type: ignore[no-untyped-def]
        if bits == 8:
            a = load2(key, first * apart)
            b = load2(key, first * apart + 4)
            words[4 * first], words[4 * first + 1] = a[0], a[1]
            words[4 * first + 2], words[4 * first + 3] = b[0], b[1]
        else:
            words[2 * first] = load1(key, first * apart)
            words[2 * first + 1] = load1(key, first * apart + 4)
        scales[first] = load1(scale, first * (CHUNK // 2))

    return load_one


def _make_key_use(bits: int, first: int, n: int) -> Any:
    """The device function ``use(words, scales, query, d, acc)``: what they add to the scores of two positions and two pairs.

    query: words of all pairs as the lane of a tensor core takes them; d: scales of the lane's two pairs.
    """
    if n > 1:
        low, high = _make_key_use(bits, first, n // 2), _make_key_use(bits, first + n // 2, n - n // 2)

        @device
        def use(words, scales, query, d, acc):  # type: ignore[no-untyped-def]
            low(words, scales, query, d, acc)
            high(words, scales, query, d, acc)

        return use

    @device
    def use_one(words, scales, query, d, acc):  # type: ignore[no-untyped-def]
        if bits == 8:
            a0, a2, a1, a3 = words[4 * first], words[4 * first + 1], words[4 * first + 2], words[4 * first + 3]
        else:
            a, b = words[2 * first], words[2 * first + 1]
            a0, a2 = minus(nibbles(a, 0), 0x08080808), minus(nibbles(a, 4), 0x08080808)
            a1, a3 = minus(nibbles(b, 0), 0x08080808), minus(nibbles(b, 4), 0x08080808)
        at = first * PAIRS
        sums = mma32(a0, a1, a2, a3, query[8 * at], query[8 * at + 1])
        x, y = low_half(scales[first]), high_half(scales[first])
        acc[0] = fma(d[at] * x, F(sums[0]), acc[0])
        acc[1] = fma(d[at + 1] * x, F(sums[1]), acc[1])
        acc[2] = fma(d[at] * y, F(sums[2]), acc[2])
        acc[3] = fma(d[at + 1] * y, F(sums[3]), acc[3])

    return use_one


def make_quantized_scores(bits: int, d_k: int) -> tuple[int, int, Any, Any]:
    """(words, scales, load, score): registers of the first blocks of keys, ``load`` to bring them, and the device function
    ``score(key, scale, words, scales, query, d, acc)``, the whole of two positions.

    Blocks of 32 dimensions come a few at a time, and while some are used the next are on their way.
    """
    blocks = d_k // BLOCK
    n = next(n for n in (4, 3, 2, 1) if blocks % n == 0)
    n_words, apart, scales_apart = n * bits // 2, n * bits * CHUNK, n * CHUNK // 2
    load, use = _make_key_load(bits, 0, n), _make_key_use(bits, 0, n)

    def make_from(first: int) -> Any:
        more = first + n < blocks
        rest = make_from(first + n) if more else None

        @device
        def step(key, scale, words, scales, others, other_scales, query, d, acc):  # type: ignore[no-untyped-def]
            if more:
                key, scale = advance(key, apart), advance(scale, scales_apart)
                load(key, scale, others, other_scales)
            use(words, scales, query, d, acc)
            if more:
                query, d = advance(query, n * PAIRS * 8), advance(d, n * PAIRS)
                rest(key, scale, others, other_scales, words, scales, query, d, acc)

        return step

    step = make_from(0)

    @device
    def score(key, scale, words, scales, query, d, acc):  # type: ignore[no-untyped-def]
        others = cuda.local.array(n_words, np.uint32)
        other_scales = cuda.local.array(n, np.uint32)
        for k in range(4):
            acc[k] = F(0.0)
        step(key, scale, words, scales, others, other_scales, query, d, acc)

    return n_words, n, load, score


# --- scores of float keys --------------------------------------------------------------------------------------


def make_float_run(half: bool, of_warp: int, n: int) -> Any:
    """The device function ``run(key, scaled, total)``: n dimensions further for two positions and the warp's pairs."""
    if n > 1:
        low, high = make_float_run(half, of_warp, n // 2), make_float_run(half, of_warp, n - n // 2)
        key_apart, scaled_apart = n // 2 * (CHUNK // 2 if half else CHUNK), n // 2 * of_warp

        @device
        def run(key, scaled, total):  # type: ignore[no-untyped-def]
            low(key, scaled, total)
            high(advance(key, key_apart), advance(scaled, scaled_apart), total)

        return run

    @device
    def run_one(key, scaled, total):  # type: ignore[no-untyped-def]
        if half:
            a, b = low_half(key[0]), high_half(key[0])
        else:
            a, b = bits_float(I(key[0])), bits_float(I(key[1]))
        for h in range(of_warp):
            total[2 * h] = fma(bits_float(I(scaled[h])), a, total[2 * h])
            total[2 * h + 1] = fma(bits_float(I(scaled[h])), b, total[2 * h + 1])

    return run_one
