"""The atoms of the CPU backend: short vector operations on integers, each beside its law.

LLVM turns a plain loop over bytes into vector code only when it can prove that source and target do not overlap,
which it cannot here.  So the loops that do most of the engine's work are written as portable LLVM vector operations.
Only one instruction is named, x86's ``vpmaddwd``; other processors use a portable equivalent.  All of them are integer
operations, exact in any order, and each has a ``_law``: the plain loop that it must agree with, as tests check.

Arrays are one-dimensional and contiguous; indices are not checked.
"""

import platform
from collections.abc import Callable, Sequence

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.extending import intrinsic

_I8, _I16, _I32, _I64 = (ir.IntType(n) for n in (8, 16, 32, 64))


def _pointer(
    context: BaseContext, builder: ir.IRBuilder, array_type: types.Array, array: ir.Value, index: ir.Value
) -> ir.Value:
    """Address of ``array[index]``."""
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def _load(builder: ir.IRBuilder, pointer: ir.Value, lane: ir.IntType, n: int) -> ir.Value:
    """n consecutive lanes as one vector; no alignment is assumed beyond that of a lane."""
    vector = builder.bitcast(pointer, ir.VectorType(lane, n).as_pointer())
    return builder.load(vector, align=lane.width // 8)


def _store(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=value.type.element.width // 8)


def _splat(builder: ir.IRBuilder, scalar: ir.Value, lane: ir.IntType, n: int) -> ir.Value:
    """A vector with the low bits of an integer in every lane."""
    if scalar.type.width > lane.width:
        scalar = builder.trunc(scalar, lane)
    vector = builder.insert_element(ir.Constant(ir.VectorType(lane, n), ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, n), [0] * n)
    return builder.shuffle_vector(vector, vector, zeros)


def _constant(lane: ir.IntType, values: Sequence[int]) -> ir.Value:
    return ir.Constant(ir.VectorType(lane, len(values)), list(values))


# --- dot products ----------------------------------------------------------------------------------------------

_AVX2 = platform.machine().lower() in ("x86_64", "amd64") and get_host_cpu_features().get("avx2", False)
_PAIRS = 16


def _shuffle(builder: ir.IRBuilder, x: ir.Value, y: ir.Value, lanes: Sequence[int]) -> ir.Value:
    return builder.shuffle_vector(x, y, _constant(_I32, lanes))


def _pair_sums(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """x, y int16 [16] to int32 [8]: x[2t] y[2t] + x[2t + 1] y[2t + 1].

    x86 has one instruction for it, which LLVM does not find when the sums continue as vectors, so it is named here.
    """
    half = ir.VectorType(_I32, _PAIRS // 2)
    if _AVX2:
        operand = ir.VectorType(_I16, _PAIRS)
        function = ir.FunctionType(half, [operand, operand])
        return builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.x86.avx2.pmadd.wd"), [x, y])
    even, odd = range(0, _PAIRS, 2), range(1, _PAIRS, 2)
    products = [
        builder.mul(builder.sext(_shuffle(builder, x, x, t), half), builder.sext(_shuffle(builder, y, y, t), half))
        for t in (even, odd)
    ]
    return builder.add(*products)


def _make_dot_four(n: int) -> Callable[..., ir.Value]:
    """Four rows at once: the activations are widened once, and the four sums are stored as one vector."""

    @intrinsic
    def dot_four(typingctx, w, i, stride, a, j, out, k):  # type: ignore[no-untyped-def]
        def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
            rows = [_pointer(context, builder, sig.args[0], args[0], args[1])]
            for _ in range(3):
                rows.append(builder.gep(rows[-1], [args[2]]))
            activations = _pointer(context, builder, sig.args[3], args[3], args[4])
            totals: list[ir.Value] = [None] * 4
            for at in range(0, n, _PAIRS):
                offset = [ir.Constant(_I64, at)]
                y = _load(builder, builder.gep(activations, offset), _I8, _PAIRS)
                y = builder.sext(y, ir.VectorType(_I16, _PAIRS))
                for r, row in enumerate(rows):
                    part = _pair_sums(builder, _load(builder, builder.gep(row, offset), _I16, _PAIRS), y)
                    totals[r] = part if totals[r] is None else builder.add(totals[r], part)

            def folded(x: ir.Value, y: ir.Value, n: int) -> ir.Value:
                """Sums of neighbours of x, then of y."""
                even = _shuffle(builder, x, y, range(0, 2 * n, 2))
                return builder.add(even, _shuffle(builder, x, y, range(1, 2 * n, 2)))

            quarters = [
                builder.add(_shuffle(builder, t, t, range(4)), _shuffle(builder, t, t, range(4, 8))) for t in totals
            ]
            pairs = folded(quarters[0], quarters[1], 4), folded(quarters[2], quarters[3], 4)
            _store(builder, folded(*pairs, 4), _pointer(context, builder, sig.args[5], args[5], args[6]))
            return context.get_dummy_value()

        return types.void(w, types.int64, types.int64, a, types.int64, out, types.int64), codegen

    return dot_four


dot256_four = _make_dot_four(256)
"""dot256_four(w, i, stride, a, j, out, k): out[k + r] = sum(w[i + r stride + t] * a[j + t] for t in range(256)) for
four rows r; w int16, a int8, out int32."""
dot32_four = _make_dot_four(32)
"""dot32_four(w, i, stride, a, j, out, k): out[k + r] = sum(w[i + r stride + t] * a[j + t] for t in range(32)) for
four rows r; w int16, a int8, out int32."""


@intrinsic
def dot16(typingctx, m, i, s, j):  # type: ignore[no-untyped-def]
    """dot16(m, i, s, j): sum(m[i + t] * s[j + t] for t in range(16)) as int32; m and s int16."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        x = _load(builder, _pointer(context, builder, sig.args[0], args[0], args[1]), _I16, _PAIRS)
        y = _load(builder, _pointer(context, builder, sig.args[2], args[2], args[3]), _I16, _PAIRS)
        sums = _pair_sums(builder, x, y)
        function = ir.FunctionType(_I32, [sums.type])
        reduce = cgutils.get_or_insert_function(builder.module, function, "llvm.vector.reduce.add.v8i32")
        return builder.call(reduce, [sums])

    return types.int32(m, types.int64, s, types.int64), codegen


@njit
def dot_law(w, i, a, j, n):  # type: ignore[no-untyped-def]
    """What dot16 and each row of dot256_four and dot32_four compute."""
    total = 0
    for t in range(n):
        total += w[i + t] * a[j + t]
    return total


# --- unpacking -------------------------------------------------------------------------------------------------


def _byte_operation(n: int, extra: int, body: Callable[..., ir.Value]) -> Callable[..., ir.Value]:
    """An intrinsic ``f(w, j, src, i, *extra)`` that fills w[j : j + n] from ``body(builder, n, load, *extra)``,
    where ``load(index)`` gives n bytes of src as a vector of int16 and extras are int64 scalars."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        def load(index: ir.Value, signed: bool = False) -> ir.Value:
            data = _load(builder, _pointer(context, builder, sig.args[2], args[2], index), _I8, n)
            extend = builder.sext if signed else builder.zext
            return extend(data, ir.VectorType(_I16, n))

        value = body(builder, n, load, args[3], *args[4:])
        _store(builder, value, _pointer(context, builder, sig.args[0], args[0], args[1]))
        return context.get_dummy_value()

    # intrinsic() reads the number of arguments from the signature, so each arity is spelled out.
    if extra == 0:

        @intrinsic
        def operation0(typingctx, w, j, src, i):  # type: ignore[no-untyped-def]
            return types.void(w, types.int64, src, types.int64), codegen

        return operation0
    if extra == 2:

        @intrinsic
        def operation2(typingctx, w, j, src, i, a, b):  # type: ignore[no-untyped-def]
            return types.void(w, types.int64, src, *(types.int64,) * 3), codegen

        return operation2
    if extra == 3:

        @intrinsic
        def operation3(typingctx, w, j, src, i, a, b, c):  # type: ignore[no-untyped-def]
            return types.void(w, types.int64, src, *(types.int64,) * 4), codegen

        return operation3
    if extra == 4:

        @intrinsic
        def operation4(typingctx, w, j, src, i, a, b, c, d):  # type: ignore[no-untyped-def]
            return types.void(w, types.int64, src, *(types.int64,) * 5), codegen

        return operation4

    @intrinsic
    def operation8(typingctx, w, j, src, i, a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
        return types.void(w, types.int64, src, *(types.int64,) * 9), codegen

    return operation8


def _bits(
    builder: ir.IRBuilder, load: Callable[..., ir.Value], n: int, i: ir.Value, shift: ir.Value, mask: ir.Value
) -> ir.Value:
    shifted = builder.lshr(load(i), _splat(builder, shift, _I16, n))
    return builder.and_(shifted, _splat(builder, mask, _I16, n))


def _scaled(builder: ir.IRBuilder, n: int, value: ir.Value, add: ir.Value, mul: ir.Value) -> ir.Value:
    return builder.mul(builder.add(value, _splat(builder, add, _I16, n)), _splat(builder, mul, _I16, n))


def _body_bits(
    builder: ir.IRBuilder,
    n: int,
    load: Callable[..., ir.Value],
    i: ir.Value,
    shift: ir.Value,
    mask: ir.Value,
    add: ir.Value,
    mul: ir.Value,
) -> ir.Value:
    return _scaled(builder, n, _bits(builder, load, n, i, shift, mask), add, mul)


def _body_bits_high(
    builder: ir.IRBuilder, n: int, load: Callable[..., ir.Value], i: ir.Value, *args: ir.Value
) -> ir.Value:
    shift, mask, k, high_shift, high_mask, up, add, mul = args
    low = _bits(builder, load, n, i, shift, mask)
    high = builder.shl(_bits(builder, load, n, k, high_shift, high_mask), _splat(builder, up, _I16, n))
    return _scaled(builder, n, builder.or_(low, high), add, mul)


def _body_nibbles_word(
    builder: ir.IRBuilder,
    n: int,
    load: Callable[..., ir.Value],
    i: ir.Value,
    shift: ir.Value,
    word: ir.Value,
    add: ir.Value,
) -> ir.Value:
    low = _bits(builder, load, n, i, shift, ir.Constant(_I64, 15))
    lanes = _splat(builder, word, _I16, n)
    high = builder.lshr(lanes, _constant(_I16, range(n)))
    high = builder.shl(builder.and_(high, _constant(_I16, [1] * n)), _constant(_I16, [4] * n))
    return builder.add(builder.or_(low, high), _splat(builder, add, _I16, n))


def _lookup_body(table: Sequence[int]) -> Callable[..., ir.Value]:
    def body(
        builder: ir.IRBuilder, n: int, load: Callable[..., ir.Value], i: ir.Value, shift: ir.Value, mul: ir.Value
    ) -> ir.Value:
        index = _bits(builder, load, n, i, shift, ir.Constant(_I64, 15))
        # A tree of selects, one level per bit of the index: no gather, and no shuffle that exists only on x86.
        level = [_constant(_I16, [value] * n) for value in table]
        for bit in range(4):
            on = builder.icmp_unsigned(
                "!=", builder.and_(index, _constant(_I16, [1 << bit] * n)), _constant(_I16, [0] * n)
            )
            level = [builder.select(on, level[t + 1], level[t]) for t in range(0, len(level), 2)]
        return builder.mul(level[0], _splat(builder, mul, _I16, n))

    return body


bits16 = _byte_operation(16, 4, _body_bits)
"""bits16(w, j, src, i, shift, mask, add, mul): w[j + t] = (((src[i + t] >> shift) & mask) + add) * mul, t < 16."""
bits32 = _byte_operation(32, 4, _body_bits)
"""bits32(w, j, src, i, shift, mask, add, mul): w[j + t] = (((src[i + t] >> shift) & mask) + add) * mul, t < 32."""
bits16_high = _byte_operation(16, 8, _body_bits_high)
"""bits16_high(w, j, src, i, shift, mask, k, high_shift, high_mask, up, add, mul): w[j + t] = ((((src[i + t] >> shift) & mask)
| ((src[k + t] >> high_shift) & high_mask) << up) + add) * mul, t < 16."""
bits32_high = _byte_operation(32, 8, _body_bits_high)
"""bits32_high(w, j, src, i, shift, mask, k, high_shift, high_mask, up, add, mul): w[j + t] = ((((src[i + t] >> shift) & mask)
| ((src[k + t] >> high_shift) & high_mask) << up) + add) * mul, t < 32."""
nibbles16_word = _byte_operation(16, 3, _body_nibbles_word)
"""nibbles16_word(w, j, src, i, shift, word, add): w[j + t] = (((src[i + t] >> shift) & 15) | ((word >> t) & 1) << 4)
+ add, t < 16."""
bytes32 = _byte_operation(32, 0, lambda builder, n, load, i: load(i, signed=True))
"""bytes32(w, j, src, i): w[j + t] = src[i + t] read as int8, t < 32."""

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The nonlinear 4-bit grid of IQ4_NL and IQ4_XS."""
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The values of the e2m1 floats of MXFP4, doubled so that they are integers."""

iq4_16 = _byte_operation(16, 2, _lookup_body(IQ4_VALUES))
"""iq4_16(w, j, src, i, shift, mul): w[j + t] = IQ4_VALUES[(src[i + t] >> shift) & 15] * mul, t < 16."""
fp4_16 = _byte_operation(16, 2, _lookup_body(FP4_VALUES))
"""fp4_16(w, j, src, i, shift, mul): w[j + t] = FP4_VALUES[(src[i + t] >> shift) & 15] * mul, t < 16."""


@intrinsic
def signed8(typingctx, w, j, src, i, signs, mul):  # type: ignore[no-untyped-def]
    """signed8(w, j, src, i, signs, mul): w[j + t] = src[i + t] * mul, negated where bit t of signs is set, t < 8."""

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        data = _load(builder, _pointer(context, builder, sig.args[2], args[2], args[3]), _I8, 8)
        value = builder.zext(data, ir.VectorType(_I16, 8))
        bit = builder.and_(_splat(builder, args[4], _I16, 8), _constant(_I16, [1 << t for t in range(8)]))
        on = builder.icmp_unsigned("!=", bit, _constant(_I16, [0] * 8))
        value = builder.mul(value, _splat(builder, args[5], _I16, 8))
        value = builder.select(on, builder.sub(_constant(_I16, [0] * 8), value), value)
        _store(builder, value, _pointer(context, builder, sig.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(w, types.int64, src, *(types.int64,) * 3), codegen


@njit
def bits_law(w, j, src, i, shift, mask, k, high_shift, high_mask, up, add, mul, n):  # type: ignore[no-untyped-def]
    """What the unpacking atoms compute; high_mask = 0 where there are no high bits."""
    for t in range(n):
        value = (src[i + t] >> shift) & mask
        value |= ((src[k + t] >> high_shift) & high_mask) << up
        w[j + t] = (value + add) * mul


# --- weighted sums of rows -------------------------------------------------------------------------------------

LANES = 64


@intrinsic
def weighted_sum64(typingctx, c, i, n, rows, j, stride, out, k):  # type: ignore[no-untyped-def]
    """weighted_sum64(c, i, n, rows, j, stride, out, k): for 64 lanes t,
    out[k + t] = fma(c[i + n - 1], rows[j + (n - 1) stride + t], ... fma(c[i], rows[j + t], 0)): one chain per lane.

    c and out float32; rows float32, or uint16 holding float16, which are widened exactly.
    """

    def codegen(context, builder, sig, args):  # type: ignore[no-untyped-def]
        f32 = ir.FloatType()
        vector = ir.VectorType(f32, LANES)
        coefficients = _pointer(context, builder, sig.args[0], args[0], args[1])
        pointer = _pointer(context, builder, sig.args[3], args[3], args[4])
        half = sig.args[3].dtype == types.uint16
        total = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * LANES))
        with cgutils.for_range(builder, args[2]) as loop:
            at = builder.gep(pointer, [builder.mul(loop.index, args[5])])
            if half:
                row = builder.fpext(_load_as(builder, at, ir.HalfType(), 2), vector)
            else:
                row = _load_as(builder, at, f32, 4)
            weight = builder.load(builder.gep(coefficients, [loop.index]))
            lanes = builder.insert_element(ir.Constant(vector, ir.Undefined), weight, ir.Constant(_I32, 0))
            lanes = builder.shuffle_vector(lanes, lanes, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))
            name = f"llvm.fma.v{LANES}f32"
            fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)
            builder.store(builder.call(fma, [lanes, row, builder.load(total)]), total)
        target = _pointer(context, builder, sig.args[6], args[6], args[7])
        builder.store(builder.load(total), builder.bitcast(target, vector.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(c, types.int64, types.int64, rows, types.int64, types.int64, out, types.int64), codegen


def _load_as(builder: ir.IRBuilder, pointer: ir.Value, lane: ir.Type, align: int) -> ir.Value:
    return builder.load(builder.bitcast(pointer, ir.VectorType(lane, LANES).as_pointer()), align=align)
