"""Weighted values in place: the parts of ``engine/cuda/attention/direct.py`` that add up values.

Formula, order: ``engine/cpu/attention.py``; shapes: ``engine/cache/types.py``.

A quantized value is scale * n, which is exact, since a scale has 11 significant bits and n has 8.  The byte n + z, z = 8 or
128, becomes bits 8 to 15 of a float32 whose exponent makes it x = 2**15 + z + n.  Then value = fma(x, scale, -(2**15 + z) *
scale): the constant has 13 significant bits, or 9, so its product has at most 24 and is exact, and so is the fma, whose
result is scale * n.  A zero may have the other sign, but no sum shows it: a sum begins at +0, and since a weight is 0 or
above 1.3 * 2**-126 and a value 0 or at least 2**-24, no nonzero product underflows to 0, so no sum is ever -0.
"""

import numpy as np
from numba import cuda

from engine.cache.types import BLOCK, CacheType
from engine.cuda.intrinsics import advance, bits_float, fma, half_to_float, load1, load2, load4, pick_bytes, vector4
from engine.cuda.products.unpack import device, high_half, low_half, nibbles
from engine.cuda.runtime.kinds import DeviceFunction

F = np.float32
I = np.int32  # noqa: E741
U = np.uint32

OWNED = 4
"""Elements of a value that a thread owns."""
STEP = 4
"""Positions of the weighted sum per step if some are hidden."""
ZEROS = {8: 32768 + 128, 4: 32768 + 8}
"""The bits of the float32 into which an integer is inserted."""
UNSIGNED = U(0x80808080)
"""XORed with a word, it makes four int8 unsigned, each plus 128."""


# --- weighted values -------------------------------------------------------------------------------------------


@device
def unpacked(word, e, scale, offset):
    """Byte e of a word of integers n + z, converted to scale * n; offset: -(2**15 + z) * scale."""
    return fma(bits_float(I(pick_bytes(word, U(0x47), U(0x4505 + 16 * e)))), scale, offset)


