"""A mapped file: where arrays lie in it, and giving its pages back."""

import mmap
import os
import sys
from pathlib import Path

import numpy as np


class MappedFile(mmap.mmap):
    """A file mapped for reading, which can also be read through its descriptor.

    ``path``: as it was opened; ``descriptor``: open as long as the mapping; ``address``: of the first mapped byte.
    """

    path: Path
    descriptor: int
    address: int

    def __new__(cls, path: Path, descriptor: int, size: int) -> "MappedFile":
        """Map ``size`` bytes of the file that is open as ``descriptor``, which the caller may close."""
        self = super().__new__(cls, descriptor, size, access=mmap.ACCESS_READ)
        self.path = path
        self.descriptor = os.dup(descriptor)
        self.address = np.frombuffer(self, np.uint8).ctypes.data
        return self

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def file_of(array: np.ndarray) -> tuple[MappedFile, int] | None:
    """The file that an array is a view of, and the place of its first byte; None for other arrays."""
    owner = _mapping(array)
    if not isinstance(owner, MappedFile):
        return None
    return owner, array.ctypes.data - owner.address


def give_back(data: np.ndarray) -> None:
    """Let the system use the memory of a mapped array's pages, which are read again if they are needed again."""
    owner = _mapping(data)
    if owner is None or sys.platform == "win32" or not data.nbytes:
        return
    start = data.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        owner.madvise(mmap.MADV_DONTNEED, first, min(start - first + data.nbytes, len(owner) - first))
    except OSError:
        pass  # memory that is locked


def _mapping(array: np.ndarray) -> mmap.mmap | None:
    """The mapping that an array is a view of."""
    owner: object = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return owner if isinstance(owner, mmap.mmap) else None
