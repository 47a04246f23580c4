"""The numbers in the symbols of compiled CPU functions.

Numba names machine code after a function's module, qualified name and argument types, and a number.  Functions that a
factory makes, such as those for the rows of each format, differ in the number only.  A stored kernel contains the functions
that it calls, and of those that have the same symbol in several files, only the one that is loaded first is used.  Numba
counts in each process, so that two processes could store different functions under the same symbol, and a third one would
call one of them in place of the other.

Here the number of a function of this package is a hash of what is compiled: its bytecode, its constants, its defaults and
the values of its closure, with the functions among them.  Files are shared only by processes with the same sources, so equal
numbers mean equal code, in any process and after any fork.  The number of any other function, and of one whose closure has a
value without a digest, is random.
"""

import hashlib
import os
import sys
import types as python_types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import bytecode
from numba.core.dispatcher import Dispatcher
from numba.core.extending import _Intrinsic

PACKAGE = __name__.partition(".")[0]


LIBRARIES = frozenset(("numba", "llvmlite", "numpy", *sys.stdlib_module_names)) - {"__main__"}
"""Packages whose functions and classes their names determine: the fingerprint of stored kernels has their versions."""


class NoDigest(Exception):
    """A value has no digest that is equal in all processes."""


def number(function: Any) -> int:
    """The number in the symbol of a function that is about to be compiled, 0 to 2**63 - 1."""
    if _ours(function):
        try:
            return _number(_digest(function, ()))
        except (NoDigest, RecursionError):  # the latter: a value that contains itself
            pass
    return _number(os.urandom(8))


def _number(data: bytes) -> int:
    return int.from_bytes(data[:8], "little") >> 1


def _ours(definition: Any) -> bool:
    """Whether the module of a function or class is a file of this package; the fingerprint of stored kernels covers only
    those."""
    return str(definition.__module__).partition(".")[0] == PACKAGE


def _digest(value: Any, inside: tuple[int, ...]) -> bytes:
    """32 bytes that determine how a value takes part in compiled code.  inside: the ids of the functions that this value is
    a part of.  Raises NoDigest."""
    whole = hashlib.sha256()
    for part in _parts(value, inside):
        data = part.encode() if isinstance(part, str) else part
        whole.update(len(data).to_bytes(8, "little") + data)
    return whole.digest()


def _parts(value: Any, inside: tuple[int, ...]) -> list[str | bytes]:
    """The texts and digests that determine a value."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)) or value is Ellipsis:
        return [type(value).__name__, repr(value)]
    if isinstance(value, (np.generic, np.ndarray)):
        if value.dtype.hasobject:
            raise NoDigest(value)
        # The type of an array has its layout.
        layout = repr((value.strides, value.flags.writeable, value.flags.aligned))
        return ["array", repr(value.dtype), repr(value.shape), layout, value.tobytes()]
    if isinstance(value, np.dtype):
        return ["dtype", repr(value)]
    if isinstance(value, (tuple, list)):
        fields_of_tuple = getattr(value, "_fields", ())
        return [type(value).__name__, repr(fields_of_tuple), *(_digest(one, inside) for one in value)]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted(_digest(one, inside) for one in value)]
    if isinstance(value, Mapping):
        return ["mapping", *(_digest(one, inside) for pair in value.items() for one in pair)]
    if isinstance(value, Enum):
        return ["enum", type(value).__module__, type(value).__qualname__, value.name]
    if isinstance(value, types.Type):
        return _type(value, inside)
    if isinstance(value, ir.Type):
        return ["type of LLVM", str(value)]
    if isinstance(value, Dispatcher):
        return ["dispatcher", repr(sorted(value.targetoptions.items())), *_parts(value.py_func, inside)]
    if isinstance(value, _Intrinsic):
        return ["intrinsic", *_parts(value._defn, inside)]
    if isinstance(value, python_types.CodeType):
        return _code(value, inside)
    if isinstance(value, python_types.FunctionType):
        return _function(value, inside)
    if isinstance(value, python_types.ModuleType):
        return ["module", value.__name__]
    if isinstance(value, (type, python_types.BuiltinFunctionType, np.ufunc)):
        return _named(value)
    if is_dataclass(value):
        named = [_digest(getattr(value, field.name), inside) for field in fields(value)]
        return ["dataclass", *_named(type(value)), *named]
    if _ours(type(value)) and hasattr(value, "__dict__"):
        return ["object", *_named(type(value)), _digest(dict(sorted(vars(value).items())), inside)]
    raise NoDigest(value)


def _type(value: types.Type, inside: tuple[int, ...]) -> list[str | bytes]:
    """A type of Numba.  That of a compiled function has the function as its key."""
    if isinstance(value, types.Dispatcher):
        return ["type of", *_parts(value.dispatcher, inside)]
    if " at 0x" in value.name:
        raise NoDigest(value)
    return ["type", type(value).__name__, value.name]


def _named(value: Any) -> list[str | bytes]:
    """A class or a function that its name determines: a module of this package or of a library defines it, not a function."""
    name, home = getattr(value, "__qualname__", value.__name__), str(getattr(value, "__module__", ""))
    if "<" in name or home.partition(".")[0] not in (PACKAGE, *LIBRARIES):
        raise NoDigest(value)
    return ["named", home, name]


def _code(code: python_types.CodeType, inside: tuple[int, ...]) -> list[str | bytes]:
    names = repr((code.co_names, code.co_varnames, code.co_freevars, code.co_flags, code.co_firstlineno))
    return ["code", code.co_qualname, names, code.co_code, *(_digest(one, inside) for one in code.co_consts)]


def _function(function: python_types.FunctionType, inside: tuple[int, ...]) -> list[str | bytes]:
    home: list[str | bytes] = ["function", str(function.__module__), function.__qualname__]
    if id(function) in inside:
        return home  # it calls itself
    if not _ours(function):
        return _named(function)
    inside = (*inside, id(function))
    defaults = _digest([function.__defaults__, function.__kwdefaults__], inside)
    try:
        closure = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell without a value
        raise NoDigest(function) from None
    return [*home, *_code(function.__code__, inside), defaults, _digest(closure, inside)]


_from_function = bytecode.FunctionIdentity.from_function.__func__


def _identity(cls: Any, pyfunc: Any) -> Any:
    made = _from_function(cls, pyfunc)
    made.unique_id = number(made.func)
    made.unique_name = f"{made.func_qualname}${made.unique_id}"
    return made


def install() -> None:
    """Let Numba's compiler for CPUs take the numbers of symbols from here."""
    bytecode.FunctionIdentity.from_function = classmethod(_identity)
