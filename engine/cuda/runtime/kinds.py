"""Type names for kernel code that Python's types cannot describe: Numba infers the types when it compiles."""

from collections.abc import Callable
from typing import Any, TypeAlias

KernelCode: TypeAlias = Any
"""The result of ``@cuda.jit``.  It is compiled by ``compiler.py`` and never called."""

DeviceFunction: TypeAlias = Callable[..., Any]
"""A function that is called only in kernels, with arguments of any types that Numba can compile."""

Constant: TypeAlias = Any
"""A constant that specializes a kernel: a number, a name, a flag, or a tuple of these."""

Lowering: TypeAlias = Any
"""Numba's context for generating the LLVM code of an intrinsic."""

Handle: TypeAlias = Any
"""An opaque object of the driver bindings: a module, a stream, an event or a graph."""

Register: TypeAlias = Any
"""A value in a thread of the simulator: a NumPy scalar, a Python number, or a tuple of these."""
