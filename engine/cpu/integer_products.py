"""The sums of products of attention over integer keys and values, in vectors of int16 pairs.

Formula, shapes: ``engine/cpu/integer_attention.py``; the words of a chunk: ``engine/cache/types.py``.
Who owns what: a call owns a chunk; it works in tiles of columns (positions of keys, dimensions of values) whose sums stay in
    registers.
Reduction order: none, integer sums are exact; scores add blocks in rising order, fma(dq_b * dk_b, float32(I_b), score).
Bytes moved: d * bits / 8 per position, from a cache of the CPU, and the integers of the queries or weights.

A tile of keys, where each pair of lanes has the four dimensions of a position:

    total = 0
    for each word m of a block:
        x = int16 of the bytes of words[m]           i12: 256 h + 16 l
        total += pairs of x times the same four integers of the query
    score = fma(dq * dk, float32(total of both lanes), score)        i12: of both lanes shifted right by 4
"""

from collections.abc import Callable
from itertools import product

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from engine.cache.types import CHUNK
from engine.cpu.simd import F16, F32, I8, I16, I64, Code, Vec, data_of, host

LINE_WORDS = 16
"""Words of a line of the CPU's caches."""


class IntegerProducts:
    """Sums of products of ``rows`` times four int16 and of integers of ``bits`` bits, in a tile of columns.

    An integer is a byte (i8), or 16 times a byte and four bits without a sign (i12), of which the products take 16 times.  A
    word holds four of them of one column, and the sums are over n words.
    """

    def __init__(self, code: Code, bits: int, rows: int) -> None:
        self.code, self.bits, self.rows = code, bits, rows
        self.each = code.lanes // 2
        """The number of columns in a vector of bytes."""

    def columns(self, width: int) -> int:
        """The number of columns of a tile whose sums fit into registers: a part of ``width``."""
        return min(width, self.each * max(2, self.code.lanes // self.rows))

    def integers(self, high: ir.Value, low: ir.Value, shift: int, columns: int) -> list[Vec]:
        """The integers of a row of words from ``high`` on, int16, times 16 for i12; their low bits are ``shift`` bits up in
        the bytes from ``low`` on.  The order of columns within two vectors is that of :meth:`_joined`."""
        code, n = self.code, 4 * self.each
        if self.bits == 8:
            return [code.load(high, offset, I8, n).signed(I16) for offset in range(0, 4 * columns, n)]
        found = []
        for offset in range(0, 4 * columns, 2 * n):
            h, x = code.load(high, offset, I8, 2 * n), code.load(low, offset, I8, 2 * n)
            x = (x.view(I16) << 4 - shift).view(I8) & 0xF0
            # Bytes of x and h side by side make 256 h + 16 l, in runs of 16 bytes, as one instruction does it.
            for half in (0, 8):
                places = [16 * run + half + i for run in range(2 * n // 16) for i in range(8)]
                pairs = x.shuffle([place for i in places for place in (i, 2 * n + i)], h)
                found.append(pairs.view(I16))
        return found

    def prefetch(self, words: ir.Value, ahead: ir.Value, part: ir.Value, columns: int) -> None:
        """Prefetch a part, of as many bytes as the words of ``columns`` take, ``ahead`` words after ``words``; nothing if
        ``ahead`` is 0.  The parts are adjacent, whatever the order of the words that are read: the CPU's own prefetcher then
        continues them."""
        code, n = self.code, columns * self.bits // 2
        with code.builder.if_then(code.builder.icmp_signed("!=", ahead, ir.Constant(I64, 0))):
            start = code.builder.add(code.times(ahead, 4), code.times(part, n))
            code.prefetch(code.at(words, start), n)

    def _joined(self, one: Vec, other: Vec) -> Vec:
        """The sums of the columns of two vectors, float32: a column has two adjacent lanes."""
        n = self.code.lanes
        lanes = list(range(2 * n))
        if self.bits == 12:
            # A lane has half of the sum, which is below 2**27: 16 times that fits, 16 times the whole sum does not.
            one, other = one.arithmetic_shift(4), other.arithmetic_shift(4)
            # Two columns of the one, then two of the other, and so on.
            lanes = [start + 4 * run + i for run in range(n // 4) for start in (0, n) for i in range(4)]
        return (one.shuffle(lanes[::2], other) + one.shuffle(lanes[1::2], other)).to_float()

    def sums(
        self,
        n: ir.Value,
        steps: int,
        columns: int,
        factors: Callable[[int, ir.Value], ir.Value],
        integers: Callable[[ir.Value, int], list[Vec]],
    ) -> list[list[Vec]]:
        """Float32 of the sums [rows][columns / lanes] over n words: factors(r, m) is the address of four int16 for word m of
        row r, integers(m, step) are those of word m + step; ``steps``: words at a time."""
        code, builder = self.code, self.code.builder
        totals = [[code.variable(code.zeros()) for _ in range(columns // self.each)] for _ in range(self.rows)]
        with code.loop(n, step=steps) as m:
            for step in range(steps):
                x = integers(m, step)
                for r, row in enumerate(totals):
                    place = code.at(factors(r, m), 8 * step)
                    four = builder.load(builder.bitcast(place, I64.as_pointer()), align=2)
                    own = code.repeat(four, self.each).view(I16)
                    for total, vector in zip(row, x, strict=True):
                        total.set(total.get() + code.pairs16(vector, own))
        vectors = [[total.get() for total in row] for row in totals]
        return [[self._joined(*pair) for pair in zip(row[::2], row[1::2], strict=True)] for row in vectors]


def _code(builder: ir.IRBuilder, instructions: str) -> Code:
    return Code(builder, instructions, 16 if instructions == "vnni512" else 8)


@intrinsic
def prefetch(typingctx, words, word, n):
    """prefetch(words, word, n): ask the CPU to bring n words from words[word] on, which need not exist, into its caches."""

    def codegen(context, builder, sig, args):
        code = Code(builder, host())
        first = code.at(data_of(context, builder, sig.args[0], args[0]), code.times(args[1], 4))
        with code.loop(args[2], step=LINE_WORDS) as i:
            code.prefetch(code.at(first, code.times(i, 4)), 4 * LINE_WORDS)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64), codegen


@intrinsic
def floats_of_halves(typingctx, words, word, n, out):
    """floats_of_halves(words, word, n, out): write n float16 from words[word] on, a multiple of 64, to out float32 [n]."""

    def codegen(context, builder, sig, args):
        code = Code(builder, host())
        source, target = (data_of(context, builder, sig.args[k], args[k]) for k in (0, 3))
        source = code.at(source, code.times(args[1], 4))
        with code.loop(args[2], step=CHUNK) as i:
            for j in range(0, CHUNK, 16):
                halves = code.load(code.at(source, code.times(i, 2)), 2 * j, F16, 16)
                code.store(halves.to_float(), code.at(target, code.times(i, 4)), 4 * j)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64, out), codegen


def make_scores(bits: int, rows: int, instructions: str = host()) -> Callable[..., None]:
    """The intrinsic ``scores(queries, dq, at, keys, word, ahead, dk, d, blocks, p)``: write the scores of ``rows`` queries
    from ``at`` on, int16 [n, d] with scales dq float32 [n, blocks], and of the keys of the chunk from keys[word] on, with
    scales dk float32 [blocks, 64], to p float32 [rows, 64]; prefetch what is ``ahead`` words further on, unless that is 0."""

    @intrinsic
    def scores(typingctx, queries, dq, at, keys, word, ahead, dk, d, blocks, p):
        def codegen(context, builder, sig, args):
            code = _code(builder, instructions)
            own = IntegerProducts(code, bits, rows)
            queries, dq, keys, dk, p = (data_of(context, builder, sig.args[k], args[k]) for k in (0, 1, 3, 6, 9))
            at, word, ahead, d, blocks = (args[k] for k in (2, 4, 5, 7, 8))
            block = builder.sdiv(d, blocks)
            quads = builder.lshr(block, ir.Constant(I64, 2))
            columns, keys = own.columns(CHUNK), code.at(keys, code.times(word, 4))
            nibbles = code.at(keys, code.times(d, CHUNK))
            for start in range(0, CHUNK, columns):
                part = ir.Constant(I64, start // columns)
                totals = [[code.variable(code.zeros(F32)) for _ in range(columns // code.lanes)] for _ in range(rows)]
                with code.loop(blocks) as b:
                    first = builder.mul(b, quads)

                    def factors(r: int, m: ir.Value, b: ir.Value = b) -> ir.Value:
                        element = builder.add(code.times(m, 4), builder.mul(b, block))
                        row = builder.mul(builder.add(at, ir.Constant(I64, r)), d)
                        return code.at(queries, code.times(builder.add(row, element), 2))

                    def integers(m, step, first=first, start=start, part=part):
                        m = builder.add(first, m)
                        if step == 0:
                            place = builder.add(
                                code.times(builder.lshr(m, ir.Constant(I64, 1)), CHUNK // columns), part
                            )
                            own.prefetch(keys, ahead, place, 2 * columns)
                        low = code.at(nibbles, code.times(builder.lshr(m, ir.Constant(I64, 1)), 4 * CHUNK))
                        high = code.at(keys, code.times(builder.add(m, ir.Constant(I64, step)), 4 * CHUNK))
                        return own.integers(code.at(high, 4 * start), code.at(low, 4 * start), 4 * step, columns)

                    sums = own.sums(quads, 2, columns, factors, integers)
                    of_block = code.at(dk, code.times(b, 4 * CHUNK))
                    for r in range(rows):
                        row = builder.mul(builder.add(at, ir.Constant(I64, r)), blocks)
                        scale = code.splat(dq, code.times(builder.add(row, b), 4), F32)
                        for v, total in enumerate(totals[r]):
                            keyed = code.load(of_block, 4 * (start + code.lanes * v), F32, code.lanes)
                            total.set((scale * keyed).fma(sums[r][v], total.get()))
                for r, v in product(range(rows), range(columns // code.lanes)):
                    code.store(totals[r][v].get(), p, 4 * (CHUNK * r + start + code.lanes * v))
            return context.get_dummy_value()

        n = types.int64
        return types.void(queries, dq, n, keys, n, n, dk, n, n, p), codegen

    return scores


def make_values(bits: int, rows: int, least: int, instructions: str = host()) -> Callable[..., None]:
    """The intrinsic ``put_values(weights, factors, values, word, ahead, d, b, block, o)`` for blocks of at least ``least``:
    write the sums over the positions of a chunk of int16 weights [rows, 64] and block b of the values from values[word] on,
    times ``factors`` float32 [rows], to o float32 [rows, d]; prefetch what is ``ahead`` words further on, unless
    that is 0."""

    @intrinsic
    def put_values(typingctx, weights, factors, values, word, ahead, d, b, block, o):
        def codegen(context, builder, sig, args):
            code = _code(builder, instructions)
            own = IntegerProducts(code, bits, rows)
            weights, factors, values, o = (data_of(context, builder, sig.args[k], args[k]) for k in (0, 1, 2, 8))
            word, ahead, d, b, block = args[3:8]
            values, half = code.at(values, code.times(word, 4)), builder.lshr(block, ir.Constant(I64, 1))
            first = builder.mul(b, block)
            # The halves of a block share the words of their low bits, so both are summed at once if registers suffice.
            together = 2 if own.columns(least) >= 4 * own.each else 1
            columns = own.columns(least // 2 * together) // together
            nibbles = code.at(values, code.times(d, CHUNK))
            for parts in ([0, 1],) if together == 2 else ([0], [1]):
                with code.loop(half, step=columns) as start:

                    def of_word(m: ir.Value, width: ir.Value, column: ir.Value) -> ir.Value:
                        return code.times(builder.add(builder.mul(m, width), column), 4)

                    def column_of(part, start=start):
                        return builder.add(builder.add(first, code.times(half, part)), start)

                    def integers(m, step, start=start, parts=parts):
                        width, column = (builder.lshr(x, ir.Constant(I64, 1)) for x in (d, first))
                        low = code.at(nibbles, of_word(m, width, builder.add(column, start)))
                        before = builder.udiv(first, ir.Constant(I64, together))
                        before = builder.add(before, builder.add(code.times(half, parts[0]), start))
                        pieces = builder.udiv(before, ir.Constant(I64, columns))
                        place = builder.add(code.times(pieces, CHUNK // 4), m)
                        own.prefetch(values, ahead, place, columns * len(parts))
                        high = (code.at(values, of_word(m, d, column_of(part))) for part in parts)
                        found = [own.integers(x, low, 4 * part, columns) for x, part in zip(high, parts, strict=True)]
                        return [vector for of_part in found for vector in of_part]

                    def four(r: int, m: ir.Value) -> ir.Value:
                        return code.at(weights, builder.add(code.times(m, 8), ir.Constant(I64, 2 * CHUNK * r)))

                    sums = own.sums(ir.Constant(I64, CHUNK // 4), 1, columns * len(parts), four, integers)
                    for r, (i, part) in product(range(rows), enumerate(parts)):
                        factor = code.splat(factors, 4 * r, F32)
                        row = code.at(o, of_word(ir.Constant(I64, r), d, column_of(part)))
                        n = columns // code.lanes
                        for v, total in enumerate(sums[r][n * i : n * i + n]):
                            code.store(factor * total, row, 4 * code.lanes * v)
            return context.get_dummy_value()

        n = types.int64
        return types.void(weights, factors, values, n, n, n, n, n, o), codegen

    return put_values
