"""A backend: arithmetic, memory, an executor and a device.

There are two backends: ``engine/cpu/backend.py`` and ``engine/cuda/backend.py``.  Their results have the same bits.  The four
protocols document every operation with its formula and shapes.  A backend documents only what is specific to it.
"""

from typing import Any, Protocol, TypeAlias

from engine.arrays import A, Array, M, Matrix, V, Value
from engine.ops.arithmetic import Arithmetic
from engine.ops.device import DeviceOperations
from engine.ops.executor import Executor
from engine.ops.memory import MemoryOperations


class Operations(Arithmetic[A, V, M], MemoryOperations[A, M], Executor[A], DeviceOperations, Protocol[A, V, M]):
    """A backend with arrays ``A``, values ``V`` (arrays or deferred results) and matrices ``M``."""


AnyOperations: TypeAlias = Operations[Any, Any, Any]
"""A backend of any kind."""

Ops: TypeAlias = Operations[Array, Value, Matrix]
"""A backend of any device, with the types that models and their callers use."""
