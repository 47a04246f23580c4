"""Formats that look their weights up in a grid: the magnitudes of 4 or 8 consecutive weights by one index.

Formula: w[i] = scale[i // group] * (quant[i] - offset), as in ``unpacker.py``; the offset makes signed values unsigned.
Shapes: those of ``unpacker.py``.
Layouts: ``ggml-common.h`` of llama.cpp.
"""

from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from engine.cpu.products.unpacker import Wide, bits_up
from engine.cpu.simd import F16, I8, I16, I32, Code, Vec
from engine.gguf.grids import IQ1_GRID, IQ2_S_GRID, IQ2_XS_GRID, IQ2_XXS_GRID, IQ3_S_GRID, IQ3_XXS_GRID

_IQ1_TABLE = (8 * IQ1_GRID.astype("i1") + 10).astype("u1")
"""The quants of IQ1_S and IQ1_M with a positive delta: 8 grid + 1 + offset."""


@dataclass(frozen=True)
class Grid:
    """A table of entries, n words of four bytes each, by the name that it has in a program."""

    name: str
    values: np.ndarray
    n: int

    def entries(self, code: Code, index: Vec | list[ir.Value]) -> list[Vec]:
        """The words k of the entries that eight indices choose, for each k: int8 [8 rows][4]; index int32 [8 rows], or
        eight int64."""
        table = code.bytes(self.name, self.values.tobytes())
        each = code.scalars(index) if isinstance(index, Vec) else index
        return [words.view(I8) for words in code.gather(table, each, self.n)]


_IQ2_XXS, _IQ2_XS = Grid("iq2_xxs_grid", IQ2_XXS_GRID, 2), Grid("iq2_xs_grid", IQ2_XS_GRID, 2)
_IQ2_S, _IQ1 = Grid("iq2_s_grid", IQ2_S_GRID, 2), Grid("iq1_grid", _IQ1_TABLE, 2)
_IQ3_XXS, _IQ3_S = Grid("iq3_xxs_grid", IQ3_XXS_GRID, 1), Grid("iq3_s_grid", IQ3_S_GRID, 1)


def _in_fours(code: Code, scales: list[Vec]) -> list[Vec]:
    """Scales of eight groups, int32 [8 rows] each, as kernels take them."""
    narrow = [x.narrow(I8) for x in scales]
    return [code.join(narrow[:4]), code.join(narrow[4:])]


def _even(code: Code, words: Vec) -> Vec:
    """The 8 signs of each of four sets, one set to a byte, from words of four times seven bits, int32 [8 rows]: the eighth
    sign makes the number of set bits even."""
    signs = words & 0x7F | words << 1 & 0x7F00 | words << 2 & 0x7F0000 | words << 3 & 0x7F000000
    return _with_parity(code, signs.view(I8))


def _with_parity(code: Code, signs: Vec) -> Vec:
    """Bytes below 128, whose highest bit is set where the number of set bits is odd."""
    return signs | code.lookup((signs ^ signs.bits(4, 7)) & 15, [128 * (n.bit_count() % 2) for n in range(16)])