def make_value_load(of: CacheType, d_v: int, n: int) -> DeviceFunction:
    """The device function ``load(value, scale, first, words, scales)``: load a thread's elements of positions first .. first
    + n - 1, a multiple of ``STEP``, to the same places of words and scales; value, scale: those of position 0."""
    bits, row_words, row_scales = of.bits, d_v * of.bits // 32, d_v // BLOCK

    @device
    def load_one(value, scale, at, words, scales):
        if bits == 32:
            vector = load4(value, at * row_words)
            for k in range(4):
                words[4 * at + k] = vector[k]
        elif bits == 16:
            words[2 * at], words[2 * at + 1] = load2(value, at * row_words)
        else:
            words[at] = load1(value, at * row_words)
            scales[at] = scale[at * row_scales]

    @device
    def load_step(value, scale, first, words, scales):
        # Not a loop, because the compilers of some targets do not unroll it.
        load_one(value, scale, first, words, scales)
        load_one(value, scale, I(first + 1), words, scales)
        load_one(value, scale, I(first + 2), words, scales)
        load_one(value, scale, I(first + 3), words, scales)

    def make(n: int) -> DeviceFunction:
        if n == STEP:
            return load_step
        half = make(n // 2)

        @device
        def load(value, scale, first, words, scales):
            half(value, scale, first, words, scales)
            half(value, scale, I(first + n // 2), words, scales)

        return load

    return make(n)


def make_sum_run(bits: int, served: int, pitch: int, n_bounds: int, masked: bool) -> DeviceFunction:
    """The device function ``run(words, scales, first, shift, weight, j, firsts, lasts, total)``: add positions first .. first
    + 3 of those in registers; j is the position of number 0.

    shift: the bit offset within a byte of a thread's 4-bit integers; weight: p of ``pitch`` pairs, interleaved, a power of
    two; a thread serves the first ``served`` of them; total [4 served]: chains; ``masked``: only positions from firsts[h]
    to before lasts[h] count for pair h.
    """
    one = n_bounds == 1
    zero = F(-ZEROS.get(bits, 0))
    together = max(1, 4 // pitch)
    n_vectors = -(-served // 4) if together == 1 else 1
    n_weights = 4 * n_vectors

    @device
    def use(words, scales, at, shift, p, of_p, j, firsts, lasts, total):
        """Add one position, number ``at``; its weights are p[of_p : of_p + served]."""
        value = cuda.local.array(OWNED, np.float32)
        if bits == 32:
            for e in range(OWNED):
                value[e] = bits_float(I(words[4 * at + e]))
        elif bits == 16:
            for e in range(2):
                value[2 * e] = low_half(words[2 * at + e])
                value[2 * e + 1] = high_half(words[2 * at + e])
        else:
            word = U(words[at] ^ UNSIGNED) if bits == 8 else nibbles(words[at], shift)
            scale = half_to_float(scales[at])
            offset = scale * zero
            for e in range(OWNED):
                value[e] = unpacked(word, e, scale, offset)
        for h in range(served):
            bound = 0 if one else h
            seen = not masked or (j >= firsts[bound] and j < lasts[bound])
            for e in range(OWNED):
                x = fma(p[of_p + h], value[e], total[OWNED * h + e])
                total[OWNED * h + e] = x if seen else total[OWNED * h + e]

    @device
    def use_few(words, scales, at, shift, weight, j, firsts, lasts, total):
        p = cuda.local.array(n_weights, np.float32)
        for v in range(n_vectors):
            vector = vector4(weight, I(at * pitch + 4 * v))
            for k in range(4):
                p[4 * v + k] = bits_float(I(vector[k]))
        for k in range(together):
            use(words, scales, I(at + k), shift, p, k * pitch, I(j + at + k), firsts, lasts, total)

    @device
    def run(words, scales, first, shift, weight, j, firsts, lasts, total):
        use_few(words, scales, first, shift, weight, j, firsts, lasts, total)
        if together < 4:
            use_few(words, scales, I(first + together), shift, weight, j, firsts, lasts, total)
        if together < 2:
            use_few(words, scales, I(first + 2), shift, weight, j, firsts, lasts, total)
            use_few(words, scales, I(first + 3), shift, weight, j, firsts, lasts, total)

    return run


def make_spans(of: CacheType, d_v: int, served: int, pitch: int, n_bounds: int, n: int) -> DeviceFunction:
    """The device function ``run(value, scale, words, scales, first, shift, weight, j, firsts, lasts, more, total)``: add
    positions first .. first + n - 1 of those in registers, and if there are ``more``, replace them by those at value."""
    if n > STEP:
        half = make_spans(of, d_v, served, pitch, n_bounds, n // 2)

        @device
        def run(value, scale, words, scales, first, shift, weight, j, firsts, lasts, more, total):
            half(value, scale, words, scales, first, shift, weight, j, firsts, lasts, more, total)
            further = I(first + n // 2)
            half(value, scale, words, scales, further, shift, weight, j, firsts, lasts, more, total)

        return run

    use, load = make_sum_run(of.bits, served, pitch, n_bounds, False), make_value_load(of, d_v, STEP)

    @device
    def run_step(value, scale, words, scales, first, shift, weight, j, firsts, lasts, more, total):
        use(words, scales, first, shift, weight, j, firsts, lasts, total)
        if more:
            load(value, scale, first, words, scales)

    return run_step


def make_weighted_sum(
    of: CacheType, d_v: int, served: int, pitch: int, n_bounds: int, span: int
) -> tuple[int, DeviceFunction, DeviceFunction]:
    """(words, load, weighted_sum): the registers of ``span`` positions; the device function ``load(value, scale, words,
    scales)``, which loads the first of them; and ``weighted_sum(value, scale, shift, p, begin, end, middle, after, firsts,
    lasts, words, scales, total)``: sums over the positions from begin to before end.  Those from middle to before after,
    whole spans, are visible to all pairs, and the first span is in registers.

    value, scale: a thread's elements of position 0 and their scale; the others as in ``make_sum_run``."""
    n_words, n_total = span * max(1, of.bits // 8), OWNED * served
    n_few = n_words // span * STEP
    row_words, row_scales = d_v * of.bits // 32, d_v // BLOCK
    load_first, load_step = make_value_load(of, d_v, span), make_value_load(of, d_v, STEP)
    full_run = make_spans(of, d_v, served, pitch, n_bounds, span)
    masked_run = make_sum_run(of.bits, served, pitch, n_bounds, True)

    @device
    def load_span(value, scale, words, scales):
        load_first(value, scale, I(0), words, scales)

    @device
    def weighted_sum(value, scale, shift, p, begin, end, middle, after, firsts, lasts, words, scales, total):
        few = cuda.local.array(n_few, np.uint32)
        few_scales = cuda.local.array(STEP, np.uint16)
        for k in range(n_total):
            total[k] = F(0.0)
        j = I(begin & ~(STEP - 1))
        while j < end:
            weight = advance(p, I(j * pitch))
            if j >= middle and j < after:
                following = I(j + span)
                value_after, scale_after = (
                    advance(value, I(following * row_words)),
                    advance(scale, I(following * row_scales)),
                )
                more = following < after
                full_run(value_after, scale_after, words, scales, I(0), shift, weight, j, firsts, lasts, more, total)
                j = following
            else:
                load_step(advance(value, I(j * row_words)), advance(scale, I(j * row_scales)), I(0), few, few_scales)
                masked_run(few, few_scales, I(0), shift, weight, j, firsts, lasts, total)
                j = I(j + STEP)

    return n_words, load_span, weighted_sum
