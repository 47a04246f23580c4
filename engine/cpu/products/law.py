"""How a unit of eight weight rows is multiplied by activations, with each instruction set.

Formula: I, M and value of ``matmul.py``.  With o the offset of the format and S_g the sum of the activations of group g,
    I = sum_g scale_g (sum_i q_i a_i - o S_g),  M = sum_g m_g S_g.
Shapes: eight weight rows are eight lanes of int32 or float32, or 16 rows 16 lanes; pointers as in ``matmul.py``.
Reduction order: that of ``matmul.py`` for floats; integers are exact, in any order, because no step overflows:

* int32: no sum exceeds 255 * 127 * 256 * 128 < 2**31 (a quant, an activation, the weights of a unit, a scale).
* ``vpdpbusd`` multiplies unsigned by signed bytes, so signed quants are made unsigned by an offset of 128.
* The others first add two products in int16, which are at most 2 * largest * 127; ``limit`` of these sums fit in int16 before
  they are multiplied by a scale.  There the sign of a signed quant is moved to the activation, which is never -128, and 2 *
  128 * 127 < 2**15.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from engine.cpu.products.repack import ROWS
from engine.cpu.products.unpack import Unpack
from engine.cpu.simd import F32, I8, I16, I32, I64, Code, Vec
from engine.gguf.quants import ACTIVATION_MAX, CHAINS


@dataclass(frozen=True)
class Law:
    """How one format is multiplied with one instruction set.

    bias: what is added to signed quants; offset: what is subtracted from every quant, including the bias; limit: how many
    sums of two products fit in int16.
    """

    fmt: Unpack
    instructions: str

    @property
    def bias(self) -> int:
        return 128 if self.fmt.signed and self.instructions in ("vnni512", "vnni") else 0

    @property
    def offset(self) -> int:
        return self.fmt.offset + self.bias

    @property
    def limit(self) -> int:
        return (2**15 - 1) // (2 * self.fmt.largest * ACTIVATION_MAX)

    @property
    def groups(self) -> int:
        """Runs of a unit, of which each has a scale if there are scales."""
        return self.fmt.unit // self.run

    @property
    def run(self) -> int:
        """Weights that are multiplied at once: those of a group, or at most 32 if there are no scales."""
        return self.fmt.group or min(self.fmt.unit, 32)

    @property
    def has_terms(self) -> bool:
        """Whether sums of activations are multiplied by something of each row: minimums, or scales times the offset."""
        return bool(self.fmt.group) and (self.fmt.has_minimum or self.offset > 0)

    # --- parts of a unit -----------------------------------------------------------------------------------------

    def dot(self, code: Code, totals: list[Vec], weights: list[Vec], words: "Words", scale: Vec | None) -> list[Vec]:
        """Add to ``totals``, int32 [rows] for each activation row t, the products of the quants of a group with
        ``words(t, i)``, the activations that vector i of the quants belongs to."""
        rows = range(len(totals))
        if code.has_dot4:
            parts = [code.zeros() if scale else total for total in totals]
            for i, w in enumerate(weights):
                parts = [code.dot4(parts[t], w, words(t, i)) for t in rows]
            return [totals[t] + parts[t] * scale for t in rows] if scale else parts
        factor = scale or code.constant(I16, [1] * 2 * code.lanes)
        for first in range(0, len(weights), self.limit):
            sums: list[Vec | None] = [None] * len(totals)
            for i, w in list(enumerate(weights))[first : first + self.limit]:
                size = code.magnitude(w) if self.fmt.signed else w
                for t in rows:
                    a = words(t, i)
                    pairs = code.pairs8(size, code.moved_sign(w, a) if self.fmt.signed else a)
                    before = sums[t]
                    sums[t] = pairs if before is None else before + pairs
            totals = [totals[t] + code.pairs16(sums[t], factor) for t in rows]  # type: ignore[arg-type]
        return totals

    def scale(self, code: Code, table: ir.Value, g: int) -> Vec:
        """The factors of group g, from scales int8 [groups][8 rows] at ``table``: int32 [8], or int16 [8][2]."""
        own = code.load(table, ROWS * g, I8, ROWS)
        if code.has_dot4:
            return own.signed(I32)
        return own.shuffle([i // 2 for i in range(2 * ROWS)]).signed(I16)

    def term(self, code: Code, table: ir.Value, k: int) -> Vec:
        """What the sums 2 k and 2 k + 1 are multiplied by, int16 [8][2], from a table as in :meth:`scale`."""
        if self.fmt.group == 32:
            return code.load(table, ROWS * k, I8, ROWS).shuffle([i // 2 for i in range(2 * ROWS)]).signed(I16)
        pair = code.load(table, 2 * ROWS * k, I8, 2 * ROWS)
        return pair.shuffle([i // 2 + ROWS * (i % 2) for i in range(2 * ROWS)]).signed(I16)

    def store_tables(self, code: Code, record: ir.Value, scales: ir.Value, terms: ir.Value) -> None:
        """Write the scales of a record, and what its terms come from unless that is the same."""
        for k, x in enumerate(self.fmt.scales(code, record)):
            code.store(x, scales, 32 * k)
        if self.fmt.has_minimum:
            for k, x in enumerate(self.fmt.minimums(code, record)):
                code.store(x, terms, 32 * k)

    def first(self, code: Code, sums: ir.Value) -> Vec:
        """The value that I begins with: the offset of a unit without scales, times the sum of its activations."""
        total = code.zeros()
        if self.fmt.group or not self.offset:
            return total
        if self.fmt.unit == 16:
            return code.splat(sums, 0, I16).signed(I32) * -self.offset
        for k in range(self.fmt.unit // 32):
            factor = code.constant(I16, [-self.offset & 0xFFFF] * 2 * code.lanes)
            total = total + code.pairs16(pair_of(code, sums, k), factor)
        return total

    def step(
        self, code: Code, d: Vec, dm: Vec | None, dots: list[Vec], factors: list[Vec], rows: list["Row"]
    ) -> "Step":
        """The last step of a unit, by the sums of products ``dots``, and ``factors`` of the sums of activations; ``rows``:
        where the unit begins."""
        values = []
        for x, row in zip(dots, rows, strict=True):
            terms = code.zeros()
            for k, factor in enumerate(factors):
                terms = terms + code.pairs16(pair_of(code, row.s, k), factor)
            if not self.fmt.has_minimum:
                values.append(d * (x - terms * self.offset if factors else x).to_float())
                continue
            assert dm is not None
            if not factors:
                terms = code.pairs16(pair_of(code, row.s, 0), code.constant(I16, [1] * 2 * code.lanes))
            values.append(dm.fma(terms.to_float(), d * x.to_float()))
        return lambda t, acc: code.splat(rows[t].da, 0, F32).fma(values[t], acc)


def pair_of(code: Code, sums: ir.Value, k: int) -> Vec:
    """The sums 2 k and 2 k + 1 of an activation row, for all weight rows: int16 [rows][2]."""
    return code.splat(sums, 4 * k, I32).view(I16)


Words = Callable[[int, int], Vec]
Step = Callable[[int, Vec], Vec]
"""``step(t, acc)``: the new acc of activation row t."""


def words_of(code: Code, q: list[ir.Value]) -> Words:
    """``words(t, i)``: the activations 4 i .. 4 i + 3 of row t, which begin at q[t], for all weight rows."""
    return lambda t, i: code.splat(q[t], 4 * i, I32).view(I8)


@dataclass(frozen=True)
class Row:
    """Pointers to the activations of one row of a product: q, da and s."""

    q: ir.Value
    da: ir.Value
    s: ir.Value

    def moved(self, code: Code, n: ir.Value, unit: int) -> "Row":
        """The pointers n units of ``unit`` activations further."""
        q, da, s = (code.at(p, code.times(n, k)) for p, k in ((self.q, unit), (self.da, 4), (self.s, unit // 8)))
        return Row(q, da, s)


def chains(code: Code, n: int, units: ir.Value, each: Callable[[ir.Value], "Step"]) -> list[Vec]:
    """The totals of n activation rows; ``each(u)`` emits unit u."""
    length = code.builder.sdiv(code.builder.add(units, ir.Constant(I64, CHAINS - 1)), ir.Constant(I64, CHAINS))
    totals = [code.variable(code.zeros(F32)) for _ in range(n)]
    accs = [code.variable(code.zeros(F32)) for _ in range(n)]
    with code.loop(units, 0, length) as first:
        for acc in accs:
            acc.set(code.zeros(F32))
        with code.loop(code.minimum(code.builder.add(first, length), units), first) as u:
            new = each(u)
            for t, acc in enumerate(accs):
                acc.set(new(t, acc.get()))
        for total, acc in zip(totals, accs, strict=True):
            total.set(total.get() + acc.get())
    return [total.get() for total in totals]