def _signed(code: Code, magnitude: Vec, signs: Vec, q: int) -> Vec:
    """Magnitudes of the positions 4 q .. 4 q + 3, negative where bit j of byte l of a row is set for position 8 l + j."""
    own = signs.shuffle([4 * (i // 4) + q // 2 for i in range(32)])
    each = code.constant(I8, [1 << 4 * (q % 2) + c for c in range(4)] * 8)
    return magnitude.select((own & each).is_zero(), -magnitude)


def _negative(magnitude: Vec, signs: Vec, q: int) -> Vec:
    """Magnitudes, negative where the bits of the vector q of 32 positions say so; signs as :func:`bits_up` takes them."""
    return magnitude.select(bits_up(signs, q, 1, 0).is_zero(), -magnitude)


class IQ2_XXS(Wide):
    """Per 32 weights, four grid indices and a word of four 7-bit sign sets and a 4-bit scale s:
    weight = d * (0.5 + s) / 4 * grid = (d / 8) * (2 s + 1) * grid; the eighth sign makes the parity even."""

    group = 32
    largest = 86
    offset = 43

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        words = [self._vector(code, record, 2 * j + 1).view(I32) for j in range(8)]
        return _in_fours(code, [(word >> 28 << 1) + 1 for word in words])

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        signs, found = _even(code, self._vector(code, record, 2 * j + 1).view(I32)), []
        for g in range(4):
            found += _IQ2_XXS.entries(code, self._bytes(code, record, 8 * j + g))
        return [_signed(code, x, signs, q) + self.offset for q, x in enumerate(found)]


class IQ2_XS(Wide):
    """Per 8 weights, 9 bits of a grid index and 7 signs, of which the eighth makes the parity even; per 16, a 4-bit scale s:
    weight = (d / 8) * (2 s + 1) * grid."""

    largest = 86
    offset = 43

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        return [(self._nibbles(code, record, 2 * k) << 1) + 1 for k in range(4)]

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        words = [self._vector(code, record, 2 * j + i).view(I32) for i in range(2)]
        found = []
        for g in range(4):
            found += _IQ2_XS.entries(code, words[g // 2] >> 16 * (g % 2) & 511)
        # The bits 9 .. 15 and 25 .. 31 of both words.
        sets = (words[0] >> 9 & 127, words[0] >> 17 & 0x7F00, words[1] << 7 & 0x7F0000, words[1] >> 1 & 0x7F000000)
        signs = _with_parity(code, (sets[0] | sets[1] | sets[2] | sets[3]).view(I8))
        return [_signed(code, x, signs, q) + self.offset for q, x in enumerate(found)]


class IQ2_S(Wide):
    """Per 8 weights, a grid index of 8 low and 2 high bits, and 8 signs; per 16, a 4-bit scale s:
    weight = (d / 8) * (2 s + 1) * grid."""

    largest = 86
    offset = 43

    scales = IQ2_XS.scales

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        low, signs = self._vector(code, record, j).view(I32), self._vector(code, record, j, "signs")
        high = self._vector(code, record, j // 4, "high").view(I32) >> 8 * (j % 4)
        found = []
        for g in range(4):
            found += _IQ2_S.entries(code, low >> 8 * g & 255 | (high >> 2 * g & 3) << 8)
        return [_negative(x, signs, q) + self.offset for q, x in enumerate(found)]


class IQ3_XXS(Wide):
    """Per 32 weights, eight grid indices, each of 4 weights, and a word of four 7-bit sign sets and a 4-bit scale s:
    weight = (d / 4) * (2 s + 1) * grid; the eighth sign makes the parity even."""

    group = 32
    largest = 124
    offset = 62

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        words = [self._vector(code, record, j, "signs").view(I32) for j in range(8)]
        return _in_fours(code, [(word >> 28 << 1) + 1 for word in words])

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        signs, found = _even(code, self._vector(code, record, j, "signs").view(I32)), []
        for q in range(8):
            (x,) = _IQ3_XXS.entries(code, self._bytes(code, record, 8 * j + q))
            found.append(_signed(code, x, signs, q) + self.offset)
        return found


class IQ3_S(Wide):
    """Per 4 weights, a grid index of 8 low bits and a high one; per 8, 8 signs; per 32, a 4-bit scale s:
    weight = d * (2 s + 1) * grid."""

    group = 32
    largest = 30
    offset = 15

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        return [(self._nibbles(code, record, 2 * k) << 1) + 1 for k in range(2)]

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        low = [self._vector(code, record, 2 * j + i).view(I32) for i in range(2)]
        high, signs = self._vector(code, record, j // 4, "high").view(I32), self._vector(code, record, j, "signs")
        found = []
        for q in range(8):
            index = low[q // 4] >> 8 * (q % 4) & 255 | (high >> 8 * (j % 4) + q & 1) << 8
            x = _IQ3_S.entries(code, index)[0]
            found.append(_negative(x, signs, q) + self.offset)
        return found


class IQ1(Wide):
    """IQ1_S, IQ1_M: per 8 weights, a grid index of 8 low and 3 high bits, and whether delta is 1 or -1:
    weight = (d / 8) * (2 s + 1) * (8 grid + delta), with a 3-bit scale s."""

    largest = 18
    offset = 9

    def _values(self, code: Code, low: Vec, high: list[Vec], negative: list[Vec]) -> list[Vec]:
        """``low``: four bytes of indices; for each of these, ``high``: 3 bits, and ``negative``: 1 where delta is -1."""
        found = []
        for g in range(4):
            less = negative[g] * 0x02020202
            for x in _IQ1.entries(code, low >> 8 * g & 255 | high[g] << 8):
                # No byte is below 2.
                found.append((x.view(I32) - less).view(I8))
        return found


class IQ1_S(IQ1):
    """Per 32 weights, 16 bits: the high bits of the four indices, the scale, and the sign of delta."""

    group = 32

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        return _in_fours(code, [(self._own(code, record, j) >> 11 & 14) + 1 for j in range(8)])

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        own = self._own(code, record, j)
        high, negative = [own >> 3 * g & 7 for g in range(4)], [own >> 15 & 1] * 4
        return self._values(code, self._vector(code, record, j).view(I32), high, negative)

    def _own(self, code: Code, record: ir.Value, j: int) -> Vec:
        """The 16 bits of the positions 32 j .. 32 j + 31, and what is above them."""
        return self._vector(code, record, j // 2, "high").view(I32) >> 16 * (j % 2)


class IQ1_M(IQ1):
    """Per 8 weights, a nibble: the high bits of the index, and the sign of delta.  Four words of 16 bits, of which each has
    four scales and a nibble of d."""

    def d(self, code: Code, record: ir.Value) -> Vec:
        words = [word >> 12 << 4 * k for k, word in enumerate(self._words(code, record))]
        return self._scaled((words[0] | words[1] | words[2] | words[3]).view(F16).to_float())

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        return [
            code.join([((word >> 3 * g & 7) << 1).narrow(I8) + 1 for g in range(4)])
            for word in self._words(code, record)
        ]

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        own = self._vector(code, record, j // 2, "high").view(I32) >> 16 * (j % 2)
        high, negative = [own >> 4 * g & 7 for g in range(4)], [own >> 4 * g + 3 & 1 for g in range(4)]
        return self._values(code, self._vector(code, record, j).view(I32), high, negative)

    def _words(self, code: Code, record: ir.Value) -> list[Vec]:
        """The words of scales, int16 [8 rows] each."""
        planes = [self._planes(code, record, i, 1).unsigned(I16) for i in range(8)]
        return [low | high << 8 for low, high in zip(planes[::2], planes[1::2], strict=True)]
