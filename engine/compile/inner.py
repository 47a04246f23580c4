"""Compiling a function as a part of the kernel that calls it, and for nothing else.

For each function, Numba makes machine code, a wrapper for Python and a wrapper for C.  A function that only compiled
functions call needs none of them, since its callers use its intermediate code.  In a process that compiles kernels and runs
none, such a function is therefore compiled without them, and is neither loaded from disk nor stored.  This saves a quarter of
the time, and the machine code of a kernel is the same.
"""

from typing import Any
from weakref import WeakSet

from numba import _dynfunc
from numba.core import compiler, cpu
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen

_under_way = 0
"""How many functions are being compiled: a function, one that it calls, and so on."""

_INNER: WeakSet[Any] = WeakSet()
"""The libraries of functions without machine code."""


def is_inner() -> bool:
    """Whether a function that is to be loaded or stored now is one that another function calls; always False before
    :func:`install`."""
    return _under_way > 0


def forget(dispatcher: Any, signature: tuple[Any, ...]) -> None:
    """Let a function be compiled again, with machine code, if it was compiled as a part of others."""
    found = dispatcher.overloads.get(signature)
    if found is not None and found.library in _INNER:
        del dispatcher.overloads[signature]


def install() -> None:
    """Compile in this way from now on.  This process can then not run what it compiles."""
    compile_extra, get_executable = compiler.compile_extra, cpu.CPUContext.get_executable
    add_module, finalize = JITCPUCodegen._add_module, JITCodeLibrary._finalize_specific

    def compiled(*arguments: Any, flags: Any, **options: Any) -> Any:
        global _under_way
        flags.no_cfunc_wrapper = True
        flags.no_cpython_wrapper |= is_inner()
        _under_way += 1
        try:
            return compile_extra(*arguments, flags=flags, **options)
        finally:
            _under_way -= 1

    def executable(self: Any, library: Any, description: Any, environment: Any) -> Any:
        if _under_way < 2:
            return get_executable(self, library, description, environment)
        _INNER.add(library)
        # Numba finds the function by this object, which cannot be called.
        name = description.qualname.rpartition(".")[2]
        return _dynfunc.make_function(description.lookup_module(), name, "", 0, environment, (library,))

    def added(self: Any, module: Any) -> Any:
        return add_module(self, module) if _under_way < 2 else None

    def finalized(self: Any) -> None:
        if _under_way < 2:
            finalize(self)

    compiler.compile_extra = compiled
    cpu.CPUContext.get_executable = executable
    JITCPUCodegen._add_module = added
    JITCodeLibrary._finalize_specific = finalized
