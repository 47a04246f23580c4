"""From records to tensor-core operands: the only place where the GPU backend knows how a format stores its bits.

Formula: weight[i] = d * w[i] + dm * m[i // 16], as ``engine/gguf/quants.py`` defines it.  ``engine/cpu/products/unpack.py``
    writes w with the scales of the sub-blocks multiplied in; here a lane gets the bare integers q, four to a word, and
    the scales beside them: w[i] = scale[i // group] * (q[i] - offset), so that q fits the int8 of ``mma32`` and the
    scales multiply its sums.
Shapes: a record of ``engine/cuda/products/repack.py``; lane 4 g + t of a warp works for rows g and g + 8.
Everything here is integer arithmetic, exact in any order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as T
from numba import cuda, njit

from engine.cpu.products.unpack import IQ2_XXS_GRID
from engine.cuda.intrinsics import SIMULATED, bits_float, half_to_float, pick_bytes, stream1, stream2, stream4
from engine.cuda.runtime.kinds import DeviceFunction

f32 = np.float32
i32 = np.int32
u16 = np.uint16
u32 = np.uint32

GRID = np.ascontiguousarray(IQ2_XXS_GRID).view(np.uint32)
"""The IQ2_XXS grid, two words per entry."""


def device(function: DeviceFunction) -> DeviceFunction:
    """Compile a function for kernels to call that loads or exchanges data."""
    return cuda.jit(device=True)(function) if SIMULATED else cuda.jit(device=True, forceinline=True)(function)


@dataclass(frozen=True)
class Unpack:
    """How a lane reads one format.

    group: weights that share a scale (32 or 16; 0: no integer scales).
    offset: what is subtracted from every q by means of the sums of the activations.
    mins: whether the format has minimums.

    pieces: the parts of a record that a lane reads, in this order: (words, offset, owner).  "lane": each lane has its own,
        contiguous with those of the others; "row": the four lanes of a row share them; "pair": two rows share them.
    header(words): whatever is decoded once per record, a tuple.
    block(words, j): q of positions 32 j .. 32 j + 31: the four words a0 .. a3 of ``mma32``.
    scale(header, r, g): int32 scale of group g of row g (r = 0) or g + 8 (r = 1).
    sums(header, r): four words of 16 bytes (group 16) or two of 8 (group 32): the factors of the sums of the activations,
        which are the minimums, or the scales if there is an offset.
    factors(words): d of the two rows, then dm of the two (0 if the format has none).
    """

    group: int
    offset: int
    mins: bool
    pieces: tuple[tuple[int, int, str], ...]
    header: DeviceFunction
    block: DeviceFunction
    scale: DeviceFunction
    sums: DeviceFunction
    factors: DeviceFunction

    @property
    def words(self) -> int:
        """The number of words of a record that a lane reads."""
        return sum(n for n, _, _ in self.pieces)

    def make_load(self, streams: Mapping[int, DeviceFunction] | None = None) -> DeviceFunction:
        """The device function load(record, lane, words): start loading the lane's words into registers; streams: loads of 1,
        2 and 4 words to use instead of those from memory."""
        streams = streams or {1: stream1, 2: stream2, 4: stream4}
        move = {n: _make_move(n, stream) for n, stream in streams.items()}
        return _make_load(self.pieces, 0, move)


_SHIFTS = {"lane": 0, "row": 2, "pair": 3}


def _make_move(n: int, stream: DeviceFunction) -> DeviceFunction:
    """The device function move(p, i, words, k): start loading n words from p[i] into words[k]."""

    @device
    def move(p, i, words, k):  # type: ignore[no-untyped-def]
        loaded = stream(p, i)
        for e in range(n):
            words[k + e] = loaded[e]

    @device
    def move_one(p, i, words, k):  # type: ignore[no-untyped-def]
        words[k] = stream(p, i)

    return move_one if n == 1 else move


def _make_load(
    pieces: tuple[tuple[int, int, str], ...], before: int, move: Mapping[int, DeviceFunction]
) -> DeviceFunction:
    """The device function load(record, lane, words) for pieces of a record, after ``before`` words of others."""
    (n, start, whose), *others = pieces
    of_first, shift = move[n], _SHIFTS[whose]

    @device
    def load_last(p, lane, words):  # type: ignore[no-untyped-def]
        of_first(p, start + n * (lane >> shift), words, before)

    if not others:
        return load_last
    rest = _make_load(tuple(others), before + n, move)

    @device
    def load(p, lane, words):  # type: ignore[no-untyped-def]
        of_first(p, start + n * (lane >> shift), words, before)
        rest(p, lane, words)

    return load


# --- small pieces ----------------------------------------------------------------------------------------------


@njit
def low_half(w):  # type: ignore[no-untyped-def]
    """The float16 in the low 16 bits of a word."""
    return half_to_float(u16(w & u32(0xFFFF)))


@njit
def high_half(w):  # type: ignore[no-untyped-def]
    """The float16 in the high 16 bits of a word."""
    return half_to_float(u16(w >> u32(16)))


@njit
def unsigned_byte(w, k):  # type: ignore[no-untyped-def]
    """Byte k of a word."""
    return i32((w >> u32(8 * k)) & u32(255))


@njit
def signed_byte(w, k):  # type: ignore[no-untyped-def]
    """Byte k of a word, as int8."""
    return i32(i32(u32(w << u32(24 - 8 * k))) >> i32(24))


@njit
def nibbles(w, shift):  # type: ignore[no-untyped-def]
    """Four nibbles, one from each byte."""
    return u32((w >> u32(shift)) & u32(0x0F0F0F0F))


@njit
def minus(w, k):  # type: ignore[no-untyped-def]
    """Four bytes below 128, less k each (k as four bytes), as int8: bit 7 is set first, so no byte borrows from the next."""
    return u32(u32((w | u32(0x80808080)) - u32(k)) ^ u32(0x80808080))


@njit
def spread(bits):  # type: ignore[no-untyped-def]
    """Move bits 0 .. 3 to the lowest bits of bytes 0 .. 3: the product makes copies 7 bits apart, which do not overlap."""
    return u32(u32((bits & u32(15)) * u32(0x00204081)) & u32(0x01010101))


@njit
def no_header(words):  # type: ignore[no-untyped-def]
    return words


@njit
def no_scale(header, r, g):  # type: ignore[no-untyped-def]
    return i32(1)


@njit
def no_sums(header, r):  # type: ignore[no-untyped-def]
    return u32(0), u32(0), u32(0), u32(0)


@njit
def _halves(w):  # type: ignore[no-untyped-def]
    """The factors of a format with one float16 per row: both rows' in one word."""
    return low_half(w), high_half(w), f32(0.0), f32(0.0)


