"""Matrix products of quantized weights: integer dots of a unit, floats once per unit, eight weight rows in eight lanes.

Formula: out[t, r] = sum_k weight[r, k] * x[t, k] (+ residual[t, r]).
Shapes: records uint8 [groups, units * record bytes] (``repack.py``); activations q int8 [n, K], da float32 [n, U], s int16
    [n, K / 16] (``quantize.py``); residual float32 [n, R], or [0, R] for none; out float32 [n, R].
Who owns what: an item is a group of eight weight rows, for all activation rows.
Reduction order: units u = 0 .. U-1; chain c owns units [c L, (c+1) L), L = ceil(U / 8);
    chain_c = fma(da_u, value_u, ... fma(da_first, value_first, 0)),  value_u = fma(dm_u, M_u, d_u * I_u)
    (value_u = d_u * I_u where the format has no minimum);
    total = ((((chain_0 + chain_1) + chain_2) + ...) + chain_7);  out = residual + total.
Bytes moved: each record once from memory; n K bytes of activations from the cache per group.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.compile.family import family
from engine.cpu.products.law import Law, Row, Step, chains, words_of
from engine.cpu.products.repack import ROWS
from engine.cpu.products.unpack import UNPACK
from engine.cpu.simd import F32, I8, I16, I32, I64, Code, Vec, data_of

i64 = np.int64
u8 = np.uint8

AHEAD = 16384
"""How far ahead records are prefetched for few activation rows, in bytes.  Formats whose quants take long to unpack would
otherwise leave memory idle meanwhile."""
FEW = 4
"""The most activation rows of :func:`matmul_few`."""
SOME = 16
"""The most activation rows of :func:`matmul_some`: for more, it is faster to unpack quants into memory."""
TILE = 8
"""The activation rows that :func:`matmul_some` takes at a time."""


@dataclass(frozen=True)
class Item:
    """A group of eight weight rows and the activation rows that it is multiplied by: pointers, and int64 values.

    records; q, da and s, of row 0, with ``units`` units each; n: activation rows; scratch: :func:`scratch_bytes` for each
    unit, which only :func:`emit_rows` needs.
    out, residual: where the value of the group's first row is, for row 0; rows: R; count: rows of the group; added: 0 if
    there is no residual.
    places: for the t-th activation row, its row of q, da and s, and its row of out.
    """

    law: Law
    records: ir.Value
    q: ir.Value
    da: ir.Value
    s: ir.Value
    n: ir.Value
    units: ir.Value
    scratch: ir.Value
    residual: ir.Value
    added: ir.Value
    out: ir.Value
    rows: ir.Value
    count: ir.Value
    places: Callable[[ir.Value], tuple[ir.Value, ir.Value]] = lambda t: (t, t)

    def multiply(self, code: Code, each: list[ir.Value], multiply: "Callable[[list[Row]], list[Vec]]") -> None:
        """Store the totals of the activation rows ``each``."""
        places = [self.places(t) for t in each]
        unit = self.law.fmt.unit
        first = Row(self.q, self.da, self.s)
        rows = [first.moved(code, code.times(place, self.units), unit) for place, _ in places]
        for (_, place), total in zip(places, multiply(rows), strict=True):
            self._store(code, place, total)

    def _store(self, code: Code, t: ir.Value, total: Vec) -> None:
        b = code.builder
        at = code.times(code.times(t, self.rows), 4)
        out, residual = code.at(self.out, at), code.at(self.residual, at)
        added = b.icmp_signed("!=", self.added, ir.Constant(I64, 0))
        with b.if_else(b.icmp_signed("==", self.count, ir.Constant(I64, total.lanes))) as (whole, part):
            with whole, b.if_else(added) as (yes, no):
                with yes:
                    code.store(code.load(residual, 0, F32, total.lanes) + total, out)
                with no:
                    code.store(total, out)
            with part:
                place = code.scratch(4 * total.lanes)
                code.store(total, place)
                with code.loop(code.times(self.count, 4), 0, 4) as i:
                    value = code.load(place, i, F32, 1)
                    with b.if_else(added) as (yes, no):
                        with yes:
                            code.store(code.load(residual, i, F32, 1) + value, out, i)
                        with no:
                            code.store(value, out, i)


# --- few activation rows: quants are unpacked in registers -----------------------------------------------------


def _few(code: Code, item: Item, rows: list[Row]) -> list[Vec]:
    """The totals of a few activation rows."""
    law, fmt = item.law, item.law.fmt
    tables = code.scratch(2 * ROWS * 16) if fmt.group else None

    def unit(u: ir.Value) -> Step:
        record = code.at(item.records, code.times(u, fmt.record_bytes))
        code.prefetch(code.at(record, AHEAD), fmt.record_bytes)
        here = [row.moved(code, u, fmt.unit) for row in rows]
        if tables is not None:
            minimums = code.at(tables, ROWS * 16) if fmt.has_minimum else tables
            law.store_tables(code, record, tables, minimums)
        dots = [law.first(code, row.s) for row in here]
        size = law.run // 4
        for j in range(-(-fmt.unit // 32)):
            vectors = fmt.quants(code, record, j, law.bias)
            for i in range(0, len(vectors), size):
                scale = law.scale(code, tables, (8 * j + i) // size) if tables is not None else None
                words = words_of(code, [code.at(row.q, 32 * j + 4 * i) for row in here])
                dots = law.dot(code, dots, vectors[i : i + size], words, scale)
        factors = [law.term(code, minimums, k) for k in range(8)] if law.has_terms else []
        d, dm = fmt.d(code, record), fmt.dm(code, record) if fmt.has_minimum else None
        return law.step(code, d, dm, dots, factors, here)

    return chains(code, len(rows), item.units, unit)


def emit_step(code: Code, item: Item) -> None:
    """Multiply by one activation row."""
    item.multiply(code, [ir.Constant(I64, 0)], lambda rows: _few(code, item, rows))


def emit_few(code: Code, item: Item) -> None:
    """Multiply by one to four activation rows; three are four, of which two are the same."""
    last = code.builder.sub(item.n, ir.Constant(I64, 1))
    with code.builder.if_else(code.builder.icmp_signed("<=", item.n, ir.Constant(I64, 2))) as branches:
        for size, branch in zip((2, FEW), branches, strict=True):
            with branch:
                each = [code.minimum(ir.Constant(I64, i), last) for i in range(size)]
                item.multiply(code, each, lambda rows: _few(code, item, rows))


def emit_some(code: Code, item: Item) -> None:
    """Multiply by any number of activation rows, ``TILE`` at a time; fewer are as many, of which some are the same."""
    last = code.builder.sub(item.n, ir.Constant(I64, 1))
    with code.loop(item.n, ir.Constant(I64, 0), TILE) as t:
        each = [code.minimum(code.builder.add(t, ir.Constant(I64, i)), last) for i in range(TILE)]
        item.multiply(code, each, lambda rows: _few(code, item, rows))


# --- many activation rows: quants are unpacked once, into memory -----------------------------------------------


class Unpacked:
    """The layout of a unit of one or two groups of weight rows that is unpacked for many activation rows: pieces of 32 bytes,
    those of two groups in turn.  First the quants, then factors of the groups, factors of the sums, d and dm."""

    def __init__(self, law: Law) -> None:
        self.law = law
        self.groups = 2 if law.instructions == "vnni512" else 1
        piece = 32 * self.groups
        self.scales = piece * (law.fmt.unit // 4)
        self.factors = self.scales + (piece * law.groups if law.fmt.group else 0)
        self.d = self.factors + (piece * 8 if law.has_terms else 0)
        self.dm = self.d + piece
        self.bytes = self.dm + piece

    def store(self, code: Code, record: ir.Value, place: ir.Value) -> None:
        """Unpack a record; ``place``: where the pieces of its group begin."""
        law, fmt, groups = self.law, self.law.fmt, self.groups
        for j in range(-(-fmt.unit // 32)):
            for i, x in enumerate(fmt.quants(code, record, j, law.bias)):
                code.store(x, place, 32 * groups * (8 * j + i))
        if fmt.group:
            tables = code.scratch(2 * ROWS * 16)
            minimums = code.at(tables, ROWS * 16) if fmt.has_minimum else tables
            law.store_tables(code, record, tables, minimums)
            for g in range(law.groups):
                code.store(law.scale(code, tables, g), place, self.scales + 32 * groups * g)
            if law.has_terms:
                for k in range(8):
                    code.store(law.term(code, minimums, k), place, self.factors + 32 * groups * k)
        code.store(fmt.d(code, record), place, self.d)
        if fmt.has_minimum:
            code.store(fmt.dm(code, record), place, self.dm)

    def multiply(self, code: Code, item: Item, rows: list[Row]) -> list[Vec]:
        """The totals of activation rows."""
        law, fmt, lanes = self.law, self.law.fmt, code.lanes

        def unit(u: ir.Value) -> Step:
            own = code.at(item.scratch, code.times(u, self.bytes))
            here = [row.moved(code, u, fmt.unit) for row in rows]
            dots = [code.variable(law.first(code, row.s)) for row in here]
            with code.loop(law.groups) as g:
                at = code.times(g, law.run)
                weights = code.at(own, code.times(at, lanes))
                vectors = [code.load(weights, 4 * lanes * i, I8, 4 * lanes) for i in range(law.run // 4)]
                scale = None
                if fmt.group:
                    lane, n = (I32, lanes) if code.has_dot4 else (I16, 2 * lanes)
                    scale = code.load(code.at(own, self.scales), code.times(g, 4 * lanes), lane, n)
                words = words_of(code, [code.at(row.q, at) for row in here])
                new = law.dot(code, [dot.get() for dot in dots], vectors, words, scale)
                for dot, x in zip(dots, new, strict=True):
                    dot.set(x)
            factors = []
            if law.has_terms:
                factors = [code.load(own, self.factors + 4 * lanes * k, I16, 2 * lanes) for k in range(8)]
            d = code.load(own, self.d, F32, lanes)
            dm = code.load(own, self.dm, F32, lanes) if fmt.has_minimum else None
            return law.step(code, d, dm, [dot.get() for dot in dots], factors, here)

        return chains(code, len(rows), item.units, unit)


def emit_rows(code: Code, item: Item) -> None:
    """Multiply by any number of activation rows; with "vnni512", two groups of weight rows if ``item.count`` is above 8."""
    b = code.builder
    unpacked = Unpacked(item.law)
    record_bytes = item.law.fmt.record_bytes
    # Where there is no second group, the first one is unpacked again, and not stored.
    several = b.icmp_signed(">", item.count, ir.Constant(I64, ROWS))
    further = b.select(several, code.times(item.units, record_bytes), ir.Constant(I64, 0))
    ahead = code.times(item.units, record_bytes * unpacked.groups)
    with code.loop(unpacked.groups) as group, code.loop(item.units) as u:
        record = code.at(code.at(item.records, code.times(group, further)), code.times(u, record_bytes))
        place = code.at(code.at(item.scratch, code.times(group, 32)), code.times(u, unpacked.bytes))
        # The groups after these, which are read from memory while these are multiplied.
        code.prefetch(code.at(record, ahead), record_bytes)
        unpacked.store(code, record, place)
    wide = Code(b, code.instructions, ROWS * unpacked.groups)
    first: ir.Value = ir.Constant(I64, 0)
    # Tiles of 8 rows need more than the 16 registers that CPUs without AVX-512 have.
    for size in (8, 4, 2, 1) if code.has_dot4 else (4, 2, 1):
        stop = b.and_(item.n, ir.Constant(I64, -size))
        with code.loop(stop, first, size) as t:
            each = [b.add(t, ir.Constant(I64, i)) for i in range(size)]
            item.multiply(wide, each, lambda rows: unpacked.multiply(wide, item, rows))
        first = stop


def scratch_bytes(fmt: str, instructions: str) -> int:
    """Bytes of scratch memory that :func:`emit_rows` needs for each unit."""
    return Unpacked(Law(UNPACK[fmt], instructions)).bytes


# --- kernels ---------------------------------------------------------------------------------------------------


def item_of(law: Law, code: Code, pointers: list[ir.Value], numbers: list[ir.Value]) -> Item:
    """The item of an intrinsic.  Pointers: data, q, da, s, scratch, residual, out; numbers: the byte of data, n, units,
    added, the index in out and residual, rows, count."""
    data, q, da, s, scratch, residual, out = pointers
    at, n, units, added, place, rows, count = numbers
    place = code.times(place, 4)
    records, residual, out = code.at(data, at), code.at(residual, place), code.at(out, place)
    return Item(law, records, q, da, s, n, units, scratch, residual, added, out, rows, count)


@functools.cache
def product(fmt: str, instructions: str, emit: Callable[[Code, Item], None]) -> Any:
    """The intrinsic ``product(data, q, da, s, scratch, residual, out, at, n, units, added, place, rows, count)``: the
    records from byte ``at`` on times n activation rows, into out from index ``place`` on."""
    law = Law(UNPACK[fmt], instructions)

    @intrinsic
    def product(typingctx, data, q, da, s, scratch, residual, out, at, n, units, added, place, rows, count):
        def codegen(context, builder, sig, args):
            code = Code(builder, instructions)
            pointers = [data_of(context, builder, sig.args[i], args[i]) for i in range(7)]
            emit(code, item_of(law, code, pointers, list(args[7:])))
            return context.get_dummy_value()

        return types.void(data, q, da, s, scratch, residual, out, *(types.int64,) * 7), codegen

    return product


@family
def matmul_step(fmt: str, instructions: str) -> Any:
    """The kernel for one activation row and weights of a quantized format (its name)."""
    return _kernel(product(fmt, instructions, emit_step), 0, 1)


@family
def matmul_few(fmt: str, instructions: str) -> Any:
    """The kernel for one to four activation rows."""
    # Without instructions for it, emit_few is long: it takes five seconds to compile for IQ4_XS.
    emit = emit_rows if instructions == "plain" else emit_few
    return _kernel(product(fmt, instructions, emit), scratch_bytes(fmt, instructions), 1)


@family
def matmul_some(fmt: str, instructions: str) -> Any:
    """The kernel for five to sixteen activation rows, where a CPU has registers for the sums of ``TILE`` of them."""
    return _kernel(product(fmt, instructions, emit_some), 0, 1)


@family
def matmul_rows(fmt: str, instructions: str) -> Any:
    """The kernel for any number of activation rows, faster than the others for many.  With "vnni512" it takes two groups
    of weight rows at once; a range of an odd number takes as long as one more."""
    groups = 2 if instructions == "vnni512" else 1
    return _kernel(product(fmt, instructions, emit_rows), scratch_bytes(fmt, instructions), groups)


def _kernel(product: Any, unit_bytes: int, groups: int) -> Any:
    @njit(cache=True, error_model="numpy")
    def matmul(data, q, da, s, residual, out, first, last):
        """An item is a group of eight weight rows."""
        n, rows = out.shape
        units = da.shape[1]
        added = i64(residual.shape[0] > 0)
        scratch = np.empty(units * unit_bytes, u8)
        for g in range(first, last, groups):
            at = g * data.shape[1]
            count = min(ROWS * min(groups, last - g), rows - ROWS * g)
            product(data, q, da, s, scratch, residual, out, at, n, units, added, ROWS * g, rows, count)

    return matmul
