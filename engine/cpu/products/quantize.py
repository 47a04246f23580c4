"""Activations as int8 with one scale per unit.

Formula: d = amax / 127 over a unit; q = round(x * (127 / amax)), ties to even; s = the sum of each 16 of q.
    A unit with amax < 2**-100 counts as zero, because 127 / amax would overflow where amax is subnormal.
Shapes: x float32 [n, K]; q int8 [n, K], d float32 [n, K / unit], s int16 [n, K / 16]; unit 256, 128, 64, 32 or 16.
Who owns what: an item is a unit: item t * U + u is unit u of row t.
Reduction order: none; a maximum and sums of integers are exact in any order.
Bytes moved: 4 bytes of x in, 1.1 out per value.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from engine.compile.family import family
from engine.cpu.glu import activate
from engine.cpu.simd import F32, I8, I16, I32, Code, data_of, host
from engine.gguf.quants import TINY

ROUND = 12582912.0
"""1.5 * 2**23: adding it to |x| < 2**22 leaves the nearest integer (ties to even) in the low bits of the sum."""
ROUND_BITS = 0x4B400000


def emit_unit(code: Code, unit: int, x: ir.Value, q: ir.Value, d: ir.Value, s: ir.Value) -> None:
    """Quantize the unit at x."""
    b = code.builder
    # The magnitudes of floats order as their bits do, so this is a maximum of integers, exact in any order.
    top = code.variable(code.zeros())
    step = min(unit, 32)
    with code.loop(4 * unit, 0, 4 * step) as at:
        parts = [code.load(code.at(x, at), 32 * i, I32, 8) & 0x7FFFFFFF for i in range(step // 8)]
        while len(parts) > 1:
            parts = [code.larger(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        top.set(code.larger(top.get(), parts[0]))
    bits = code.call_scalar("llvm.vector.reduce.smax.v8i32", I32, top.get())
    amax = b.bitcast(bits, F32)
    zero, most = ir.Constant(F32, 0.0), ir.Constant(F32, 127.0)
    small = b.fcmp_ordered("<", amax, ir.Constant(F32, float(TINY)))
    amax = b.select(small, zero, amax)
    inverse = code.repeat(b.select(small, zero, b.fdiv(most, amax)), 16)
    code.store(code.repeat(b.fdiv(amax, most), 1), d)
    rounding = code.constant(F32, [ROUND] * 16)
    with code.loop(unit, 0, 16) as i:
        values = code.load(x, code.times(i, 4), F32, 16)
        integers = values.fma(inverse, rounding).view(I32) - ROUND_BITS
        code.store(integers.narrow(I8), q, i)
        total = code.call_scalar("llvm.vector.reduce.add.v16i32", I32, integers)
        code.store(code.repeat(b.trunc(total, I16), 1), s, b.lshr(i, ir.Constant(i.type, 3)))


def _make_quantize(unit: int) -> Callable[..., Any]:
    @intrinsic
    def quantize(typingctx, x, q, d, s, item):
        def codegen(context, builder, sig, args):
            code = Code(builder, host())
            sizes = (4 * unit, unit, 4, unit // 8)
            data = [data_of(context, builder, kind, array) for kind, array in zip(sig.args[:4], args[:4], strict=True)]
            emit_unit(code, unit, *(code.at(p, code.times(args[4], n)) for p, n in zip(data, sizes, strict=True)))
            return context.get_dummy_value()

        return types.void(x, q, d, s, types.int64), codegen

    return quantize


_quantize256, _quantize128, _quantize64, _quantize32, _quantize16 = map(_make_quantize, (256, 128, 64, 32, 16))


@njit(cache=True, error_model="numpy")
def quantize_rows(x, unit, q, d, s, first, last):
    """Quantize the units [first, last) of all rows of x."""
    for item in range(first, last):
        if unit == 256:
            _quantize256(x, q, d, s, item)
        elif unit == 32:
            _quantize32(x, q, d, s, item)
        elif unit == 16:
            _quantize16(x, q, d, s, item)
        elif unit == 64:
            _quantize64(x, q, d, s, item)
        else:
            _quantize128(x, q, d, s, item)


@family
def quantize_activated(kind: str) -> Any:
    """The kernel for the results of an activation (its name in ``engine/ops/activation.py``)."""
    activated = activate(kind)

    @njit(cache=True, error_model="numpy")
    def quantize_activated(gate, up, a, b, c, d, y, unit, q, da, s, first, last):
        """y = the activation of gate and up with the parameters a to d, and y in int8, for the units [first, last) of all
        rows."""
        activated(gate, up, a, b, c, d, y, first * unit, last * unit)
        quantize_rows(y, unit, q, da, s, first, last)

    return quantize_activated
