"""The loops in which attention spends its time, over lanes: positions of a chunk, or elements of a value.

Formula: add_weighted: out_r[t] = fma(c_r[n - 1], x[n - 1, t], ... fma(c_r[0], x[0, t], out_r[t])) for rows r of
    coefficients and lanes t; hide: the largest of the lanes [first, last), and -inf in the others.
Shapes: c float32 [rows, n], x [n, width] float32, or float16, which is widened exactly; out float32
    [rows, width].
Who owns what: one call, one thread; four rows of coefficients are processed at once, so that x is read once for them.
Reduction order: one chain per row and lane, in rising n, from what out holds.
Bytes moved: n * width elements of x, from a cache of the CPU.

Lanes are written as portable LLVM vectors, because LLVM by itself does not keep the sums of several rows in registers, nor
find the maximum of floats with vectors.  Arrays are contiguous; indices are not checked.
"""

from collections.abc import Callable

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.extending import intrinsic
from numba.np import arrayobj

from engine.compile.family import family

LANES = 64
"""Lanes of ``hide``."""

ROWS = 4
"""The most rows of coefficients at once."""

# The sums of four rows and what they are multiplied by fit into registers: 32 of 512 bits, or 16 of 256 bits.
_WIDE = 64 if get_host_cpu_features().get("avx512f", False) else 16
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def _address(context: BaseContext, builder: ir.IRBuilder, kind: types.Array, array: ir.Value, at: ir.Value) -> ir.Value:
    return builder.gep(context.make_array(kind)(context, builder, array).data, [at])


def _load(builder: ir.IRBuilder, pointer: ir.Value, lane: ir.Type, n: int) -> ir.Value:
    vector = builder.bitcast(pointer, ir.VectorType(lane, n).as_pointer())
    return builder.load(vector, align=2 if lane == ir.HalfType() else 4)


def _splat(builder: ir.IRBuilder, value: ir.Value, n: int) -> ir.Value:
    one = builder.insert_element(ir.Constant(ir.VectorType(_F32, n), ir.Undefined), value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, n), [0] * n))


