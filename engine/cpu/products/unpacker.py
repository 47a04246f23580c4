"""What all formats have in common when a kernel reads their records: the parts of :class:`Unpack`, and a few operations on
bytes.

Formula: weight[i] = d * w[i] + dm * m[i // 16], as ``engine/gguf/quants.py`` defines it.  Kernels get its parts:
    w[i] = scale[i // group] * (quant[i] - offset), m = minimum, where scales are left out for formats that have none.
Shapes: a pointer to a record (``repack.py``); eight rows are eight lanes.  A vector of quants is int8 [8 rows][4 positions];
    scales and minimums are int8 [4 groups][8 rows].
Everything here but d and dm is integer arithmetic, exact in any order.
"""

from typing import ClassVar

from gguf import GGMLQuantizationType
from llvmlite import ir

from engine.cpu.products.repack import ROWS
from engine.cpu.simd import F16, I8, I16, Code, Vec
from engine.gguf.quants import FORMATS


class Unpack:
    """How a kernel reads records of the format that has the name of the class, one without scales by default.

    name; unit: weights that share d; group: weights that share a scale, 0 where there are no scales.
    signed: whether quants are signed bytes; largest: the largest magnitude of a quant.
    offset: what is subtracted from every quant.
    has_minimum: whether the format has minimums, which formats without scales share with d: m = 1.
    record_bytes: of a unit of eight rows.
    """

    group: ClassVar[int] = 0
    signed: ClassVar[bool] = False
    largest: ClassVar[int] = 15
    offset: ClassVar[int] = 0

    def __init__(self) -> None:
        self.name = type(self).__name__
        entry = FORMATS[GGMLQuantizationType[self.name]]
        self.unit, self.has_minimum = entry.unit, entry.min_max > 0
        self.record_bytes = ROWS * entry.unit_bytes
        self._d_scale = entry.d_scale
        self._places = {}
        at = 0
        for field in entry.fields:
            self._places[field.name] = at
            at += ROWS * field.length // entry.parts

    def d(self, code: Code, record: ir.Value) -> Vec:
        """The factor d of each row, float32 [8]."""
        return self._scaled(code.load(record, self._places["factors"], F16, ROWS).to_float())

    def dm(self, code: Code, record: ir.Value) -> Vec:
        """The factor of the minimum of each row, float32 [8]; only if ``has_minimum``."""
        return code.load(record, self._places["factors"] + 2 * ROWS, F16, ROWS).to_float()

    def scales(self, code: Code, record: ir.Value) -> list[Vec]:
        """The scales, signed, four groups a vector; only if ``group`` is not 0."""
        raise NotImplementedError

    def minimums(self, code: Code, record: ir.Value) -> list[Vec]:
        """The minimums, four groups a vector; only if ``has_minimum`` and ``group`` is not 0."""
        raise NotImplementedError

    def quants(self, code: Code, record: ir.Value, j: int, bias: int = 0) -> list[Vec]:
        """The eight vectors of the positions 32 j .. 32 j + 31, four of a unit of 16.  ``bias`` is added to signed quants."""
        raise NotImplementedError

    def _bytes(self, code: Code, record: ir.Value, i: int) -> list[ir.Value]:
        """Byte i of the quants of each row, int64, where pieces have four bytes.  Indices come from memory faster than from
        the lanes of a vector."""
        return code.load_scalars(record, self._places["quants"] + 32 * (i // 4) + i % 4, I8, 4)

    def _scaled(self, d: Vec) -> Vec:
        """d of the law from the float of a block."""
        return d if self._d_scale == 1 else d * self._d_scale

    def _vector(self, code: Code, record: ir.Value, i: int, field: str = "quants") -> Vec:
        """Vector i of a field whose pieces have four bytes."""
        return code.load(record, self._places[field] + 32 * i)


class Wide(Unpack):
    """A format with units of 256 weights, and scales."""

    group = 16

    def dm(self, code: Code, record: ir.Value) -> Vec:
        return -super().dm(code, record)

    def _planes(self, code: Code, record: ir.Value, first: int, n: int = 4) -> Vec:
        """The bytes of the scales from ``first`` on, n of each row: int8 [n][8 rows]."""
        return code.load(record, self._places["scales"] + ROWS * first, I8, ROWS * n)

    def _nibbles(self, code: Code, record: ir.Value, first: int) -> Vec:
        """The nibbles in two bytes of the scales from ``first`` on, low ones first: int8 [4][8 rows]."""
        planes = self._planes(code, record, first, 2)
        return planes.bits(0, 15).shuffle(_IN_TURN, planes.bits(4, 15))


_IN_TURN = [16 * (i // 8 % 2) + 8 * (i // 16) + i % 8 for i in range(32)]
"""Planes 0 and 1 of two vectors of two planes, in turn."""


def bits_up(x: Vec, shift: int, mask: int, up: int) -> Vec:
    """``((byte >> shift) & mask) << up`` of int8 lanes, in one shift."""
    shift, mask = shift - up, mask << up
    words = x.view(I16)
    moved = words >> shift if shift > 0 else words << -shift if shift < 0 else words
    return moved.view(I8) & mask
