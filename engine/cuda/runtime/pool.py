"""A pool of device memory for intermediate results."""

from bisect import bisect_left, insort
from collections import defaultdict

from engine.cuda.runtime.device import Buffer, Device

LARGE = 1 << 20
"""The size in bytes from which blocks are reused for results of other sizes."""


class Pool:
    """A pool of device memory for intermediate results, which is reused as soon as nothing refers to it.

    Kernels run in the order in which they were recorded, so a later kernel may overwrite the inputs of an earlier one.  The
    memory is freed only together with the pool, because captured graphs contain its addresses.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._owned: list[Buffer] = []
        self._free: dict[int, list[int]] = defaultdict(list)
        #: The sizes of the large blocks, in rising order.
        self._large: list[int] = []

    @property
    def n_bytes(self) -> int:
        """Bytes of memory of the pool, including borrowed memory."""
        return sum(buffer.n_bytes for buffer in self._owned)

    def take(self, n_bytes: int) -> "Loan":
        """Borrow memory until the returned object is garbage-collected.  A large block may have up to eight times the
        requested size, so that passes of fewer rows reuse the memory of the largest pass."""
        size = max(256, 1 << (n_bytes - 1).bit_length()) if n_bytes < LARGE else -(-n_bytes // LARGE) * LARGE
        if size >= LARGE:
            size = self._free_size(size)
        free = self._free[size]
        if not free:
            if size >= LARGE and size not in self._large:
                insort(self._large, size)
            self._owned.append(self._device.allocate(size, "intermediate results"))
            free.append(self._owned[-1].address)
        return Loan(free.pop(), free)

    def _free_size(self, size: int) -> int:
        """The size of the smallest large block that is free, if one has at least ``size`` bytes and at most eight times as
        many; else ``size``."""
        for found in self._large[bisect_left(self._large, size) :]:
            if found > 8 * size:
                break
            if self._free[found]:
                return found
        return size


class Loan:
    """Memory borrowed from a pool, at ``address``.  Garbage collection returns it to the pool."""

    def __init__(self, address: int, home: list[int]) -> None:
        self.address = address
        self._home = home

    def __del__(self) -> None:
        self._home.append(self.address)