def _make_sums(half: bool, rows: int, width: int, lanes: int) -> Callable[..., None]:
    """An intrinsic for this number of rows and this width, in vectors of ``lanes``; its arguments are those of
    ``add_weighted``.  x holds float16 if ``half``, else float32, whatever its dtype."""
    vector, element = ir.VectorType(_F32, lanes), ir.HalfType() if half else _F32

    @intrinsic
    def sums(typingctx, c, i, c_stride, n, x, j, x_stride, out, k, out_stride):
        def codegen(context, builder, sig, args):
            starts = [ir.Constant(_I64, lanes * part) for part in range(width // lanes)]
            target = _address(context, builder, sig.args[7], args[7], args[8])
            targets = [builder.gep(target, [builder.mul(args[9], ir.Constant(_I64, r))]) for r in range(rows)]
            first = _address(context, builder, sig.args[0], args[0], args[1])
            coefficients = [builder.gep(first, [builder.mul(args[2], ir.Constant(_I64, r))]) for r in range(rows)]
            source = _address(context, builder, sig.args[4], args[4], ir.Constant(_I64, 0))
            source = builder.gep(builder.bitcast(source, element.as_pointer()), [args[5]])
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{lanes}f32"
            )
            places = [[builder.gep(row, [start]) for start in starts] for row in targets]
            totals = [
                [cgutils.alloca_once_value(builder, _load(builder, place, _F32, lanes)) for place in row]
                for row in places
            ]
            with cgutils.for_range(builder, args[3]) as loop:
                at = builder.gep(source, [builder.mul(loop.index, args[6])])
                parts = [_load(builder, builder.gep(at, [s]), element, lanes) for s in starts]
                if half:
                    parts = [builder.fpext(part, vector) for part in parts]
                for row, own in zip(coefficients, totals, strict=True):
                    weight = _splat(builder, builder.load(builder.gep(row, [loop.index])), lanes)
                    for part, total in zip(parts, own, strict=True):
                        builder.store(builder.call(fma, [weight, part, builder.load(total)]), total)
            for row, own in zip(places, totals, strict=True):
                for place, total in zip(row, own, strict=True):
                    builder.store(builder.load(total), builder.bitcast(place, vector.as_pointer()), align=4)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(c, i64, i64, i64, x, i64, i64, out, i64, i64), codegen

    return sums


@intrinsic
def not_inlined(typingctx):
    """Mark the function that is being compiled: it is called in many places, and each copy would take time to compile."""

    def codegen(context, builder, sig, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


@family
def add_weighted(half: bool) -> Callable[..., None]:
    """The function ``add_weighted(c, i, c_stride, rows, n, x, j, x_stride, width, out, k, out_stride)``.

    It adds to each out[k + r * out_stride + t] the products c[i + r * c_stride + m] * x[j + m * x_stride + t], m < n, for
    t < width and 1 or 4 ``rows`` r.  Indices count elements of the whole arrays, whatever their shapes; x is an array of any
    dtype that holds float16 if ``half``, else float32.
    """
    four, four_narrow = _make_sums(half, ROWS, _WIDE, 16), _make_sums(half, ROWS, 16, 16)
    # Eight chains of 256 bits hide the latency of fma, which four of 512 bits do not.
    one, one_narrow, one_lane = (_make_sums(half, 1, width, lanes) for width, lanes in ((64, 8), (16, 8), (1, 1)))

    @njit(error_model="numpy")
    def add_weighted(c, i, c_stride, rows, n, x, j, x_stride, width, out, k, out_stride):
        not_inlined()
        t = 0
        if rows == 1:
            while t + 64 <= width:
                one(c, i, c_stride, n, x, j + t, x_stride, out, k + t, out_stride)
                t += 64
            while t + 16 <= width:
                one_narrow(c, i, c_stride, n, x, j + t, x_stride, out, k + t, out_stride)
                t += 16
        else:
            while t + _WIDE <= width:
                four(c, i, c_stride, n, x, j + t, x_stride, out, k + t, out_stride)
                t += _WIDE
            while t + 16 <= width:
                four_narrow(c, i, c_stride, n, x, j + t, x_stride, out, k + t, out_stride)
                t += 16
        while t < width:
            for r in range(rows):
                one_lane(c, i + r * c_stride, 0, n, x, j + t, x_stride, out, k + r * out_stride + t, 0)
            t += 1

    return add_weighted


@intrinsic
def hide(typingctx, p, first, last):
    """hide(p, first, last): set the lanes of p float32 [64] that are not in [first, last) to -inf; returns the largest."""

    def codegen(context, builder, sig, args):
        vector, integers = ir.VectorType(_F32, 16), ir.VectorType(_I32, 16)
        zeros, low = ir.Constant(integers, [0] * 16), ir.Constant(vector, [float("-inf")] * 16)

        def splat(value: ir.Value) -> ir.Value:
            one = builder.insert_element(zeros, builder.trunc(value, _I32), ir.Constant(_I32, 0))
            return builder.shuffle_vector(one, one, zeros)

        bounds, most = [splat(bound) for bound in args[1:]], low
        for start in range(0, LANES, 16):
            lane = ir.Constant(integers, [start + t for t in range(16)])
            shown = builder.and_(builder.icmp_signed(">=", lane, bounds[0]), builder.icmp_signed("<", lane, bounds[1]))
            place = _address(context, builder, sig.args[0], args[0], ir.Constant(_I64, start))
            score = builder.select(shown, _load(builder, place, _F32, 16), low)
            builder.store(score, builder.bitcast(place, vector.as_pointer()), align=4)
            most = builder.select(builder.fcmp_ordered(">", score, most), score, most)
        for n in (8, 4, 2, 1):
            other = builder.shuffle_vector(most, most, ir.Constant(integers, [(t + n) % 16 for t in range(16)]))
            most = builder.select(builder.fcmp_ordered(">", other, most), other, most)
        return builder.extract_element(most, ir.Constant(_I32, 0))

    return types.float32(p, types.int64, types.int64), codegen


@intrinsic
def row(typingctx, x, i):
    """row(x, i): x[i] of a contiguous array x, as a view that does not keep x alive.  Numba counts the references to every
    other view with atomic instructions, which wait for the loads before them."""
    kind = types.Array(x.dtype, x.ndim - 1, "C")

    def codegen(context, builder, sig, args):
        whole, view = context.make_array(x)(context, builder, args[0]), context.make_array(kind)(context, builder)
        shape, strides = (cgutils.unpack_tuple(builder, t)[1:] for t in (whole.shape, whole.strides))
        size = cgutils.unpack_tuple(builder, whole.strides)[0]
        data = builder.gep(builder.bitcast(whole.data, ir.IntType(8).as_pointer()), [builder.mul(size, args[1])])
        arrayobj.populate_array(view, builder.bitcast(data, whole.data.type), shape, strides, whole.itemsize, None)
        return view._getvalue()

    return kind(x, types.int64), codegen


@intrinsic
def clear(typingctx, x, n):
    """clear(x, n): set the first n elements of x float32 to 0."""

    def codegen(context, builder, sig, args):
        start = _address(context, builder, sig.args[0], args[0], ir.Constant(_I64, 0))
        cgutils.memset(builder, start, builder.mul(args[1], ir.Constant(_I64, 4)), 0)
        return context.get_dummy_value()

    return types.void(x, types.int64), codegen
