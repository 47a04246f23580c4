"""The pages of a mapped file: bringing them into memory ahead of their use, and giving them back."""

import mmap
import sys

import numpy as np

POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14 and later, which Python does not define."""

AHEAD = 256 << 20
"""Bytes of a file that the system is asked to read while those before are in use."""


def touch(data: np.ndarray) -> None:
    """Bring the pages of a mapped array into memory, by one system call if there is one, which takes half the time."""
    if sys.platform != "linux" or not _advise(data, POPULATE_READ):
        int(data.reshape(-1)[:: mmap.PAGESIZE].max(initial=0))


def read_soon(data: np.ndarray) -> None:
    """Ask the system to read the pages of a mapped array and the following part of the file, without waiting for them."""
    if sys.platform != "win32":
        _advise(data, mmap.MADV_WILLNEED, AHEAD)


def give_back(data: np.ndarray) -> None:
    """Let the system use the memory of a mapped array's pages, which are read again if they are needed again."""
    if sys.platform != "win32":
        _advise(data, mmap.MADV_DONTNEED)


def _advise(data: np.ndarray, advice: int, beyond: int = 0) -> bool:
    """Advise the system on the pages of an array and ``beyond`` further bytes of its file; returns whether it was
    accepted."""
    owner: object = data
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if not isinstance(owner, mmap.mmap) or not data.nbytes:
        return False
    start = data.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        owner.madvise(advice, first, min(start - first + data.nbytes + beyond, len(owner) - first))
    except OSError:
        return False  # an older system
    return True
