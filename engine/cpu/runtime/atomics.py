"""Primitives for threads: atomic integers, waiting, and calls of compiled kernels by their address.

All functions are called from compiled code.  Arrays are int64 and contiguous.  Indices are not checked.
"""

import platform
import sys
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_X86 = platform.machine().lower() in ("x86_64", "amd64")
_LINUX = sys.platform.startswith("linux")


def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


@intrinsic
def load(typingctx, a, i):
    """Atomic load of a[i].  Everything that another thread wrote before it stored this value is visible afterwards."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(_element(context, builder, sig.args[0], *args), "seq_cst", 8)

    return types.int64(a, types.int64), codegen


@intrinsic
def store(typingctx, a, i, value):
    """Atomic store a[i] = value.  Everything that this thread wrote before is visible to threads that load the value."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[2], _element(context, builder, sig.args[0], *args[:2]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(a, types.int64, types.int64), codegen


@intrinsic
def swap_if(typingctx, a, i, expected, value):
    """Atomic compare-and-swap: set a[i] to value if it equals ``expected``; returns whether it did."""

    def codegen(context, builder, sig, args):
        place = _element(context, builder, sig.args[0], *args[:2])
        return builder.extract_value(builder.cmpxchg(place, args[2], args[3], "seq_cst", "seq_cst"), 1)

    return types.boolean(a, types.int64, types.int64, types.int64), codegen


@intrinsic
def add(typingctx, a, i, value):
    """Atomic addition of value to a[i]; returns the previous value."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", _element(context, builder, sig.args[0], *args[:2]), args[2], "seq_cst")

    return types.int64(a, types.int64, types.int64), codegen


# --- waiting ---------------------------------------------------------------------------------------------------


@intrinsic
def pause(typingctx):
    """Wait for about 40 cycles without using resources of the core that its other hardware thread may need."""

    def codegen(context, builder, sig, args):
        if _X86:
            hint = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(ir.VoidType(), []), "llvm.x86.sse2.pause"
            )
            builder.call(hint, [])
        return context.get_dummy_value()

    return types.void(), codegen


def _system_call(builder: Any, name: str, arguments: Sequence[Any], result: Any = _I64) -> Any:
    """Call a function of the C library."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine(), 0) if _LINUX else 0
_WAIT, _WAKE = 128, 129  # FUTEX_WAIT and FUTEX_WAKE, private to the process
_EVERYONE = 2**31 - 1


def _futex(builder: Any, place: Any, operation: int, value: Any, timeout: Any) -> None:
    zero = ir.Constant(_I64, 0)
    given = ir.Constant(_I64, _FUTEX), builder.ptrtoint(place, _I64), ir.Constant(_I64, operation), value, timeout
    _system_call(builder, "syscall", (*given, zero, zero))


@intrinsic
def yield_core(typingctx):
    """Let another runnable thread use this core."""

    def codegen(context, builder, sig, args):
        _system_call(builder, "SwitchToThread" if sys.platform == "win32" else "sched_yield", (), _I32)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def sleep_while(typingctx, a, i, value, timeout):
    """Sleep until ``wake`` is called or the timeout has passed, unless the low 32 bits of a[i] differ from those of
    ``value``. timeout int64 [2]: seconds, nanoseconds.  On systems without futexes, sleep for a fixed short time."""

    def codegen(context, builder, sig, args):
        if _FUTEX:
            place = _element(context, builder, sig.args[0], *args[:2])
            low = builder.and_(args[2], ir.Constant(_I64, 0xFFFFFFFF))
            time = context.make_array(sig.args[3])(context, builder, args[3]).data
            _futex(builder, place, _WAIT, low, builder.ptrtoint(time, _I64))
        elif sys.platform == "win32":
            _system_call(builder, "Sleep", [ir.Constant(_I32, 1)], ir.VoidType())
        else:
            _system_call(builder, "usleep", [ir.Constant(_I32, 50)], _I32)
        return context.get_dummy_value()

    return types.void(a, types.int64, types.int64, timeout), codegen


@intrinsic
def wake(typingctx, a, i):
    """Wake all threads that sleep in ``sleep_while`` for a[i]."""

    def codegen(context, builder, sig, args):
        if _FUTEX:
            place = _element(context, builder, sig.args[0], *args)
            _futex(builder, place, _WAKE, ir.Constant(_I64, _EVERYONE), ir.Constant(_I64, 0))
        return context.get_dummy_value()

    return types.void(a, types.int64), codegen


_MONOTONIC = 6 if sys.platform == "darwin" else 1
_NS_PER_COUNT = 100
"""Nanoseconds per count of Windows' performance counter."""


@intrinsic
def nanoseconds(typingctx):
    """The time since some moment in the past, in nanoseconds."""

    def codegen(context, builder, sig, args):
        place = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        first = builder.bitcast(place, _I64.as_pointer())
        if sys.platform == "win32":
            _system_call(builder, "QueryPerformanceCounter", [first], _I32)
            return builder.mul(builder.load(first), ir.Constant(_I64, _NS_PER_COUNT))
        _system_call(builder, "clock_gettime", [ir.Constant(_I32, _MONOTONIC), first], _I32)
        seconds = builder.mul(builder.load(first), ir.Constant(_I64, 10**9))
        return builder.add(seconds, builder.load(builder.gep(first, [ir.Constant(_I64, 1)])))

    return types.int64(), codegen


# --- calls by address ------------------------------------------------------------------------------------------


@intrinsic
def fetch(typingctx, address, i):
    """The i-th int64 at an address."""

    def codegen(context, builder, sig, args):
        return builder.load(builder.gep(builder.inttoptr(args[0], _I64.as_pointer()), [args[1]]))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def load_at(typingctx, address):
    """Atomic load of the int64 at an address, as in ``load``."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def call(typingctx, function, arguments, first, last):
    """Call the entry (``engine/cpu/runtime/entry.py``) at the address ``function``; returns whether it raised an error."""

    def codegen(context, builder, sig, args):
        convention, given = context.call_conv, (types.int64,) * 3
        pointer = convention.get_function_type(types.none, given).as_pointer()
        entry = builder.inttoptr(args[0], pointer)
        status, _ = convention.call_function(builder, entry, types.none, given, args[1:])
        return status.is_error

    return types.boolean(*(types.int64,) * 4), codegen
