"""From packed blocks to integers: the only place where the CPU backend knows how a format stores its bits.

Formula: weight[i] = d * w[i] + dm * m[i // 16], as ``engine/gguf/quants.py`` defines it.
Shapes: ``src`` uint8 [row bytes], block at byte ``o``; ``w`` int16, filled at [j, j + unit); ``m`` int16, one entry per
16 weights, filled at [j // 16, (j + unit) // 16) by formats that have minimums; returns (d, dm) as float32.
Layouts: ``ggml-common.h`` of llama.cpp; the byte offsets are those of a block's fields in declaration order.
"""

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType as T
from gguf.quants import IQ2_XXS as IQ2_XXS_TABLES
from numba import njit

from engine.cpu.intrinsics import (
    bits16,
    bits16_high,
    bits32,
    bits32_high,
    bytes32,
    fp4_16,
    iq4_16,
    nibbles16_word,
    signed8,
)
from engine.numerics import bits_float, half_to_float

f32 = np.float32
i16 = np.int16
i32 = np.int32
u16 = np.uint16

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = int(T.Q4_0), int(T.Q4_1), int(T.Q5_0), int(T.Q5_1), int(T.Q8_0)
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = int(T.Q2_K), int(T.Q3_K), int(T.Q4_K), int(T.Q5_K), int(T.Q6_K)
IQ2_XXS, IQ4_NL, IQ4_XS, MXFP4 = int(T.IQ2_XXS), int(T.IQ4_NL), int(T.IQ4_XS), int(T.MXFP4)

NO_MIN = f32(0.0)


@njit(forceinline=True)
def load16(src, o):  # type: ignore[no-untyped-def]
    """Little-endian uint16 at byte o."""
    return u16(src[o] | (src[o + 1] << 8))


@njit(forceinline=True)
def load32(src, o):  # type: ignore[no-untyped-def]
    """Little-endian 32 bits at byte o, as a non-negative int64."""
    return src[o] | (src[o + 1] << 8) | (src[o + 2] << 16) | (src[o + 3] << 24)


@njit(forceinline=True)
def load_half(src, o):  # type: ignore[no-untyped-def]
    """The float16 at byte o as float32."""
    return half_to_float(load16(src, o))


# --- 32-wide formats -------------------------------------------------------------------------------------------


