"""Entries: wrappers of kernels that read the arguments from memory, so that all kernels are called in the same way.

A kernel is a compiled function of arrays and numbers whose last two arguments are the range of items to compute.  Its entry
has the signature (address, first, last).  It reads the other arguments from a record at ``address`` and calls the kernel.  A
record consists of int64 words: the address of the data and the shape for an array, the value for a number.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.typing.typeof import typeof
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from engine.compile import cache as kernel_cache
from engine.compile.jobs import size_of
from engine.compile.numba_cache import EntryCache

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_RANGE = (types.int64,) * 3
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int32, *(ctypes.c_void_p,) * 2, *(ctypes.c_int64,) * 3)
"""Numba's calling convention: places for the result and for an error, and the arguments; returns a status, 0 for success."""


@dataclass(frozen=True)
class Entry:
    """The entry of a kernel for given types of arguments, without the range.

    home, name: the module and the name of the kernel; constants: the constants of a member of a family
    (``engine/compile/family.py``), or None.
    """

    home: str
    name: str
    constants: tuple[Any, ...] | None
    signature: tuple[Any, ...]
    part: ClassVar[kernel_cache.Part] = "cpu"

    @property
    def kernel(self) -> Any:
        """The compiled function."""
        found = getattr(import_module(self.home), self.name)
        return found if self.constants is None else found(*self.constants)

    def _dispatcher(self) -> Any:
        if self not in _MADE:
            kernel, arguments = self.kernel, _reader(self.signature)

            def entry(address, first, last):
                kernel(*arguments(address, first, last))

            constants = "" if self.constants is None else f"[{','.join(map(str, self.constants))}]"
            name = f"{self.home}.{self.name}{constants}"
            made = njit(error_model="numpy")(entry)
            made._cache = EntryCache(entry, name, self.signature)
            _MADE[self] = made
        return _MADE[self]

    def kept(self) -> bool:
        """Whether it has been compiled, in this process or an earlier one."""
        made = self._dispatcher()
        return _RANGE in made.overloads or kernel_cache.has("cpu", made._cache.file(_RANGE, made.targetctx.codegen()))

    def compile(self) -> None:
        """Compile it, or load it from disk if it has been compiled before."""
        self._dispatcher().compile(_RANGE)

    def size(self) -> int:
        """An estimate of the time of compiling: bytes of bytecode of the kernel and of the functions that it calls."""
        family = None if self.constants is None else getattr(import_module(self.home), self.name)
        if family is None:
            return size_of(self.kernel.py_func)
        # The functions of a family emit code, and more of it than their own size.
        return 4 * size_of(family.__wrapped__)

    def function(self) -> Callable[[Sequence[Any], int, int], None]:
        """``function(arguments, first, last)`` computes items [first, last) in the thread that calls it, without Python's
        lock, so that other threads go on.  It raises MemoryError if the kernel fails, as kernels do only if they get no
        memory."""
        compiled = _FUNCTION(self.address())

        def call(arguments: Sequence[Any], first: int, last: int) -> None:
            record = np.array(words(arguments), np.int64)
            result, error = ctypes.c_void_p(), ctypes.c_void_p()
            if compiled(ctypes.byref(result), ctypes.byref(error), record.ctypes.data, first, last):
                raise MemoryError(f"{self.name} got no memory")

        return call

    def address(self) -> int:
        """The address of its machine code, which is valid until the process ends."""
        self.compile()
        result = self._dispatcher().overloads[_RANGE]
        return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))


_ENTRIES: dict[Any, Entry] = {}
_MADE: dict[Entry, Any] = {}


def entry_of(kernel: Any, arguments: Sequence[Any]) -> Entry:
    """The entry of a kernel for arguments of the same types as these."""
    signature = tuple(_type_of(argument) for argument in arguments)
    key = kernel, signature
    if key not in _ENTRIES:
        family, constants = getattr(kernel, "family", (None, None))
        named = kernel.py_func if family is None else family
        _ENTRIES[key] = Entry(named.__module__, named.__name__, constants, signature)
    return _ENTRIES[key]


def _type_of(argument: Any) -> Any:
    if isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise TypeError(f"kernels take contiguous arrays, not one with strides {argument.strides}")
        return types.Array(typeof(argument.dtype).dtype, argument.ndim, "C")
    if isinstance(argument, (bool, np.bool_)):
        return types.boolean
    return types.int64 if isinstance(argument, (int, np.integer)) else types.float32


def words(arguments: Sequence[Any]) -> list[int]:
    """The record of these arguments."""
    record: list[int] = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            record += [argument.ctypes.data, *argument.shape]
        elif isinstance(argument, (bool, int, np.bool_, np.integer)):
            record.append(int(argument))
        else:
            record.append(int(np.float32(argument).view(np.int32)))
    return record


def _reader(signature: Sequence[Any]) -> Any:
    """An intrinsic ``f(address, first, last)`` that returns the arguments in the record at ``address`` and the range."""

    @intrinsic
    def arguments(typingctx, address, first, last):
        def codegen(context, builder, sig, args):
            record, at = builder.inttoptr(args[0], _I64.as_pointer()), 0
            values = []

            def word() -> Any:
                nonlocal at
                at += 1
                return builder.load(builder.gep(record, [ir.Constant(_I64, at - 1)]))

            for kind in signature:
                if isinstance(kind, types.Array):
                    array = context.make_array(kind)(context, builder)
                    data = builder.inttoptr(word(), array.data.type)
                    shape = [word() for _ in range(kind.ndim)]
                    size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
                    strides = [ir.Constant(_I64, size)]
                    for length in reversed(shape[1:]):
                        strides.insert(0, builder.mul(strides[0], length))
                    populate_array(array, data, shape, strides, ir.Constant(_I64, size), None)
                    values.append(array._getvalue())
                elif kind == types.boolean:
                    values.append(builder.trunc(word(), ir.IntType(1)))
                elif kind == types.float32:
                    values.append(builder.bitcast(builder.trunc(word(), _I32), ir.FloatType()))
                else:
                    values.append(word())
            return context.make_tuple(builder, sig.return_type, [*values, *args[1:]])

        return types.Tuple((*signature, types.int64, types.int64))(*_RANGE), codegen

    return arguments
