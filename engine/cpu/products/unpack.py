"""From records of eight rows to integers: the only place where the CPU backend knows how a format stores its bits.

Formula: weight[i] = d * w[i] + dm * m[i // 16], as ``engine/gguf/quants.py`` defines it.
Shapes: those of ``unpacker.py``.
Layouts: ``ggml-common.h`` of llama.cpp.  Formats that look their weights up in a grid are in ``lookup.py``.

To add a format: an entry in ``engine/gguf/quants.py``, a class here, and its name in ``UNPACK``.
"""

from llvmlite import ir

from engine.cpu.products.lookup import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS
from engine.cpu.products.repack import ROWS
from engine.cpu.products.unpacker import Unpack, Wide, bits_up
from engine.cpu.simd import F32, I8, I16, I32, Code, Vec
from engine.gguf.grids import FP4_VALUES, IQ4_VALUES
from engine.gguf.quants import FORMATS


class Nibbles(Unpack):
    """Formats of nibbles: the low ones are the first half of the weights, the high ones the second half."""

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        data = [self._vector(code, record, i) for i in range(self.unit // 8)]
        return [x.bits(shift, 15) for shift in (0, 4) for x in data]


class Q4_0(Nibbles):
    """w = q - 8."""

    offset = 8


class Q4_1(Nibbles):
    """w = q."""


class FifthBits(Nibbles):
    """Q5_0, Q5_1: nibbles, and a word with the fifth bit of every weight."""

    largest = 31

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        high = self._vector(code, record, 0, "high")
        return [x | bits_up(high, q, 1, 4) for q, x in enumerate(super().quants(code, record, j))]


class Q5_0(FifthBits):
    """w = q - 16."""

    offset = 16


class Q5_1(FifthBits):
    """w = q."""


class Q8_0(Unpack):
    """w = q, signed bytes."""

    signed = True
    largest = 128

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        data = [self._vector(code, record, i) for i in range(8)]
        return [x + bias for x in data] if bias else data


class IQ4_NL(Nibbles):
    """Nibbles that index the IQ4 grid."""

    signed = True
    largest = 127

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        values = [value + bias for value in IQ4_VALUES]
        return [code.lookup(x, values) for x in super().quants(code, record, j)]


class Floats4(Nibbles):
    """MXFP4, NVFP4: nibbles that index the e2m1 floats.  As the values are small, the table is made unsigned by an offset."""

    largest = 24
    offset = 12

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        values = [value + self.offset for value in FP4_VALUES]
        return [code.lookup(x, values) for x in super().quants(code, record, j)]


class MXFP4(Floats4):
    """e[1] qs[16]: w = FP4_VALUES[q], d = 2**(e - 128), half of e8m0 because the table holds doubled values (OCP MX,
    2023)."""

    def d(self, code: Code, record: ir.Value) -> Vec:
        e = code.load(record, 0, I8, ROWS).unsigned(I32)
        # e = 0 and 1 are the subnormal numbers 2**-128 and 2**-127.
        tiny = (e << 21) + (1 << 21)
        return tiny.select((e - 2).below_zero(), (e - 1) << 23).view(F32)


class NVFP4(Floats4):
    """A unit, a quarter of a block, is e[1] qs[8]: w = FP4_VALUES[q], d = half of the float e of 4 bits of exponent and 3 of
    mantissa, without a sign; 0x7F counts as 0."""

    def d(self, code: Code, record: ir.Value) -> Vec:
        e = code.load(record, 0, I8, ROWS).unsigned(I32)
        magnitude = e & 0x7F
        # 2**(exponent - 8) times 1 and eighths; with exponent 0, the subnormal numbers, 2**-7 times eighths.
        d = ((magnitude << 20) + (119 << 23)).view(F32)
        d = (magnitude.to_float() * 2.0**-10).select((magnitude - 8).below_zero(), d)
        return code.zeros(F32).select((e ^ 0x7F).is_zero(), d)


class Q1_0(Unpack):
    """d, and a bit for each of 128 weights: w = 2 bit - 1."""

    largest = 2
    offset = 1

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        word = self._vector(code, record, j)
        return [bits_up(word, q, 1, 1) for q in range(8)]


class Q2_0(Unpack):
    """d, and two bits for each of 64 weights, four consecutive ones in a byte: w = q - 1."""

    largest = 3
    offset = 1

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        found = []
        for i in range(8):
            byte = self._vector(code, record, 2 * j + i // 4).view(I32) >> 8 * (i % 4) & 255
            # Byte c of the result is the byte shifted right by 2 c.
            twice = byte | byte << 12
            found.append((twice | twice << 6).view(I8) & 3)
        return found


class TQ2_0(Unpack):
    """Byte l of half h holds the positions 128 h + 32 i + l, two bits each: w = q - 1."""

    largest = 3
    offset = 1

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        return [self._vector(code, record, 8 * (j // 4) + i).bits(2 * (j % 4), 3) for i in range(8)]


class TQ1_0(Unpack):
    """A byte is a fraction of 256 and holds five digits of base 3, the highest first, so that digit n is the integer part of
    3 (3**n byte mod 256) / 256: w = digit - 1.  Of runs of 32, 16 and 4 bytes, the first digits of all bytes come first."""

    largest = 2
    offset = 1

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        if j < 5:
            places = [(i, j) for i in range(8)]
        else:
            # Positions 160 .. 239 are of 16 bytes, 240 .. 255 of the last four.
            places = [(8 + i % 4, 2 * (j - 5) + i // 4) for i in range(8)]
        if j == 7:
            places[4:] = [(12, n) for n in range(4)]
        return [self._digit(code, record, *place) for place in places]

    def _digit(self, code: Code, record: ir.Value, vector: int, n: int) -> Vec:
        x = self._vector(code, record, vector) if vector < 12 else self._vector(code, record, 0, "high")
        # Bytes as the upper halves of int16, where products drop what exceeds a byte.
        even, odd = (((y * 3**n >> 8) * 3) >> 8 for y in (x.view(I16) << 8, x.view(I16) & 0xFF00))
        return (even | odd << 8).view(I8)


class Q2_K(Wide):
    """16 bytes, each a scale and a minimum; byte l of half h holds the positions 128 h + 32 i + l, two bits each."""

    largest = 3

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        return [self._planes(code, record, 4 * k).bits(0, 15) for k in range(4)]

    def minimums(self, code: Code, record: ir.Value) -> list[Vec]:
        return [self._planes(code, record, 4 * k).bits(4, 15) for k in range(4)]

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        return [self._vector(code, record, 8 * (j // 4) + i).bits(2 * (j % 4), 3) for i in range(8)]


class Q3_K(Wide):
    """hmask[32] qs[64]: w = (two low bits, one high bit) - 4; scales of four low and two high bits, minus 32."""

    largest = 7
    offset = 4

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        low, high = [self._planes(code, record, first) for first in (0, 4)], self._planes(code, record, 8)
        return [(low[k % 2].bits(4 * (k // 2), 15) | bits_up(high, 2 * k, 3, 4)) - 32 for k in range(4)]

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        low = [self._vector(code, record, 8 * (j // 4) + i).bits(2 * (j % 4), 3) for i in range(8)]
        return [x | bits_up(self._vector(code, record, i, "high"), j, 1, 2) for i, x in enumerate(low)]


class Q4_K(Wide):
    """A run of 32 bytes holds 64 weights, low nibbles first; eight scales and minimums of 6 bits."""

    group = 32

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        x, z = self._planes(code, record, 0), self._planes(code, record, 8)
        return [x & 63, z & 15 | x.bits(2, 48)]

    def minimums(self, code: Code, record: ir.Value) -> list[Vec]:
        y, z = self._planes(code, record, 4), self._planes(code, record, 8)
        return [y & 63, z.bits(4, 15) | y.bits(2, 48)]

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        return [self._vector(code, record, 8 * (j // 2) + i).bits(4 * (j % 2), 15) for i in range(8)]


class Q5_K(Q4_K):
    """qh[32] qs[128]: the layout of Q4_K, and bit j of qh[i % 32] is the fifth bit."""

    largest = 31

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        low = [self._vector(code, record, 8 * (j // 2) + i).bits(4 * (j % 2), 15) for i in range(8)]
        return [x | bits_up(self._vector(code, record, i, "high"), j, 1, 4) for i, x in enumerate(low)]


class Q6_K(Wide):
    """ql[128] qh[64]: four low and two high bits, w = q - 32; scales are signed bytes."""

    largest = 63
    offset = 32

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        return [self._planes(code, record, 4 * k) for k in range(4)]

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        half, r = j // 4, j % 4
        low = [self._vector(code, record, 16 * half + 8 * (r % 2) + i).bits(4 * (r // 2), 15) for i in range(8)]
        return [x | bits_up(self._vector(code, record, 8 * half + i, "high"), 2 * r, 3, 4) for i, x in enumerate(low)]


class IQ4_XS(Wide):
    """scales_h[2] scales_l[4] qs[128]: eight blocks of 32 of the IQ4 grid, scales of 6 bits minus 32."""

    group = 32
    signed = True
    largest = 127

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        found = []
        for k in range(2):
            nibbles = self._nibbles(code, record, 2 + 2 * k)
            high = self._planes(code, record, k, 1)
            pairs = [bits_up(high, 2 * i, 3, 4) for i in range(4)]
            found.append((nibbles | code.join(pairs)) - 32)
        return found

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        data = [self._vector(code, record, 4 * j + i) for i in range(4)]
        values = [value + bias for value in IQ4_VALUES]
        return [code.lookup(x.bits(shift, 15), values) for shift in (0, 4) for x in data]


_KINDS = (
    *(Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, IQ4_NL, IQ4_XS, MXFP4, IQ2_XS, IQ2_S),
    *(IQ3_XXS, IQ3_S, IQ1_S, IQ1_M, NVFP4, TQ2_0, TQ1_0, Q1_0, Q2_0),
)
UNPACK: dict[str, Unpack] = {
    kind.__name__: kind() for kind in _KINDS if kind.__name__ in {entry.name for entry in FORMATS.values()}
}
"""Every quantized format, by name."""
