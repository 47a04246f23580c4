"""Copies from one GPU to another one, ordered by events, in which the host takes no part.

There are a few slots, in the memory of the target if the source can access it (peer access, over NVLink or PCIe), else in
pinned host memory::

    source:  ... | wait until slot is free | copy to slot | event "full" | ...
    target:                                  ... | wait for "full" | copy from slot | event "free" | ...

So the source goes on while the target still computes with what it received before.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from engine.cuda.runtime.device import Device
from engine.cuda.runtime.tensor import Tensor
from engine.ops.crossing import SLOTS


class DeviceCrossing:
    """The way of tensors from a GPU to another one (``engine.ops.crossing.Crossing``).  ``is_direct``: whether the slots are
    in the memory of the target."""

    def __init__(self, source: Device, target: Device, n_bytes: int) -> None:
        """n_bytes: the most bytes that are sent at a time.  Raises DeviceError if memory runs out."""
        self.is_direct = source.access(target)
        self._source, self._target = source, target
        n_bytes, what = -(-n_bytes // 256) * 256, "rows that go from one GPU to another"
        #: What owns the memory of the slots.
        self._memory: object
        if self.is_direct:
            buffer = target.allocate(SLOTS * n_bytes, what)
            self._memory, first = buffer, buffer.address
        else:
            # Pinned memory has the same address on all devices.
            self._memory, first = source.pinned((SLOTS * n_bytes,), np.uint8, what, zeroed=False)
        self._addresses = [first + slot * n_bytes for slot in range(SLOTS)]
        self._full = [source.mark() for _ in range(SLOTS)]
        self._free = [target.mark() for _ in range(SLOTS)]
        #: The slots without a ticket: the one whose ticket was given back first is next.
        self._left = deque(range(SLOTS))

    def send(self, arrays: Sequence[Tensor]) -> int:
        slot = self._left[0]
        self._source.follow(self._free[slot])
        at = self._addresses[slot]
        for array in arrays:
            n_bytes = _bytes(array)
            self._source.move(at, array.address, n_bytes)
            at += n_bytes
        self._full[slot].set()
        # Only now: an error before leaves the slot without a ticket.
        return self._left.popleft()

    def receive(self, ticket: int, arrays: Sequence[Tensor]) -> None:
        self._target.follow(self._full[ticket])
        at = self._addresses[ticket]
        for array in arrays:
            n_bytes = _bytes(array)
            self._target.move(array.address, at, n_bytes)
            at += n_bytes
        self._free[ticket].set()
        self._left.append(ticket)

    def forget(self, ticket: int) -> None:
        if ticket not in self._left:  # an interrupt may have come just after it was received
            self._left.append(ticket)


def _bytes(array: Tensor) -> int:
    return array.size * np.dtype(array.dtype).itemsize