# --- 32-wide formats: a record is 16 rows of 32 weights --------------------------------------------------------


def _q4_0() -> Unpack:
    @njit
    def block(w, j):  # type: ignore[no-untyped-def]
        return (
            minus(nibbles(w[0], 0), 0x08080808),
            minus(nibbles(w[1], 0), 0x08080808),
            minus(nibbles(w[0], 4), 0x08080808),
            minus(nibbles(w[1], 4), 0x08080808),
        )

    @njit
    def factors(w):  # type: ignore[no-untyped-def]
        return _halves(w[2])

    return Unpack(0, 0, False, ((2, 0, "lane"), (1, 64, "row")), no_header, block, no_scale, no_sums, factors)


def _q4_1() -> Unpack:
    @njit
    def block(w, j):  # type: ignore[no-untyped-def]
        return nibbles(w[0], 0), nibbles(w[1], 0), nibbles(w[0], 4), nibbles(w[1], 4)

    @njit
    def factors(w):  # type: ignore[no-untyped-def]
        return low_half(w[2]), low_half(w[3]), high_half(w[2]), high_half(w[3])

    return Unpack(0, 0, True, ((2, 0, "lane"), (2, 64, "row")), no_header, block, no_scale, no_sums, factors)


@device
def _fifth_bits(q, h, shift, first):  # type: ignore[no-untyped-def]
    """Four nibbles of q with bits of h as their fifth bits: those of the lane's positions, from ``first`` + 4 t on."""
    t = u32(cuda.threadIdx.x & 3)
    bits = spread(u32(h >> u32(u32(first) + u32(4) * t)))
    return u32(nibbles(q, shift) | u32(bits << u32(4)))


