"""Copies of arrays of a GPU to host memory, which later work neither waits for nor changes.

The GPU copies to pinned memory, in its own order; then threads copy to the arrays::

    queue:    ... | copy to pinned memory | later work ...
    threads:                              | copy to arrays

Most of the time of a copy to new memory goes into its pages, which the system provides when they are first written.  When the
GPU copied to the arrays, a snapshot of the 27B, 181 MB, held its caller up for 133 ms; now for 3.4 ms.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from engine.cuda.runtime.device import Device, Mark
from engine.cuda.runtime.tensor import Tensor
from engine.machine.cores import available_cores

MOST_THREADS = 4
"""The most threads that copy from pinned memory."""

ALIGNMENT = 256
"""Copies begin at multiples of this in pinned memory."""


class DeviceCopies:
    """Copies to host memory that have been started (``engine.cache.copies.Copies``)."""

    def __init__(self, parts: Sequence[Future[None]]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part.result()


class Downloads:
    """What copies arrays of a GPU to host memory, one set of them after another."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._n_threads = min(MOST_THREADS, available_cores())
        self._threads = ThreadPoolExecutor(self._n_threads, "downloads")
        #: The pinned memory, its address, and the copies that read it.
        self._pinned = np.empty(0, np.uint8)
        self._address = 0
        self._latest = DeviceCopies(())

    def start(self, pairs: Sequence[tuple[Tensor, np.ndarray]]) -> DeviceCopies:
        """Begin to copy arrays of the GPU to contiguous arrays in host memory with as many bytes, after all work that was
        started earlier.  Waits for the copies that were begun before.  Raises DeviceError if memory runs out."""
        self._latest.wait()
        sizes = [-(-out.nbytes // ALIGNMENT) * ALIGNMENT for _, out in pairs]
        if sum(sizes) > self._pinned.size:
            self._pinned, self._address = self._device.pinned(
                (sum(sizes),), np.uint8, "states to be kept", zeroed=False
            )
        at, left = 0, []
        for (array, out), size in zip(pairs, sizes, strict=True):
            if size:
                self._device.move(self._address + at, array.address, out.nbytes)
                left.append((self._pinned[at : at + out.nbytes], out.reshape(-1).view(np.uint8)))
                at += size
        ended = self._device.mark()
        ended.set()
        # The arrays of a model's layers come in turn, so the parts have about as many bytes.
        parts = [left[i :: self._n_threads] for i in range(self._n_threads)]
        self._latest = DeviceCopies([self._threads.submit(_copy, ended, part) for part in parts if part])
        return self._latest


def _copy(ended: Mark, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    ended.wait("the copies of states to be kept")
    for source, target in pairs:
        target[...] = source
