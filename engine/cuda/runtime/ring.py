"""Pinned host memory that weights go through on their way to a GPU, and the queue of their copies."""

import contextlib
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

from engine.cuda.products import repack
from engine.cuda.runtime.device import Buffer, Device, Mark
from engine.errors import DeviceError
from engine.gguf.quants import Format

PER_THREAD = 2
"""One that a thread reads into, and one that is being copied to the device."""

PIECE = 8 << 20
"""The size of a buffer in bytes, if no piece needs more.  For each piece a thread runs some Python code, which waits while
other threads run theirs, so few large pieces are faster.  Pinned memory takes time to allocate, so there is little of it."""


@dataclass
class PinnedBuffer:
    """Pinned memory, uint8 [n], the end of the work on what was last in it, and the memory that this work writes, which must
    not be freed before."""

    data: np.ndarray
    done: Mark
    target: Buffer | None = None


class PinnedRing:
    """Buffers of pinned memory for ``n_threads`` threads.

    Copies and kernels go to a queue of their own, in which a buffer's contents are copied to the device and then arranged in
    records.  So one buffer on the device, ``staging``, is enough for those of all buffers.  ``n_bytes``: of pinned memory.
    """

    def __init__(self, device: Device, n_threads: int) -> None:
        self.n_bytes = 0
        self._queue = device.beside()
        self._n_buffers = PER_THREAD * n_threads
        self._made = 0
        self._free: deque[PinnedBuffer] = deque()
        self._staging = device.allocate(PIECE, "the loading of weights")
        #: Guards all fields, and keeps what one thread puts into the queue together.
        self._lock = threading.Lock()

    def take(self, n_bytes: int) -> PinnedBuffer:
        """The buffer that has been free for longest, or a new one, after all work on what was last in it."""
        with self._lock:
            if self._made < self._n_buffers or not self._free:
                buffer = PinnedBuffer(np.empty(0, np.uint8), self._queue.mark())
                self._made += 1
            else:
                buffer = self._free.popleft()
        buffer.done.wait("the loading of weights")
        if buffer.data.size < n_bytes:
            added = max(PIECE, n_bytes)
            with self._lock:
                self.n_bytes += added - buffer.data.size
            buffer.data = self._queue.pinned((added,), np.uint8, "buffers for the weights", zeroed=False)[0]
        return buffer

    def give(self, buffer: PinnedBuffer) -> None:
        with self._lock:
            self._free.append(buffer)

    def copy(self, target: Buffer, start: int, buffer: PinnedBuffer, n_bytes: int) -> None:
        """Begin to copy the first bytes of a buffer to a buffer on the device, from byte ``start`` on."""
        with self._lock:
            buffer.target = target
            self._queue.copy(target.address + start, buffer.data[:n_bytes])
            buffer.done.set()

    def repack(
        self, entry: Format, order: Buffer, blocks: int, target: Buffer, first: int, buffer: PinnedBuffer, n_bytes: int
    ) -> None:
        """Begin to write the rows in the first bytes of a buffer as records of ``blocks`` blocks a row, from row ``first``
        on, which is the first row of a tile.  order: the order of the bytes of a record, on the device."""
        rows = n_bytes // (blocks * entry.block_bytes)
        with self._lock:
            if n_bytes > self._staging.n_bytes:
                self.wait()
                self._staging = self._queue.allocate(n_bytes, "the loading of weights")
            buffer.target = target
            self._queue.copy(self._staging.address, buffer.data[:n_bytes])
            addresses = (self._staging.address, order.address, target.address)
            grid = (blocks, -(-rows // repack.TILE))
            arguments = (*addresses, rows, blocks, first // repack.TILE)
            self._queue.launch(repack.repack(entry.block_bytes), grid, 256, arguments)
            buffer.done.set()

    def wait(self) -> None:
        self._queue.synchronize("the loading of weights")

    def close(self) -> None:
        with contextlib.suppress(DeviceError):  # after an error, which may be this one
            self.wait()
        self._free.clear()