def _q5_0() -> Unpack:
    @device
    def block(w, j):  # type: ignore[no-untyped-def]
        return (
            minus(_fifth_bits(w[0], w[2], 0, 0), 0x10101010),
            minus(_fifth_bits(w[1], w[3], 0, 0), 0x10101010),
            minus(_fifth_bits(w[0], w[2], 4, 16), 0x10101010),
            minus(_fifth_bits(w[1], w[3], 4, 16), 0x10101010),
        )

    @njit
    def factors(w):  # type: ignore[no-untyped-def]
        return _halves(w[4])

    pieces = ((2, 0, "lane"), (2, 64, "row"), (1, 80, "row"))
    return Unpack(0, 0, False, pieces, no_header, block, no_scale, no_sums, factors)


def _q5_1() -> Unpack:
    @device
    def block(w, j):  # type: ignore[no-untyped-def]
        return (
            _fifth_bits(w[0], w[2], 0, 0),
            _fifth_bits(w[1], w[3], 0, 0),
            _fifth_bits(w[0], w[2], 4, 16),
            _fifth_bits(w[1], w[3], 4, 16),
        )

    @njit
    def factors(w):  # type: ignore[no-untyped-def]
        return low_half(w[4]), low_half(w[5]), high_half(w[4]), high_half(w[5])

    pieces = ((2, 0, "lane"), (2, 64, "row"), (2, 80, "row"))
    return Unpack(0, 0, True, pieces, no_header, block, no_scale, no_sums, factors)


def _q8_0() -> Unpack:
    @njit
    def block(w, j):  # type: ignore[no-untyped-def]
        return w[0], w[1], w[2], w[3]

    @njit
    def factors(w):  # type: ignore[no-untyped-def]
        return _halves(w[4])

    return Unpack(0, 0, False, ((4, 0, "lane"), (1, 128, "row")), no_header, block, no_scale, no_sums, factors)


def _words(values: list[int]) -> tuple[np.uint32, ...]:
    return tuple(np.array(values, np.int8).view(np.uint32))


def _table(values: list[int]) -> tuple[DeviceFunction, DeviceFunction]:
    """Two functions that look nibbles up in a table of 16 signed bytes: the low and the high nibbles of a word."""
    t0, t1, t2, t3 = (u32(w) for w in _words(values))

    @njit
    def four(q):  # type: ignore[no-untyped-def]
        """The entries of the four lowest nibbles: both halves of the table are looked up, bit 3 chooses between them."""
        index = u32(q & u32(0x7777))
        upper = u32(u32(0x3210) | u32(u32(q & u32(0x8888)) >> u32(1)))
        return pick_bytes(pick_bytes(t0, t1, index), pick_bytes(t2, t3, index), upper)

    @njit
    def low(q):  # type: ignore[no-untyped-def]
        return pick_bytes(four(q), four(u32(q >> u32(16))), u32(0x6420))

    @njit
    def high(q):  # type: ignore[no-untyped-def]
        return pick_bytes(four(q), four(u32(q >> u32(16))), u32(0x7531))

    return low, high


_IQ4_VALUES = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
_FP4_VALUES = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


def _iq4_nl() -> Unpack:
    low, high = _table(_IQ4_VALUES)
    plain = _q4_0()

    @njit
    def block(w, j):  # type: ignore[no-untyped-def]
        return low(w[0]), low(w[1]), high(w[0]), high(w[1])

    return Unpack(0, 0, False, plain.pieces, no_header, block, no_scale, no_sums, plain.factors)


def _mxfp4() -> Unpack:
    low, high = _table(_FP4_VALUES)

    @njit
    def block(w, j):  # type: ignore[no-untyped-def]
        return low(w[0]), low(w[1]), high(w[0]), high(w[1])

    @njit
    def power(e):  # type: ignore[no-untyped-def]
        """2**(e - 128), subnormal below e = 2."""
        bits = i32(0x00200000) << e if e < i32(2) else (e - i32(1)) << i32(23)
        return bits_float(i32(bits))

    @device
    def factors(w):  # type: ignore[no-untyped-def]
        # The word holds the exponents of rows g, g + 8, g + 1, g + 9 of an even g.
        both = u32(w[2] >> u32(u32(16) * u32((cuda.threadIdx.x >> 2) & 1)))
        return power(unsigned_byte(both, 0)), power(unsigned_byte(both, 1)), f32(0.0), f32(0.0)

    return Unpack(0, 0, False, ((2, 0, "lane"), (1, 64, "pair")), no_header, block, no_scale, no_sums, factors)


