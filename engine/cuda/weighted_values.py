"""Weighted values where they lie: the parts of ``engine/cuda/direct_attention.py`` that add up values.

Formula, order: ``engine/cpu/attention.py``; shapes: ``engine/cache/types.py``.  A quantized value is scale * integer,
which is exact.
"""

from typing import Any

import numpy as np
from numba import cuda

from engine.cache.types import BLOCK, CacheType
from engine.cuda.intrinsics import bits_float, fma, half_to_float, load1, load2, load4, pick_bytes
from engine.cuda.unpack import device, high_half, low_half, nibbles

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

OWNED = 4
"""Elements of a value that a thread owns."""
STEP = 4
"""Positions that the weighted sum takes at a time where some are hidden."""


# --- weighted values -------------------------------------------------------------------------------------------


def make_value_load(of: CacheType, d_v: int, first: int, n: int) -> Any:
    """The device function ``load(value, scale, words, scales)``: a thread's elements of positions first .. first + n - 1."""
    if n > 1:
        low, high = make_value_load(of, d_v, first, n // 2), make_value_load(of, d_v, first + n // 2, n // 2)

        @device
        def load(value, scale, words, scales):  # type: ignore[no-untyped-def]
            low(value, scale, words, scales)
            high(value, scale, words, scales)

        return load

    bits = of.bits
    at, scale_at = first * (d_v * bits // 32), first * (d_v // BLOCK)

    @device
    def load_one(value, scale, words, scales):  # type: ignore[no-untyped-def]
        if bits == 32:
            vector = load4(value, at)
            for k in range(4):
                words[4 * first + k] = vector[k]
        elif bits == 16:
            words[2 * first], words[2 * first + 1] = load2(value, at)
        else:
            words[first] = load1(value, at)
            scales[first] = scale[scale_at]

    return load_one


def make_sum_run(bits: int, shared_by: int, n_bounds: int, masked: bool, first: int, n: int) -> Any:
    """The device function ``run(words, scales, shift, weight, j, firsts, lasts, total)``: positions first .. first + n - 1 of
    those that are in registers, the first of which is j.

    shift: where in a byte a thread's integers of four bits are; weight: p of ``shared_by`` pairs side by side; total
    [4 shared_by]: chains; ``masked``: only positions from firsts[h] to before lasts[h] count for pair h.
    """
    if n > 1:
        low = make_sum_run(bits, shared_by, n_bounds, masked, first, n // 2)
        high = make_sum_run(bits, shared_by, n_bounds, masked, first + n // 2, n // 2)

        @device
        def run(words, scales, shift, weight, j, firsts, lasts, total):  # type: ignore[no-untyped-def]
            low(words, scales, shift, weight, j, firsts, lasts, total)
            high(words, scales, shift, weight, j, firsts, lasts, total)

        return run

    one = n_bounds == 1
    flip, zero = (U(0x80808080), F(32768 + 128)) if bits == 8 else (U(0), F(32768 + 8))

    @device
    def run_one(words, scales, shift, weight, j, firsts, lasts, total):  # type: ignore[no-untyped-def]
        value = cuda.local.array(OWNED, np.float32)
        if bits == 32:
            for e in range(OWNED):
                value[e] = bits_float(I(words[4 * first + e]))
        elif bits == 16:
            for e in range(2):
                value[2 * e] = low_half(words[2 * first + e])
                value[2 * e + 1] = high_half(words[2 * first + e])
        else:
            word = U(words[first] ^ flip) if bits == 8 else nibbles(words[first], shift)
            scale = half_to_float(scales[first])
            for e in range(OWNED):
                # The byte becomes part of a float32: 32768 and it.
                value[e] = scale * (bits_float(I(pick_bytes(word, U(0x47), U(0x4505 + 16 * e)))) - zero)
        for h in range(shared_by):
            bound = 0 if one else h
            p = weight[first * shared_by + h]
            seen = not masked or (I(j + first) >= firsts[bound] and I(j + first) < lasts[bound])
            for e in range(OWNED):
                x = fma(p, value[e], total[OWNED * h + e])
                total[OWNED * h + e] = x if seen else total[OWNED * h + e]

    return run_one


def make_spans(of: CacheType, d_v: int, shared_by: int, n_bounds: int, first: int, n: int) -> Any:
    """The device function ``run(value, scale, words, scales, shift, weight, j, firsts, lasts, more, total)``: positions first
    .. first + n - 1 of those in registers, which the positions from value on replace if there are ``more``."""
    if n > STEP:
        low = make_spans(of, d_v, shared_by, n_bounds, first, n // 2)
        high = make_spans(of, d_v, shared_by, n_bounds, first + n // 2, n // 2)

        @device
        def run(value, scale, words, scales, shift, weight, j, firsts, lasts, more, total):  # type: ignore[no-untyped-def]
            low(value, scale, words, scales, shift, weight, j, firsts, lasts, more, total)
            high(value, scale, words, scales, shift, weight, j, firsts, lasts, more, total)

        return run

    use, load = make_sum_run(of.bits, shared_by, n_bounds, False, first, n), make_value_load(of, d_v, first, n)

    @device
    def run_step(value, scale, words, scales, shift, weight, j, firsts, lasts, more, total):  # type: ignore[no-untyped-def]
        use(words, scales, shift, weight, j, firsts, lasts, total)
        if more:
            load(value, scale, words, scales)

    return run_step