@njit(forceinline=True)
def unpack_q4_0(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """d[2] qs[16]: low nibbles are weights 0..15, high nibbles 16..31; w = q - 8."""
    bits16(w, j, src, o + 2, 0, 15, -8, 1)
    bits16(w, j + 16, src, o + 2, 4, 15, -8, 1)
    return load_half(src, o), NO_MIN


@njit(forceinline=True)
def unpack_q4_1(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """d[2] m[2] qs[16]: w = q, and the block's minimum times 1."""
    bits16(w, j, src, o + 4, 0, 15, 0, 1)
    bits16(w, j + 16, src, o + 4, 4, 15, 0, 1)
    if not scaled:
        m[j // 16] = i16(1)
        m[j // 16 + 1] = i16(1)
    return load_half(src, o), load_half(src, o + 2)


@njit(forceinline=True)
def unpack_q5_0(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """d[2] qh[4] qs[16]: bit i of qh is the fifth bit of weight i; w = q - 16."""
    high = load32(src, o + 2)
    nibbles16_word(w, j, src, o + 6, 0, high, -16)
    nibbles16_word(w, j + 16, src, o + 6, 4, high >> 16, -16)
    return load_half(src, o), NO_MIN


@njit(forceinline=True)
def unpack_q5_1(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """d[2] m[2] qh[4] qs[16]."""
    high = load32(src, o + 4)
    nibbles16_word(w, j, src, o + 8, 0, high, 0)
    nibbles16_word(w, j + 16, src, o + 8, 4, high >> 16, 0)
    if not scaled:
        m[j // 16] = i16(1)
        m[j // 16 + 1] = i16(1)
    return load_half(src, o), load_half(src, o + 2)


@njit(forceinline=True)
def unpack_q8_0(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """d[2] qs[32] int8."""
    bytes32(w, j, src, o + 2)
    return load_half(src, o), NO_MIN


@njit(forceinline=True)
def unpack_iq4_nl(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """d[2] qs[16]: nibbles index the IQ4 grid."""
    iq4_16(w, j, src, o + 2, 0, 1)
    iq4_16(w, j + 16, src, o + 2, 4, 1)
    return load_half(src, o), NO_MIN


@njit(forceinline=True)
def unpack_mxfp4(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """e[1] qs[16]: d = 2**(e - 128), half of e8m0 because the table holds doubled values (OCP MX, 2023)."""
    fp4_16(w, j, src, o + 1, 0, 1)
    fp4_16(w, j + 16, src, o + 1, 4, 1)
    e = i32(src[o])
    if e < 2:
        bits = i32(0x00200000) << e
    else:
        bits = (e - i32(1)) << i32(23)
    return bits_float(i32(bits)), NO_MIN


# --- 256-wide formats ------------------------------------------------------------------------------------------


@njit(forceinline=True)
def unpack_q2_k(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """scales[16] qs[64] d[2] dmin[2]: groups of 16; scale and minimum are the two nibbles of a byte."""
    for g in range(16):
        scale = src[o + g]
        bits16(w, j + 16 * g, src, o + 16 + 32 * (g // 8) + 16 * (g % 2), 2 * ((g % 8) // 2), 3, 0, scale & 15)
        m[j // 16 + g] = i16(scale >> 4)
    return load_half(src, o + 80), -load_half(src, o + 82)


@njit(forceinline=True)
def unpack_q3_k(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """hmask[32] qs[64] scales[12] d[2]: w = (2 low bits, 1 high bit) - 4 times a 6-bit scale - 32."""
    for g in range(16):
        low = src[o + 96 + g % 8] >> (4 * (g // 8)) & 15
        high = src[o + 104 + g % 4] >> (2 * (g // 4)) & 3
        scale = (low | high << 4) - 32
        at = o + 32 + 32 * (g // 8) + 16 * (g % 2)
        m[j // 16 + g] = i16(scale)
        mul = scale if scaled else 1
        bits16_high(w, j + 16 * g, src, at, 2 * ((g % 8) // 2), 3, o + 16 * (g % 2), g // 2, 1, 2, -4, mul)
    return load_half(src, o + 108), NO_MIN


@njit(forceinline=True)
def scale_min(src, o, b):  # type: ignore[no-untyped-def]
    """The 6-bit scale and minimum of sub-block b from the 12 packed bytes at o (Q4_K and Q5_K)."""
    if b < 4:
        return src[o + b] & 63, src[o + b + 4] & 63
    scale = (src[o + b + 4] & 15) | (src[o + b - 4] >> 6) << 4
    minimum = (src[o + b + 4] >> 4) | (src[o + b] >> 6) << 4
    return scale, minimum


@njit(forceinline=True)
def unpack_q4_k(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """d[2] dmin[2] scales[12] qs[128]: a run of 32 bytes holds 64 weights, low nibbles first."""
    for b in range(8):
        scale, minimum = scale_min(src, o + 4, b)
        bits32(w, j + 32 * b, src, o + 16 + 32 * (b // 2), 4 * (b % 2), 15, 0, scale)
        m[j // 16 + 2 * b] = i16(minimum)
        m[j // 16 + 2 * b + 1] = i16(minimum)
    return load_half(src, o), -load_half(src, o + 2)


@njit(forceinline=True)
def unpack_q5_k(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """d[2] dmin[2] scales[12] qh[32] qs[128]: the layout of Q4_K, and bit b of qh[i % 32] is the fifth bit."""
    for b in range(8):
        scale, minimum = scale_min(src, o + 4, b)
        bits32_high(w, j + 32 * b, src, o + 48 + 32 * (b // 2), 4 * (b % 2), 15, o + 16, b, 1, 4, 0, scale)
        m[j // 16 + 2 * b] = i16(minimum)
        m[j // 16 + 2 * b + 1] = i16(minimum)
    return load_half(src, o), -load_half(src, o + 2)


@njit(forceinline=True)
def unpack_q6_k(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """ql[128] qh[64] scales[16] int8 d[2]: 4 low and 2 high bits, w = (q - 32) * scale."""
    for g in range(16):
        half, r = g // 8, g % 8
        low = o + 64 * half + 16 * (r % 4)
        high = o + 128 + 32 * half + 16 * (r % 2)
        scale = i32(src[o + 192 + g])
        scale = scale - 256 if scale > 127 else scale
        m[j // 16 + g] = i16(scale)
        mul = scale if scaled else i32(1)
        bits16_high(w, j + 16 * g, src, low, 4 * (r // 4), 15, high, 2 * (r // 2), 3, 4, -32, mul)
    return load_half(src, o + 208), NO_MIN


@njit(forceinline=True)
def unpack_iq4_xs(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """d[2] scales_h[2] scales_l[4] qs[128]: eight 32-blocks of the IQ4 grid with 6-bit scales - 32."""
    high = load16(src, o + 2)
    for b in range(8):
        low = src[o + 4 + b // 2] >> (4 * (b % 2)) & 15
        scale = (low | (high >> (2 * b) & 3) << 4) - 32
        m[j // 16 + 2 * b] = i16(scale)
        m[j // 16 + 2 * b + 1] = i16(scale)
        mul = scale if scaled else 1
        iq4_16(w, j + 32 * b, src, o + 8 + 16 * b, 0, mul)
        iq4_16(w, j + 32 * b + 16, src, o + 8 + 16 * b, 4, mul)
    return load_half(src, o), NO_MIN


IQ2_XXS_TABLES.init_grid()
IQ2_XXS_GRID = np.ascontiguousarray(IQ2_XXS_TABLES.grid.reshape(-1).astype(np.uint8))
"""256 groups of 8 magnitudes, each 8, 25 or 43."""


@njit(forceinline=True)
def unpack_iq2_xxs(src, o, w, j, m, scaled):  # type: ignore[no-untyped-def]
    """d[2] then, per 32 weights, four grid indices and a word of four 7-bit sign sets and a 4-bit scale s:
    weight = d * (0.5 + s) / 4 * grid = (d / 8) * (2s + 1) * grid; the eighth sign makes the parity even."""
    for b in range(8):
        at = o + 2 + 8 * b
        word = load32(src, at + 4)
        scale = 2 * (word >> 28) + 1
        for g in range(4):
            signs = (word >> (7 * g)) & 127
            parity = signs ^ (signs >> 4)
            parity = parity ^ (parity >> 2)
            parity = (parity ^ (parity >> 1)) & 1
            signed8(w, j + 32 * b + 8 * g, IQ2_XXS_GRID, 8 * i32(src[at + g]), signs | parity << 7, scale)
    return load_half(src, o) * f32(0.125), NO_MIN


# --- rows ------------------------------------------------------------------------------------------------------


def _row(unpack_block: Callable[..., None], unit: int, block_bytes: int) -> Callable[..., None]:
    """The loop over a row's blocks, with the format's function inlined."""

    @njit
    def unpack_row(src, w, j, m, d, dm, k, step, units, scaled):  # type: ignore[no-untyped-def]
        for u in range(units):
            at = k + u * step
            d[at], dm[at] = unpack_block(src, u * block_bytes, w, j + u * unit, m, scaled)

    return unpack_row


_q4_0, _q4_1, _q5_0 = _row(unpack_q4_0, 32, 18), _row(unpack_q4_1, 32, 20), _row(unpack_q5_0, 32, 22)
_q5_1, _q8_0, _q2_k = _row(unpack_q5_1, 32, 24), _row(unpack_q8_0, 32, 34), _row(unpack_q2_k, 256, 84)
_q3_k, _q4_k, _q5_k = _row(unpack_q3_k, 256, 110), _row(unpack_q4_k, 256, 144), _row(unpack_q5_k, 256, 176)
_q6_k, _iq2_xxs = _row(unpack_q6_k, 256, 210), _row(unpack_iq2_xxs, 256, 66)
_iq4_nl, _iq4_xs, _mxfp4 = _row(unpack_iq4_nl, 32, 18), _row(unpack_iq4_xs, 256, 136), _row(unpack_mxfp4, 32, 17)


@njit(cache=True)
def unpack_row(fmt, src, w, j, m, d, dm, k, step, units, scaled):  # type: ignore[no-untyped-def]
    """Unpack a row src uint8 of ``units`` blocks of format ``fmt`` (a GGUF type id) into w at j, m at j // 16, d and dm
    at k, k + step, ...

    With ``scaled`` False the formats that have signed scales and no minimum (Q3_K, Q6_K, IQ4_XS) leave their scales
    out of ``w`` and store them in ``m``: a float product of the three then also has the sign of zero that GGUF
    specifies.  Q4_1 and Q5_1, whose m is always 1, write it only then.
    """
    if fmt == Q4_K:
        _q4_k(src, w, j, m, d, dm, k, step, units, scaled)
    elif fmt == Q6_K:
        _q6_k(src, w, j, m, d, dm, k, step, units, scaled)
    elif fmt == Q8_0:
        _q8_0(src, w, j, m, d, dm, k, step, units, scaled)
    elif fmt == Q4_0:
        _q4_0(src, w, j, m, d, dm, k, step, units, scaled)
    elif fmt == Q4_1:
        _q4_1(src, w, j, m, d, dm, k, step, units, scaled)
    elif fmt == Q5_0:
        _q5_0(src, w, j, m, d, dm, k, step, units, scaled)
    elif fmt == Q5_1:
        _q5_1(src, w, j, m, d, dm, k, step, units, scaled)
    elif fmt == Q5_K:
        _q5_k(src, w, j, m, d, dm, k, step, units, scaled)
    elif fmt == Q3_K:
        _q3_k(src, w, j, m, d, dm, k, step, units, scaled)
    elif fmt == Q2_K:
        _q2_k(src, w, j, m, d, dm, k, step, units, scaled)
    elif fmt == IQ4_XS:
        _iq4_xs(src, w, j, m, d, dm, k, step, units, scaled)
    elif fmt == IQ4_NL:
        _iq4_nl(src, w, j, m, d, dm, k, step, units, scaled)
    elif fmt == IQ2_XXS:
        _iq2_xxs(src, w, j, m, d, dm, k, step, units, scaled)
    else:
        _mxfp4(src, w, j, m, d, dm, k, step, units, scaled)