# --- 256-wide formats: a record is 16 rows of eight 32-blocks --------------------------------------------------


@njit
def scale_min(h1, h2, h3):  # type: ignore[no-untyped-def]
    """Eight 6-bit scales and eight minimums of Q4_K and Q5_K, a byte each, from the three packed words."""
    low, six, high = u32(0x0F0F0F0F), u32(0x3F3F3F3F), u32(0x30303030)
    return (
        u32(h1 & six),
        u32((h3 & low) | ((h1 >> u32(2)) & high)),
        u32(h2 & six),
        u32(((h3 >> u32(4)) & low) | ((h2 >> u32(2)) & high)),
    )


def _k_functions(
    block: DeviceFunction, at: int
) -> tuple[DeviceFunction, DeviceFunction, DeviceFunction, DeviceFunction, DeviceFunction]:
    """header, block, scale, sums, factors of Q4_K and Q5_K, whose d, dmin and scales of both rows are the words from ``at``
    on."""

    @njit
    def header(w):  # type: ignore[no-untyped-def]
        a = scale_min(w[at + 1], w[at + 2], w[at + 3])
        b = scale_min(w[at + 5], w[at + 6], w[at + 7])
        return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]

    @njit
    def scale(h, r, g):  # type: ignore[no-untyped-def]
        return unsigned_byte(h[4 * r + g // 4], g % 4)

    @njit
    def sums(h, r):  # type: ignore[no-untyped-def]
        return h[4 * r + 2], h[4 * r + 3], u32(0), u32(0)

    @njit
    def factors(w):  # type: ignore[no-untyped-def]
        return low_half(w[at]), low_half(w[at + 4]), -high_half(w[at]), -high_half(w[at + 4])

    return header, block, scale, sums, factors


def _vectors(*starts: int) -> tuple[tuple[int, int, str], ...]:
    """Pieces of four words for each lane, at the given offsets."""
    return tuple((4, start, "lane") for start in starts)


def _both_rows(start: int) -> tuple[tuple[int, int, str], ...]:
    """Pieces of 16 bytes of row g, then of row g + 8."""
    return (4, start, "row"), (4, start + 32, "row")


def _q4_k() -> Unpack:
    @njit
    def block(w, j):  # type: ignore[no-untyped-def]
        k, shift = 4 * (j // 2), 4 * (j % 2)
        return nibbles(w[k], shift), nibbles(w[k + 1], shift), nibbles(w[k + 2], shift), nibbles(w[k + 3], shift)

    return Unpack(32, 0, True, (*_vectors(0, 128, 256, 384), *_both_rows(512)), *_k_functions(block, 16))


def _q5_k() -> Unpack:
    @njit
    def five(q, h, shift, j):  # type: ignore[no-untyped-def]
        return u32(nibbles(q, shift) | u32(u32((h >> u32(j)) & u32(0x01010101)) << u32(4)))

    @njit
    def block(w, j):  # type: ignore[no-untyped-def]
        k, s = 4 * (j // 2), 4 * (j % 2)
        return (
            five(w[k], w[16], s, j),
            five(w[k + 1], w[17], s, j),
            five(w[k + 2], w[18], s, j),
            five(w[k + 3], w[19], s, j),
        )

    return Unpack(32, 0, True, (*_vectors(0, 128, 256, 384, 512), *_both_rows(640)), *_k_functions(block, 20))


def _q6_k() -> Unpack:
    """Words: low bits of positions 0 .. 127 in two vectors, of the rest in two, high bits of each half in one, scales, d."""

    @njit
    def six(low, high, j):  # type: ignore[no-untyped-def]
        two = u32(u32((high >> u32(2 * (j % 4))) & u32(0x03030303)) << u32(4))
        return u32(nibbles(low, 4 * ((j % 4) // 2)) | two)

    @njit
    def block(w, j):  # type: ignore[no-untyped-def]
        k, h = 8 * (j // 4) + 4 * (j % 2), 16 + 4 * (j // 4)
        return six(w[k], w[h], j), six(w[k + 1], w[h + 1], j), six(w[k + 2], w[h + 2], j), six(w[k + 3], w[h + 3], j)

    @njit
    def header(w):  # type: ignore[no-untyped-def]
        return w[24], w[25], w[26], w[27], w[28], w[29], w[30], w[31]

    @njit
    def factors(w):  # type: ignore[no-untyped-def]
        return _halves(w[32])

    pieces = (*_vectors(0, 128, 256, 384, 512, 640), *_both_rows(768), (1, 832, "row"))
    return Unpack(16, 32, False, pieces, header, block, signed_scale, all_sums, factors)


@njit
def signed_scale(h, r, g):  # type: ignore[no-untyped-def]
    """Scales that are int8, 16 per row."""
    return signed_byte(h[4 * r + g // 4], g % 4)


@njit
def all_sums(h, r):  # type: ignore[no-untyped-def]
    """All 16 bytes of a row's header."""
    return h[4 * r], h[4 * r + 1], h[4 * r + 2], h[4 * r + 3]


def _q2_k() -> Unpack:
    @njit
    def two(w, j):  # type: ignore[no-untyped-def]
        return u32((w >> u32(2 * (j % 4))) & u32(0x03030303))

    @njit
    def block(w, j):  # type: ignore[no-untyped-def]
        k = 4 * (j // 4)
        return two(w[k], j), two(w[k + 1], j), two(w[k + 2], j), two(w[k + 3], j)

    @njit
    def header(w):  # type: ignore[no-untyped-def]
        return w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15]

    @njit
    def scale(h, r, g):  # type: ignore[no-untyped-def]
        return i32(unsigned_byte(h[4 * r + g // 4], g % 4) & i32(15))

    @njit
    def sums(h, r):  # type: ignore[no-untyped-def]
        return nibbles(h[4 * r], 4), nibbles(h[4 * r + 1], 4), nibbles(h[4 * r + 2], 4), nibbles(h[4 * r + 3], 4)

    @njit
    def factors(w):  # type: ignore[no-untyped-def]
        return low_half(w[16]), low_half(w[17]), -high_half(w[16]), -high_half(w[17])

    pieces = (*_vectors(0, 128), *_both_rows(256), (2, 320, "row"))
    return Unpack(16, 0, True, pieces, header, block, scale, sums, factors)


def _q3_k() -> Unpack:
    """Words: low bits of positions 0 .. 127, those of the rest, all high bits, thrice a word of scales of both rows, d."""

    @njit
    def three(low, high, j):  # type: ignore[no-untyped-def]
        top = u32(u32((high >> u32(j)) & u32(0x01010101)) << u32(2))
        return u32(u32((low >> u32(2 * (j % 4))) & u32(0x03030303)) | top)

    @njit
    def block(w, j):  # type: ignore[no-untyped-def]
        k = 4 * (j // 4)
        return three(w[k], w[8], j), three(w[k + 1], w[9], j), three(w[k + 2], w[10], j), three(w[k + 3], w[11], j)

    @njit
    def six(w, r, g):  # type: ignore[no-untyped-def]
        """Scales 4 g .. 4 g + 3, less 32 each: the low four bits from the first two words of a row, the high two
        from the third."""
        low = nibbles(w[12 + 2 * (g % 2) + r], 4 * (g // 2))
        high = u32(u32((w[16 + r] >> u32(2 * g)) & u32(0x03030303)) << u32(4))
        return minus(u32(low | high), 0x20202020)

    @njit
    def header(w):  # type: ignore[no-untyped-def]
        return (
            *(six(w, 0, 0), six(w, 0, 1), six(w, 0, 2), six(w, 0, 3)),
            *(six(w, 1, 0), six(w, 1, 1), six(w, 1, 2), six(w, 1, 3)),
        )

    @njit
    def factors(w):  # type: ignore[no-untyped-def]
        return _halves(w[18])

    pieces = (*_vectors(128, 256, 0), (2, 384, "row"), (2, 400, "row"), (2, 416, "row"), (1, 432, "row"))
    return Unpack(16, 4, False, pieces, header, block, signed_scale, all_sums, factors)


def _iq4_xs() -> Unpack:
    low, high = _table(_IQ4_VALUES)

    @njit
    def block(w, j):  # type: ignore[no-untyped-def]
        k = 4 * (j // 2) + 2 * (j % 2)
        return low(w[k]), low(w[k + 1]), high(w[k]), high(w[k + 1])

    @njit
    def header(w):  # type: ignore[no-untyped-def]
        return w[16], w[17], w[18], w[19]

    @njit
    def scale(h, r, g):  # type: ignore[no-untyped-def]
        four = i32((h[1 + 2 * r] >> u32(4 * g)) & u32(15))
        two = i32((h[2 * r] >> u32(16 + 2 * g)) & u32(3))
        return i32((four | two << i32(4)) - i32(32))

    @njit
    def factors(w):  # type: ignore[no-untyped-def]
        return low_half(w[16]), low_half(w[18]), f32(0.0), f32(0.0)

    return Unpack(32, 0, False, (*_vectors(0, 128, 256, 384), (4, 512, "row")), header, block, scale, no_sums, factors)


def _iq2_xxs() -> Unpack:
    """Words: for each pair of blocks, of row g and of row g + 8, twice four grid indices and a word of signs and
    scale; then d."""

    @device
    def signed(index, word, group, half):  # type: ignore[no-untyped-def]
        """Four weights of a group of 8: half 0 or 1 of its grid entry, with its signs."""
        grid = cuda.const.array_like(GRID)
        magnitude = grid[2 * ((index >> u32(8 * group)) & u32(255)) + half]
        signs = u32((word >> u32(7 * group)) & u32(127))
        parity = u32(signs ^ (signs >> u32(4)))
        parity = u32(parity ^ (parity >> u32(2)))
        parity = u32((parity ^ (parity >> u32(1))) & u32(1))
        ones = spread(u32((signs | (parity << u32(7))) >> u32(4 * half)))
        # -x is ~x + 1, and no magnitude is 0, so no byte carries into the next.
        return u32((magnitude ^ u32(ones * u32(255))) + ones)

    @device
    def block(w, j):  # type: ignore[no-untyped-def]
        t = u32(cuda.threadIdx.x & 3)
        half, first = u32(t & u32(1)), u32(t >> u32(1))
        k = 8 * (j // 2) + 2 * (j % 2)
        return (
            signed(w[k], w[k + 1], first, half),
            signed(w[k + 4], w[k + 5], first, half),
            signed(w[k], w[k + 1], u32(first + u32(2)), half),
            signed(w[k + 4], w[k + 5], u32(first + u32(2)), half),
        )

    @njit
    def scale(w, r, g):  # type: ignore[no-untyped-def]
        word = w[8 * (g // 2) + 4 * r + 2 * (g % 2) + 1]
        return i32(i32(2) * i32(word >> u32(28)) + i32(1))

    @njit
    def factors(w):  # type: ignore[no-untyped-def]
        return low_half(w[32]) * f32(0.125), high_half(w[32]) * f32(0.125), f32(0.0), f32(0.0)

    pieces = (*_both_rows(0), *_both_rows(64), *_both_rows(128), *_both_rows(192), (1, 256, "row"))
    return Unpack(32, 0, False, pieces, no_header, block, scale, no_sums, factors)


_FORMATS: dict[T, Callable[[], Unpack]] = {
    T.Q4_0: _q4_0,
    T.Q4_1: _q4_1,
    T.Q5_0: _q5_0,
    T.Q5_1: _q5_1,
    T.Q8_0: _q8_0,
    T.IQ4_NL: _iq4_nl,
    T.MXFP4: _mxfp4,
    T.Q2_K: _q2_k,
    T.Q3_K: _q3_k,
    T.Q4_K: _q4_k,
    T.Q5_K: _q5_k,
    T.Q6_K: _q6_k,
    T.IQ2_XXS: _iq2_xxs,
    T.IQ4_XS: _iq4_xs,
}


def unpack(type_: T) -> Unpack:
    """How lanes read a format; returns new functions at every call, since Numba keeps what it compiled for one target."""
    return _FORMATS[type_]()
