"""The arguments of launches in the form that the driver reads.

The driver reads them while it launches a kernel, each from an address of its own in an array.  These addresses are always the
same here, so a launch only has to write the values.
"""

import ctypes
import functools
import struct
from collections.abc import Sequence

from engine.cuda.runtime.compiler import Kernel

SLOT = 8
"""Bytes between two arguments, enough for each of them."""

MOST = 512
"""The most arguments of a kernel: the driver takes 4096 bytes."""

_CODES = {"float32": "f4x", "int32": "i4x", "uint32": "I4x"}


@functools.cache
def layout(kernel: Kernel) -> struct.Struct:
    """What packs the arguments of a kernel: pointers, which are integer addresses, and numbers, in ``SLOT`` bytes each."""
    return struct.Struct("=" + "".join(_CODES.get(str(type_), "Q") for type_ in kernel.arguments))


class ArgumentMemory:
    """Memory for the arguments of one launch at a time.  ``addresses``: the host address of the array of their addresses."""

    def __init__(self) -> None:
        self._values = ctypes.create_string_buffer(SLOT * MOST)
        first = ctypes.addressof(self._values)
        self._addresses = (ctypes.c_uint64 * MOST)(*range(first, first + SLOT * MOST, SLOT))
        self.addresses = ctypes.addressof(self._addresses)

    def write(self, kernel: Kernel, arguments: Sequence[float]) -> None:
        """Replace the arguments by those of another launch.  Raises struct.error if their number is wrong, or if one does not
        fit its type."""
        layout(kernel).pack_into(self._values, 0, *arguments)
