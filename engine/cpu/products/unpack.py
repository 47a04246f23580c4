"""From records of eight rows to integers: the only place where the CPU backend knows how a format stores its bits.

Formula: weight[i] = d * w[i] + dm * m[i // 16], as ``engine/gguf/quants.py`` defines it.  Kernels get its parts:
    w[i] = scale[i // group] * (quant[i] - offset), m = minimum, where scales are left out for formats that have none.
Shapes: a pointer to a record (``repack.py``); eight rows are eight lanes.  A vector of quants is int8 [8 rows][4 positions];
    scales and minimums are int8 [4 groups][8 rows].
Layouts: ``ggml-common.h`` of llama.cpp.
Everything here but d and dm is integer arithmetic, exact in any order.

To add a format: a line in ``FIELDS`` of ``repack.py``, a class here, and an entry in ``UNPACK``.
"""

from typing import ClassVar

import numpy as np
from gguf.quants import IQ2_XXS as IQ2_XXS_TABLES
from llvmlite import ir

from engine.cpu.products.repack import FIELDS, ROWS
from engine.cpu.simd import F16, F32, I8, I16, I32, Code, Vec

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The nonlinear 4-bit grid of IQ4_NL and IQ4_XS."""
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The values of the e2m1 floats of MXFP4, doubled so that they are integers."""

IQ2_XXS_TABLES.init_grid()
IQ2_XXS_GRID = np.ascontiguousarray(IQ2_XXS_TABLES.grid.reshape(-1).astype(np.uint8))
"""256 groups of 8 magnitudes, each 8, 25 or 43."""


class Unpack:
    """How a kernel reads records of one format, the 32-wide formats without scales and minimums by default.

    name; unit: weights of a block; group: weights that share a scale, 0 where there are no scales.
    signed: whether quants are signed bytes; largest: the largest magnitude of a quant.
    offset: what is subtracted from every quant.
    has_minimum: whether the format has minimums, which formats without scales share with d: m = 1.
    """

    unit: ClassVar[int] = 32
    group: ClassVar[int] = 0
    signed: ClassVar[bool] = False
    largest: ClassVar[int] = 15
    offset: ClassVar[int] = 0
    has_minimum: ClassVar[bool] = False

    def __init__(self) -> None:
        self.name = type(self).__name__
        self._places = []
        at = 0
        for field in FIELDS[self.name]:
            self._places.append(at)
            at += ROWS * field.length
        self.record_bytes = at

    def d(self, code: Code, record: ir.Value) -> Vec:
        """The factor d of each row, float32 [8]."""
        return code.load(record, 0, F16, ROWS).to_float()

    def dm(self, code: Code, record: ir.Value) -> Vec:
        """The factor of the minimum of each row, float32 [8]; only if ``has_minimum``."""
        return code.load(record, 2 * ROWS, F16, ROWS).to_float()

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        """The scales, signed, four groups a vector; only if ``group`` is not 0."""
        raise NotImplementedError

    def minimums(self, code: Code, record: ir.Value) -> list[Vec]:
        """The minimums, four groups a vector; only if ``has_minimum`` and ``group`` is not 0."""
        raise NotImplementedError

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        """The eight vectors of the positions 32 j .. 32 j + 31.  ``bias`` is added to signed quants."""
        raise NotImplementedError

    def _vector(self, code: Code, record: ir.Value, field: int, i: int) -> Vec:
        """Vector i of a field whose pieces have four bytes."""
        return code.load(record, self._places[field] + 32 * i)


class Nibbles(Unpack):
    """Q4_0, Q4_1: the low nibbles of 16 bytes are the weights 0 .. 15, the high ones 16 .. 31."""

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        data = [self._vector(code, record, len(self._places) - 1, i) for i in range(4)]
        return [x.bits(shift, 15) for shift in (0, 4) for x in data]


class Q4_0(Nibbles):
    """w = q - 8."""

    offset = 8


class Q4_1(Nibbles):
    """w = q."""

    has_minimum = True


