"""Persistent data in a GPU's memory: arrays, caches, and weights in their device layout."""

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import DTypeLike

from engine.cuda.products import repack
from engine.cuda.runtime.device import Buffer, Device
from engine.cuda.runtime.tensor import DeviceWeight, Tensor
from engine.gguf.quants import Format
from engine.ops.weight import Weight

STAGING = 64 << 20
"""The maximum size of a copy of packed rows to the device, in bytes."""

RESERVED = 512 << 20
"""Bytes of device memory reserved for intermediate results when the context size is chosen."""


class PersistentMemory:
    """Arrays and weights of one backend in device memory.  ``weight_bytes``: bytes of device memory used by weights."""

    def __init__(self, device: Device) -> None:
        self.weight_bytes = 0
        self._device = device
        self._staging: Buffer | None = None
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

    def download(self, array: Tensor) -> np.ndarray:
        """A copy of a device array as a NumPy array."""
        return self._device.read(array.address, array.shape, array.dtype)

    def weight(self, weight: Weight, host: bool) -> DeviceWeight:
        """A copy of a weight matrix, arranged in records; host: whether it is in host memory that the device can read."""
        entry, row_bytes, what = weight.format, weight.data.shape[1], f"the weights ({weight.name})"
        n_bytes = weight.rows * row_bytes
        if entry.quantized:
            n_bytes = repack.repacked_bytes(entry, weight.rows, weight.columns)
        device = self._device
        buffer = device.allocate_host(n_bytes, what) if host else device.allocate(n_bytes, what)
        self.weight_bytes += 0 if host else buffer.n_bytes
        step = max(1, STAGING // (row_bytes * repack.TILE)) * repack.TILE
        for row in range(0, weight.rows, step):
            part = weight.part(row, row + step)
            if entry.quantized:
                self._repack(entry, part, buffer.address, weight.columns // entry.block, row)
            else:
                device.write(buffer.address + row * row_bytes, part)
        return DeviceWeight(weight.name, entry, weight.rows, weight.columns, buffer)

    def _repack(self, entry: Format, part: np.ndarray, records: int, blocks: int, row: int) -> None:
        """Write rows of a matrix as records, starting at row ``row``, which is the first row of a tile."""
        if self._staging is None or part.nbytes > self._staging.n_bytes:
            self._staging = self._device.allocate(max(STAGING, part.nbytes), "the loading of weights")
        if entry.type not in self._orders:
            order = repack.record(entry.type)
            self._orders[entry.type] = self._device.allocate(order.nbytes, "the loading of weights")
            self._device.write(self._orders[entry.type].address, order)
        self._device.write(self._staging.address, part)
        addresses = (self._staging.address, self._orders[entry.type].address, records)
        arguments = (*addresses, part.shape[0], blocks, row // repack.TILE)
        grid = (blocks, -(-part.shape[0] // repack.TILE))
        self._device.launch(repack.repack(entry.block_bytes), grid, 256, arguments)

    def loaded(self) -> None:
        """Release memory that is needed only for loading.  To be called after the last ``weight``."""
        self._device.synchronize("the loading of weights")
        self._staging = None
        self._orders = {}
