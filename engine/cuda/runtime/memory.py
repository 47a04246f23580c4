"""Persistent data in a GPU's memory: arrays, caches, and weights in their device layout."""

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import DTypeLike

from engine.cuda.products import repack
from engine.cuda.runtime.device import Buffer, Device, allocated_bytes
from engine.cuda.runtime.ring import PIECE, PinnedBuffer, PinnedRing
from engine.cuda.runtime.tensor import DeviceWeight, Tensor
from engine.gguf.quants import Format
from engine.gguf.reader import FilePiece, Reader
from engine.machine.cores import available_cores
from engine.ops.memory import Progress
from engine.ops.weight import Weight

MOST_READERS = 4
"""The most threads that read files: more are not faster, and take more pinned memory."""

RESERVED = 512 << 20
"""Bytes of device memory reserved for intermediate results when the context size is chosen."""


class PersistentMemory:
    """Arrays and weights of one backend in device memory.  ``weight_bytes``: bytes of device memory used by weights."""

    def __init__(self, device: Device) -> None:
        self.weight_bytes = 0
        self._device = device
        #: What reads the weights, until all are read, and whether more may follow.
        self._reader: Reader[PinnedBuffer] | None = None
        self._ring: PinnedRing | None = None
        self._reading = False
        self._total = 0
        self._progress: Progress | None = None
        self._orders: dict[GGMLQuantizationType, Buffer] = {}

    def free(self, weights: int) -> int:
        """Bytes available for a cache after allocating ``weights`` bytes of weights and the intermediate results of a pass;
        at least 1."""
        return max(1, self._device.free_memory() - int(weights * 1.01) - RESERVED)

    def upload(self, array: np.ndarray) -> Tensor:
        """A copy of a NumPy array in device memory."""
        buffer = self._device.allocate(array.nbytes, "the model's vectors")
        self._device.write(buffer.address, array)
        return Tensor(buffer.address, array.shape, array.dtype, buffer)

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> Tensor:
        """A zeroed array in device memory."""
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffer = self._device.allocate(n_bytes, "the key-value cache")
        self._device.clear(buffer.address, buffer.n_bytes)
        return Tensor(buffer.address, shape, np.dtype(dtype), buffer)

    def store(self, target: Tensor, first: int, rows: np.ndarray) -> None:
        """target[first : first + len(rows)] = rows."""
        self._device.write(target[first : first + rows.shape[0]].address, rows)

    def download(self, array: Tensor, out: np.ndarray | None = None) -> np.ndarray:
        """A copy of a device array as a NumPy array, in ``out`` if it is given."""
        return self._device.read(array.address, array.shape, array.dtype, out)

    def copy_in(self, target: Tensor, source: np.ndarray, axis: int, first: int, end: int) -> None:
        """Copy entries [first, end) of an axis from a contiguous NumPy array of the same shape."""
        start, width, pitch, height = _lines(target, axis, first, end)
        at = source.ctypes.data + start
        self._device.write_lines(target.address + start, at, width, (pitch, pitch), height)

    def copy_out(self, source: Tensor, target: np.ndarray, axis: int, first: int, end: int) -> None:
        """Copy entries [first, end) of an axis to a contiguous NumPy array of the same shape."""
        start, width, pitch, height = _lines(source, axis, first, end)
        at = target.ctypes.data + start
        self._device.read_lines(source.address + start, at, width, (pitch, pitch), height)

    def read_entries(self, source: Tensor, axis: int, first: int, end: int) -> np.ndarray:
        """A copy of entries [first, end) of an axis as a NumPy array."""
        start, width, pitch, height = _lines(source, axis, first, end)
        found = np.empty((*source.shape[:axis], end - first, *source.shape[axis + 1 :]), source.dtype)
        self._device.read_lines(source.address + start, found.ctypes.data, width, (pitch, width), height)
        return found

    def write_entries(self, target: Tensor, axis: int, first: int, values: np.ndarray) -> None:
        """Replace the entries of an axis from ``first`` on by a NumPy array."""
        values = np.ascontiguousarray(values)
        start, width, pitch, height = _lines(target, axis, first, first + values.shape[axis])
        self._device.write_lines(target.address + start, values.ctypes.data, width, (pitch, width), height)

    def begin(self, total: int, progress: Progress | None) -> None:
        """Let ``weight`` return before its matrix is in device memory, until ``loaded``.  ``progress("load", done, total)``
        is called meanwhile, with ``total`` bytes of all tensors."""
        self._total, self._progress = total, progress
        self._reading = True

    def weight(self, weight: Weight, host: bool) -> DeviceWeight:
        """A copy of a weight matrix, arranged in records; host: whether it is in host memory that the device can read."""
        entry, what, n_bytes = weight.format, f"the weights ({weight.name})", _size(weight)
        device = self._device
        buffer = device.allocate_host(n_bytes, what) if host else device.allocate(n_bytes, what)
        self.weight_bytes += 0 if host else buffer.n_bytes
        if entry.quantized:
            self._order(entry)
            # By this thread: threads that read do not compile.
            device.load(repack.repack(entry.block_bytes))
        if self._reader is None:
            n_threads = min(MOST_READERS, available_cores())
            self._ring = PinnedRing(device, n_threads)
            self._reader = Reader(n_threads, self._ring)
        self._reader.add(self._pieces(weight, buffer))
        if not self._reading:
            self.loaded()
        elif self._progress is not None:
            self._progress("load", self._reader.done, self._total)
        return DeviceWeight(weight.name, entry, weight.rows, weight.columns, buffer)

    def weight_bytes_of(self, weight: Weight) -> int:
        """The bytes of device memory that a matrix takes."""
        return allocated_bytes(_size(weight))

    def _pieces(self, weight: Weight, buffer: Buffer) -> Iterator[FilePiece[PinnedBuffer]]:
        """The parts of a matrix, each of which goes to its place in ``buffer`` when it is read."""
        entry, row_bytes, ring = weight.format, weight.data.shape[1], self._ring
        assert ring is not None
        step = max(1, PIECE // (row_bytes * repack.TILE)) * repack.TILE
        for row in range(0, weight.rows, step):
            if entry.quantized:
                use = partial(ring.repack, entry, self._order(entry), weight.columns // entry.block, buffer, row)
            else:
                use = partial(ring.copy, buffer, row * row_bytes)
            yield FilePiece(weight.stretches(row, row + step), use)

    def _order(self, entry: Format) -> Buffer:
        """The order of the bytes of a record, in device memory."""
        if entry.type not in self._orders:
            order = repack.record(entry.type)
            self._orders[entry.type] = self._device.allocate(order.nbytes, "the loading of weights")
            self._device.write(self._orders[entry.type].address, order)
            self._device.synchronize("the loading of weights")  # another queue reads it
        return self._orders[entry.type]

    def loaded(self) -> None:
        """Wait until all matrices are in device memory, and release memory that is needed only for loading.  To be called
        after the last ``weight``."""
        reader, progress = self._reader, self._progress
        try:
            if reader is not None:
                reader.finish(None if progress is None else lambda done, _: progress("load", done, self._total))
        finally:
            self.stop()
        if progress is not None:
            progress("load", self._total, self._total)

    def stop(self) -> None:
        """End reading, and release memory that is needed only for loading."""
        if self._reader is not None:
            self._reader.stop()
        self._reader = self._ring = self._progress = None
        self._reading, self._orders = False, {}


def _size(weight: Weight) -> int:
    """The bytes of a matrix, arranged in records."""
    if weight.format.quantized:
        return repack.repacked_bytes(weight.format, weight.rows, weight.columns)
    return weight.rows * int(weight.data.shape[1])


def _lines(array: Tensor, axis: int, first: int, end: int) -> tuple[int, int, int, int]:
    """Entries [first, end) of an axis of an array as lines: where the first one begins, the bytes of a line, those from one
    line to the next, and the number of lines."""
    entry = math.prod(array.shape[axis + 1 :]) * np.dtype(array.dtype).itemsize
    return first * entry, (end - first) * entry, array.shape[axis] * entry, math.prod(array.shape[:axis])
