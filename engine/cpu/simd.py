"""Vectors for CPU kernels: arithmetic written in Python that becomes LLVM instructions, and the host's instruction set.

A kernel's inner part is a Python function that runs once, when the kernel is compiled: it computes with :class:`Vec`
objects, each of which stands for a vector of lanes in a register, and a :class:`Code` appends the instructions.  A Python
loop is therefore an unrolled loop; :meth:`Code.loop` makes one that the CPU runs.  Nothing here depends on Numba's types,
so that the same function becomes part of a kernel (``numba.extending.intrinsic``) or of a plain LLVM function, which a
test compiles for a CPU that is not there.

Instruction sets, by name; all of them compute the same integers:

``"vnni512"``
    As "vnni", and 512 bits in products of many rows (AVX512-VNNI).
``"vnni"``
    x86-64 with ``vpdpbusd`` on 256 bits (AVX512-VNNI with VL, or AVX-VNNI): four products and their sum per lane.
``"avx2"``
    x86-64 with ``vpmaddubsw`` and ``vpmaddwd``: two products per lane.
``"plain"``
    The steps of "avx2" in portable vector operations, for every other CPU.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()

INSTRUCTION_SETS = ("vnni512", "vnni", "avx2", "plain")


@functools.cache
def available() -> tuple[str, ...]:
    """The instruction sets of this CPU, the fastest first."""
    has = get_host_cpu_features()
    avx2 = bool(has.get("avx2"))
    wide = avx2 and all(has.get(name) for name in ("avx512vnni", "avx512vl", "avx512bw"))
    vnni = wide or (avx2 and bool(has.get("avxvnni")))
    return tuple(name for name, there in zip(INSTRUCTION_SETS, (wide, vnni, avx2, True), strict=True) if there)


def host() -> str:
    """The name of the fastest instruction set of this CPU."""
    return available()[0]


class Vec:
    """A vector of integer or float lanes.

    ``& | ^ + - *`` work lane by lane, ``<< >>`` shift integer lanes by a constant (``>>`` fills with zeros).  The right
    operand is a Vec of the same type, or a Python number for all lanes.  Integers wrap.
    """

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return self.value.type.count

    @property
    def lane(self) -> ir.Type:
        """The type of a lane."""
        return self.value.type.element

    def _make(self, value: ir.Value) -> "Vec":
        return Vec(self.builder, value)

    def _operand(self, other: "Vec | float") -> ir.Value:
        if isinstance(other, Vec):
            return other.value
        if isinstance(self.lane, ir.IntType):
            # LLVM's constants are read as unsigned.
            other = int(other) & ((1 << self.lane.width) - 1)
        return ir.Constant(self.value.type, [other] * self.lanes)

    def __and__(self, other: "Vec | int") -> "Vec":
        return self._make(self.builder.and_(self.value, self._operand(other)))

    def __or__(self, other: "Vec | int") -> "Vec":
        return self._make(self.builder.or_(self.value, self._operand(other)))

    def __xor__(self, other: "Vec | int") -> "Vec":
        return self._make(self.builder.xor(self.value, self._operand(other)))

    def __add__(self, other: "Vec | float") -> "Vec":
        add = self.builder.add if isinstance(self.lane, ir.IntType) else self.builder.fadd
        return self._make(add(self.value, self._operand(other)))

    def __sub__(self, other: "Vec | float") -> "Vec":
        sub = self.builder.sub if isinstance(self.lane, ir.IntType) else self.builder.fsub
        return self._make(sub(self.value, self._operand(other)))

    def __mul__(self, other: "Vec | float") -> "Vec":
        mul = self.builder.mul if isinstance(self.lane, ir.IntType) else self.builder.fmul
        return self._make(mul(self.value, self._operand(other)))

    def __neg__(self) -> "Vec":
        if isinstance(self.lane, ir.IntType):
            return self._make(self.builder.neg(self.value))
        return self._make(self.builder.fneg(self.value))

    def __lshift__(self, n: int) -> "Vec":
        return self._make(self.builder.shl(self.value, self._operand(n)))

    def __rshift__(self, n: int) -> "Vec":
        return self._make(self.builder.lshr(self.value, self._operand(n)))

    def arithmetic_shift(self, n: int) -> "Vec":
        """Integer lanes shifted right by a constant, filled with the sign."""
        return self._make(self.builder.ashr(self.value, self._operand(n)))

    def bits(self, shift: int, mask: int) -> "Vec":
        """``(byte >> shift) & mask`` of int8 lanes; the shift moves 16 bits at once, so the mask must drop what enters."""
        assert self.lane == I8 and mask >> (8 - shift) == 0
        return (self.view(I16) >> shift).view(I8) & mask if shift else self & mask

    def below_zero(self) -> ir.Value:
        """Per integer lane, whether it is negative; for :meth:`select`."""
        return self.builder.icmp_signed("<", self.value, self._operand(0))

    def is_zero(self) -> ir.Value:
        """Per integer lane, whether it is zero; for :meth:`select`."""
        return self.builder.icmp_signed("==", self.value, self._operand(0))

    def select(self, where: ir.Value, other: "Vec | float") -> "Vec":
        """These lanes where the condition holds, else the other ones."""
        return self._make(self.builder.select(where, self.value, self._operand(other)))

    def view(self, lane: ir.Type) -> "Vec":
        """The same bits as lanes of another type, the lowest byte first."""
        bits = {F16: 16, F32: 32}
        old, new = (bits.get(t) or t.width for t in (self.lane, lane))
        return self._make(self.builder.bitcast(self.value, ir.VectorType(lane, self.lanes * old // new)))

    def signed(self, lane: ir.IntType) -> "Vec":
        """Signed integer lanes made wider."""
        return self._make(self.builder.sext(self.value, ir.VectorType(lane, self.lanes)))

    def unsigned(self, lane: ir.IntType) -> "Vec":
        """Unsigned integer lanes made wider."""
        return self._make(self.builder.zext(self.value, ir.VectorType(lane, self.lanes)))

    def narrow(self, lane: ir.IntType) -> "Vec":
        """The low bits of integer lanes."""
        return self._make(self.builder.trunc(self.value, ir.VectorType(lane, self.lanes)))

    def to_float(self) -> "Vec":
        """Signed integer lanes, or float16 lanes, converted to float32 (rounded to nearest)."""
        target = ir.VectorType(F32, self.lanes)
        if isinstance(self.lane, ir.IntType):
            return self._make(self.builder.sitofp(self.value, target))
        return self._make(self.builder.fpext(self.value, target))

    def fma(self, factor: "Vec", addend: "Vec") -> "Vec":
        """``self * factor + addend`` with a single rounding; float32."""
        kind = self.value.type
        function = ir.FunctionType(kind, [kind] * 3)
        fma = cgutils.get_or_insert_function(self.builder.module, function, f"llvm.fma.v{self.lanes}f32")
        return self._make(self.builder.call(fma, [self.value, factor.value, addend.value]))

    def shuffle(self, lanes: Sequence[int], other: "Vec | None" = None) -> "Vec":
        """The lanes with these numbers; those of ``other`` are numbered after these."""
        order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return self._make(self.builder.shuffle_vector(self.value, (other or self).value, order))

    def extract(self, i: int) -> ir.Value:
        """Lane i."""
        return self.builder.extract_element(self.value, ir.Constant(I32, i))


class Variable:
    """A vector that changes while the code runs, e.g. a sum over a loop."""

    def __init__(self, code: "Code", value: Vec) -> None:
        self._builder = code.builder
        self._place = code.place(value.value.type)
        self.set(value)

    def get(self) -> Vec:
        """The present value."""
        return Vec(self._builder, self._builder.load(self._place))

    def set(self, value: Vec) -> None:
        """Replace the value."""
        self._builder.store(value.value, self._place)


class Code:
    """Appends instructions of one instruction set to a function.  Pointers are to bytes; no alignment is assumed.

    ``lanes``: of the vectors of int32 and float32 that are made without a number; 16 is for "vnni512" only.
    """

    def __init__(self, builder: ir.IRBuilder, instructions: str, lanes: int = 8) -> None:
        assert instructions in INSTRUCTION_SETS
        self.builder, self.instructions, self.lanes = builder, instructions, lanes

    @property
    def has_dot4(self) -> bool:
        """Whether there is :meth:`dot4`."""
        return self.instructions in ("vnni512", "vnni")

    # --- memory ------------------------------------------------------------------------------------------------

    def at(self, pointer: ir.Value, offset: ir.Value | int) -> ir.Value:
        """The pointer moved by a number of bytes."""
        if isinstance(offset, int):
            offset = ir.Constant(I64, offset)
        return self.builder.gep(self.builder.bitcast(pointer, I8.as_pointer()), [offset])

    def _load(self, pointer: ir.Value, offset: ir.Value | int, kind: ir.Type) -> ir.Value:
        return self.builder.load(self.builder.bitcast(self.at(pointer, offset), kind.as_pointer()), align=1)

    def load(self, pointer: ir.Value, offset: ir.Value | int, lane: ir.Type = I8, n: int = 32) -> Vec:
        """n lanes from consecutive memory."""
        return Vec(self.builder, self._load(pointer, offset, ir.VectorType(lane, n)))

    def prefetch(self, pointer: ir.Value, n: int) -> None:
        """Ask the CPU to bring n bytes into its second cache; addresses that do not exist do no harm."""
        numbers = [ir.Constant(I32, k) for k in (0, 2, 1)]  # to read; not into the first cache; data
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0i8")
        for offset in range(0, n, 64):
            self.builder.call(function, [self.at(pointer, offset), *numbers])

    def store(self, vector: Vec, pointer: ir.Value, offset: ir.Value | int = 0) -> None:
        """Write the lanes to consecutive memory."""
        target = self.builder.bitcast(self.at(pointer, offset), vector.value.type.as_pointer())
        self.builder.store(vector.value, target, align=1)

    def splat(self, pointer: ir.Value, offset: ir.Value | int, lane: ir.Type) -> Vec:
        """The lane at an address in all lanes."""
        return self.repeat(self._load(pointer, offset, lane), self.lanes)

    def repeat(self, scalar: ir.Value, n: int) -> Vec:
        """A scalar in n lanes."""
        empty = ir.Constant(ir.VectorType(scalar.type, n), ir.Undefined)
        vector = self.builder.insert_element(empty, scalar, ir.Constant(I32, 0))
        return Vec(self.builder, vector).shuffle([0] * n)

    def constant(self, lane: ir.Type, values: Sequence[float]) -> Vec:
        """A vector of constants."""
        return Vec(self.builder, ir.Constant(ir.VectorType(lane, len(values)), list(values)))

    def zeros(self, lane: ir.Type = I32, n: int = 0) -> Vec:
        """n lanes of zero, 0: all lanes."""
        return self.constant(lane, [0] * (n or self.lanes))

    def join(self, vectors: Sequence[Vec]) -> Vec:
        """The lanes of two, four, ... vectors of one type, one vector after another."""
        while len(vectors) > 1:
            order = range(2 * vectors[0].lanes)
            vectors = [x.shuffle(order, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    def variable(self, value: Vec) -> Variable:
        """A variable with a first value."""
        return Variable(self, value)

    def scratch(self, n: int) -> ir.Value:
        """n bytes on the stack, not initialized."""
        return self.builder.bitcast(self.place(ir.ArrayType(I8, n)), I8.as_pointer())

    def place(self, kind: ir.Type) -> ir.Value:
        """A place on the stack for a value of a type."""
        with self.builder.goto_entry_block():
            return self.builder.alloca(kind)

    def bytes(self, name: str, values: bytes) -> ir.Value:
        """A pointer to constant bytes of the program, which are stored once under a name."""
        place = self.builder.module.globals.get(name)
        if place is None:
            constant = cgutils.create_constant_array(I8, bytearray(values))
            place = cgutils.global_constant(self.builder, name, constant)
        return self.builder.bitcast(place, I8.as_pointer())

    # --- loops and scalars -------------------------------------------------------------------------------------

    def loop(self, stop: ir.Value | int, start: ir.Value | int = 0, step: ir.Value | int = 1):
        """``with code.loop(n) as i:`` runs the block for i = start, start + step, ... below stop; int64."""
        return self._loop(*(ir.Constant(I64, n) if isinstance(n, int) else n for n in (stop, start, step)))

    @contextmanager
    def _loop(self, stop: ir.Value, start: ir.Value, step: ir.Value) -> Iterator[ir.Value]:
        with cgutils.for_range_slice(self.builder, start, stop, step, I64, inc=True) as (index, _):
            yield index

    def times(self, x: ir.Value, n: ir.Value | int) -> ir.Value:
        """x * n, int64."""
        return self.builder.mul(x, ir.Constant(I64, n) if isinstance(n, int) else n)

    def minimum(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """The smaller of two int64."""
        return self.builder.select(self.builder.icmp_signed("<", x, y), x, y)

    # --- what instruction sets differ in -----------------------------------------------------------------------

    def call(self, name: str, result: ir.Type, *arguments: Vec) -> Vec:
        """Call an intrinsic of LLVM."""
        kind = ir.FunctionType(result, [x.value.type for x in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return Vec(self.builder, self.builder.call(function, [x.value for x in arguments]))

    def call_scalar(self, name: str, result: ir.Type, x: Vec) -> ir.Value:
        """Call an intrinsic of LLVM that makes a scalar of a vector."""
        return self.builder.call(
            cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(result, [x.value.type]), name),
            [x.value],
        )

    def larger(self, x: Vec, y: Vec) -> Vec:
        """The larger ones of signed integer lanes."""
        return x.select(self.builder.icmp_signed(">", x.value, y.value), y)

    def dot4(self, total: Vec, x: Vec, y: Vec) -> Vec:
        """total + sums of four products of unsigned x and signed y, int8, four for each lane; only if ``has_dot4``."""
        return self.call(f"llvm.x86.avx512.vpdpbusd.{32 * total.lanes}", total.value.type, total, x, y)

    def pairs8(self, x: Vec, y: Vec) -> Vec:
        """int16 [16]: x[2t] y[2t] + x[2t + 1] y[2t + 1], x unsigned and y signed int8 [32], if that is below 2**15."""
        if self.instructions != "plain":
            return self.call("llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(I16, 16), x, y)
        x, y = x.view(I16), y.view(I16)
        return (x & 255) * (y << 8).arithmetic_shift(8) + (x >> 8) * y.arithmetic_shift(8)

    def pairs16(self, x: Vec, y: Vec) -> Vec:
        """int32: x[2t] y[2t] + x[2t + 1] y[2t + 1], x and y int16, two for each lane."""
        if self.instructions != "plain":
            name = "avx2.pmadd.wd" if x.lanes == 16 else "avx512.pmaddw.d.512"
            return self.call(f"llvm.x86.{name}", ir.VectorType(I32, x.lanes // 2), x, y)
        x, y = x.view(I32), y.view(I32)
        low = (x << 16).arithmetic_shift(16) * (y << 16).arithmetic_shift(16)
        return low + x.arithmetic_shift(16) * y.arithmetic_shift(16)

    def moved_sign(self, x: Vec, y: Vec) -> Vec:
        """y with the signs of x multiplied in, so that ``|x| * result = x * y``; int8 [32], y above -128."""
        if self.instructions != "plain":
            return self.call("llvm.x86.avx2.psign.b", y.value.type, y, x)
        return (-y).select(x.below_zero(), y)

    def magnitude(self, x: Vec) -> Vec:
        """``|x|`` of int8 lanes, unsigned: that of -128 is 128."""
        return (-x).select(x.below_zero(), x)

    def lookup(self, index: Vec, values: Sequence[int]) -> Vec:
        """The entries, 16 bytes, that the int8 lanes (0 .. 15) of ``index`` [32] choose."""
        if self.instructions != "plain":
            table = self.constant(I8, [value & 255 for value in values] * 2)
            return self.call("llvm.x86.avx2.pshuf.b", table.value.type, table, index)
        # A tree of choices: bit 0 of the index halves the candidates, then bit 1, ...
        candidates = [self.constant(I8, [value & 255] * index.lanes) for value in values]
        for bit in range(4):
            off = (index & (1 << bit)).is_zero()
            candidates = [a.select(off, b) for a, b in zip(candidates[::2], candidates[1::2], strict=True)]
        return candidates[0]

    def scalars(self, x: Vec) -> list[ir.Value]:
        """Unsigned integer lanes, one by one, as int64."""
        return [self.builder.zext(x.extract(i), I64) for i in range(x.lanes)]

    def load_scalars(self, pointer: ir.Value, offset: int, lane: ir.IntType, step: int) -> list[ir.Value]:
        """Eight unsigned integers in memory, ``step`` bytes apart, as int64."""
        return [self.builder.zext(self._load(pointer, offset + step * i, lane), I64) for i in range(8)]

    def gather(self, table: ir.Value, index: Sequence[ir.Value], n: int) -> list[Vec]:
        """The entries, n words of four bytes each, of a table that eight int64 choose: n vectors int32 [8], the k-th of the
        words k; n is 1 or 2."""
        b, kind = self.builder, ir.IntType(32 * n)
        entries = b.bitcast(table, kind.as_pointer())

        def chosen(lanes: Sequence[int]) -> Vec:
            found = ir.Constant(ir.VectorType(kind, len(lanes)), ir.Undefined)
            for k, i in enumerate(lanes):
                entry = b.load(b.gep(entries, [index[i]]), align=1)
                found = b.insert_element(found, entry, ir.Constant(I32, k))
            return Vec(b, found).view(I32)

        if n == 1:
            return [chosen(range(8))]
        # In this order of lanes, one instruction makes a vector of the words k of all entries.
        low, high = chosen((0, 1, 4, 5)), chosen((2, 3, 6, 7))
        return [low.shuffle([k, 2 + k, 8 + k, 10 + k, 4 + k, 6 + k, 12 + k, 14 + k], high) for k in range(2)]


def data_of(context, builder, array_type, array) -> ir.Value:
    """The address of an array's first byte, in the code of an intrinsic of Numba."""
    if array_type.layout != "C":
        raise TypeError(f"a kernel needs contiguous arrays, not {array_type}")
    return builder.bitcast(context.make_array(array_type)(context, builder, array).data, I8.as_pointer())
