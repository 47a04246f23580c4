"""Names for what Python's types cannot say of kernels: Numba types them when it compiles, not where they are written."""

from collections.abc import Callable
from typing import Any, TypeAlias

KernelCode: TypeAlias = Any
"""What ``@cuda.jit`` makes of a kernel; ``compiler.py`` compiles it, and nothing calls it."""

DeviceFunction: TypeAlias = Callable[..., Any]
"""A function that only kernels call, with arguments of any types that Numba can compile it for."""

Constant: TypeAlias = Any
"""What a kernel is specialized by: a number, a name, a flag, or a tuple of these."""

Lowering: TypeAlias = Any
"""Numba's context while it makes LLVM code of an intrinsic."""

Handle: TypeAlias = Any
"""An object of the driver's bindings, which nothing looks into: a module, a stream, an event, a graph."""

Register: TypeAlias = Any
"""What a thread of the simulator computes with: a NumPy scalar, a number of Python, or a tuple of these."""