class FifthBits(Nibbles):
    """Q5_0, Q5_1: nibbles, and a word with the fifth bit of every weight."""

    largest = 31

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        high = self._vector(code, record, 1, 0)
        return [x | _bits_up(high, q, 1, 4) for q, x in enumerate(super().quants(code, record, j))]


class Q5_0(FifthBits):
    """w = q - 16."""

    offset = 16


class Q5_1(FifthBits):
    """w = q."""

    has_minimum = True


class Q8_0(Unpack):
    """w = q, signed bytes."""

    signed = True
    largest = 128

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        data = [self._vector(code, record, 1, i) for i in range(8)]
        return [x + bias for x in data] if bias else data


class IQ4_NL(Nibbles):
    """Nibbles that index the IQ4 grid."""

    signed = True
    largest = 127

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        values = [value + bias for value in IQ4_VALUES]
        return [code.lookup(x, values) for x in super().quants(code, record, j)]


class MXFP4(Nibbles):
    """e[1] qs[16]: w = FP4_VALUES[q], d = 2**(e - 128), half of e8m0 because the table holds doubled values (OCP MX,
    2023).  As the values are small, the table is made unsigned by an offset."""

    largest = 24
    offset = 12

    def d(self, code: Code, record: ir.Value) -> Vec:
        e = code.load(record, 0, I8, ROWS).unsigned(I32)
        # e = 0 and 1 are the subnormal numbers 2**-128 and 2**-127.
        tiny = (e << 21) + (1 << 21)
        return tiny.select((e - 2).below_zero(), (e - 1) << 23).view(F32)

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        values = [value + self.offset for value in FP4_VALUES]
        return [code.lookup(x, values) for x in super().quants(code, record, j)]


class Wide(Unpack):
    """A format with blocks of 256 weights, and scales."""

    unit = 256
    group = 16

    def dm(self, code: Code, record: ir.Value) -> Vec:
        return -super().dm(code, record)

    def _planes(self, code: Code, record: ir.Value, first: int, n: int = 4) -> Vec:
        """The bytes of the scales from ``first`` on, n of each row: int8 [n][8 rows]."""
        return code.load(record, self._places[1] + ROWS * first, I8, ROWS * n)


class Q2_K(Wide):
    """16 bytes, each a scale and a minimum; byte l of half h holds the positions 128 h + 32 i + l, two bits each."""

    largest = 3
    has_minimum = True

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        return [self._planes(code, record, 4 * k).bits(0, 15) for k in range(4)]

    def minimums(self, code: Code, record: ir.Value) -> list[Vec]:
        return [self._planes(code, record, 4 * k).bits(4, 15) for k in range(4)]

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        return [self._vector(code, record, 2, 8 * (j // 4) + i).bits(2 * (j % 4), 3) for i in range(8)]


class Q3_K(Wide):
    """hmask[32] qs[64]: w = (two low bits, one high bit) - 4; scales of four low and two high bits, minus 32."""

    largest = 7
    offset = 4

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        low, high = [self._planes(code, record, first) for first in (0, 4)], self._planes(code, record, 8)
        return [(low[k % 2].bits(4 * (k // 2), 15) | _bits_up(high, 2 * k, 3, 4)) - 32 for k in range(4)]

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        low = [self._vector(code, record, 2, 8 + 8 * (j // 4) + i).bits(2 * (j % 4), 3) for i in range(8)]
        return [x | _bits_up(self._vector(code, record, 2, i), j, 1, 2) for i, x in enumerate(low)]


class Q4_K(Wide):
    """A run of 32 bytes holds 64 weights, low nibbles first; eight scales and minimums of 6 bits."""

    group = 32
    has_minimum = True

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        x, z = self._planes(code, record, 0), self._planes(code, record, 8)
        return [x & 63, z & 15 | x.bits(2, 48)]

    def minimums(self, code: Code, record: ir.Value) -> list[Vec]:
        y, z = self._planes(code, record, 4), self._planes(code, record, 8)
        return [y & 63, z.bits(4, 15) | y.bits(2, 48)]

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        return [self._vector(code, record, 2, 8 * (j // 2) + i).bits(4 * (j % 2), 15) for i in range(8)]


class Q5_K(Q4_K):
    """qh[32] qs[128]: the layout of Q4_K, and bit j of qh[i % 32] is the fifth bit."""

    largest = 31

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        low = [self._vector(code, record, 2, 8 + 8 * (j // 2) + i).bits(4 * (j % 2), 15) for i in range(8)]
        return [x | _bits_up(self._vector(code, record, 2, i), j, 1, 4) for i, x in enumerate(low)]


class Q6_K(Wide):
    """ql[128] qh[64]: four low and two high bits, w = q - 32; scales are signed bytes."""

    largest = 63
    offset = 32

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        return [self._planes(code, record, 4 * k) for k in range(4)]

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        half, r = j // 4, j % 4
        low = [self._vector(code, record, 2, 16 * half + 8 * (r % 2) + i).bits(4 * (r // 2), 15) for i in range(8)]
        return [x | _bits_up(self._vector(code, record, 2, 32 + 8 * half + i), 2 * r, 3, 4) for i, x in enumerate(low)]


class IQ4_XS(Wide):
    """scales_h[2] scales_l[4] qs[128]: eight blocks of 32 of the IQ4 grid, scales of 6 bits minus 32."""

    group = 32
    signed = True
    largest = 127

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        found = []
        for k in range(2):
            low = self._planes(code, record, 2 + 2 * k, 2)
            nibbles = low.bits(0, 15).shuffle(_PLANES_02, low.bits(4, 15))
            high = self._planes(code, record, k, 1)
            pairs = [_bits_up(high, 2 * i, 3, 4) for i in range(4)]
            found.append((nibbles | code.join(pairs)) - 32)
        return found

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        data = [self._vector(code, record, 2, 4 * j + i) for i in range(4)]
        values = [value + bias for value in IQ4_VALUES]
        return [code.lookup(x.bits(shift, 15), values) for shift in (0, 4) for x in data]


_PLANES_02 = [16 * (i // 8 % 2) + 8 * (i // 16) + i % 8 for i in range(32)]
"""Planes 0 and 1 of two vectors of two planes, in turn."""


class IQ2_XXS(Wide):
    """Per 32 weights, four grid indices and a word of four 7-bit sign sets and a 4-bit scale s:
    weight = d * (0.5 + s) / 4 * grid = (d / 8) * (2 s + 1) * grid; the eighth sign makes the parity even.  An offset makes
    the signed values unsigned."""

    group = 32
    largest = 86
    offset = 43

    def d(self, code: Code, record: ir.Value) -> Vec:
        return super().d(code, record) * 0.125

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        words = [self._vector(code, record, 1, 2 * j + 1).view(I32) for j in range(8)]
        scales = [((word >> 28 << 1) + 1).narrow(I8) for word in words]
        return [code.join(scales[:4]), code.join(scales[4:])]

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        grid = code.bytes("iq2_xxs_grid", IQ2_XXS_GRID.tobytes())
        indices, words = (self._vector(code, record, 1, 2 * j + i).view(I32) for i in range(2))
        each = code.constant(I8, [1, 2, 4, 8] * 8)
        found = []
        for g in range(4):
            place = (indices >> 8 * g & 255) << 3
            signs = words >> 7 * g & 127
            parity = signs ^ signs >> 4
            parity = parity ^ parity >> 2
            parity = (parity ^ parity >> 1) & 1
            signs = signs | parity << 7
            for half in range(2):
                magnitude = code.gather(grid, place + 4 * half).view(I8)
                own = (signs >> 4 * half & 15) * 0x01010101
                positive = (own.view(I8) & each).is_zero()
                found.append(magnitude.select(positive, -magnitude) + self.offset)
        return found


def _bits_up(x: Vec, shift: int, mask: int, up: int) -> Vec:
    """``((byte >> shift) & mask) << up`` of int8 lanes, in one shift."""
    shift, mask = shift - up, mask << up
    words = x.view(I16)
    moved = words >> shift if shift > 0 else words << -shift if shift < 0 else words
    return moved.view(I8) & mask


UNPACK: dict[str, Unpack] = {
    kind.__name__: kind()
    for kind in (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, IQ4_NL, IQ4_XS, MXFP4)
}
"""Every quantized format, by name."""
