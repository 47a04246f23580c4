"""Weights that stay in host memory and are copied to a GPU, one part of a model after another, while it computes.

There are two buffers on the device.  While a pass computes with the weights in one of them, those of the next part are copied
to the other one, in a queue of their own::

    copies    part 0 | part 1 | part 2          | part 3 ...
    compute            part 0 | part 1 (waits)  | part 2 ...
"""

from collections.abc import Iterator, Sequence

import numpy as np
from gguf import GGMLQuantizationType

from engine.arrays import Matrix
from engine.cpu.mapping import whole_mapping
from engine.cpu.products.repack import ROWS, Records
from engine.cuda.products import regroup, repack
from engine.cuda.runtime.device import Buffer, Device
from engine.cuda.runtime.tensor import DeviceWeight
from engine.ops.weight import Weight

STAGING = 32 << 20
"""The most bytes of records that are copied at a time, unless a pair of records is larger."""

RESIDENT = 8 << 20
"""Bytes up to which a matrix of a float format is copied to the device once and stays there."""

WHAT = "buffers for weights in host memory"


class DeviceWeightStream:
    """Copies the weights of parts of a model to the device.  ``matrices``: those of each part, valid from :meth:`wait` for
    the part until :meth:`begin` for the second part after it."""

    def __init__(self, device: Device, parts: Sequence[Sequence[Matrix]]) -> None:
        """parts: the matrices of each part, as the CPU has them.  Raises DeviceError if there is not enough memory."""
        self._queue = device.beside()
        sizes = [sum(_device_bytes(matrix) for matrix in part if _is_copied(matrix)) for part in parts]
        self._buffers = [device.allocate(max(sizes, default=0), WHAT) for _ in range(2)]
        copied = [matrix for part in parts for matrix in part if isinstance(matrix, Records)]
        most = max((min(STAGING, matrix.data.nbytes) for matrix in copied), default=0)
        pairs = (regroup.GROUPS * matrix.data.shape[2] for matrix in copied)
        self._staging = device.allocate(max(most, *pairs, 0), WHAT)
        self._marks = [self._queue.mark() for _ in self._buffers]
        #: The part whose weights each buffer holds, or will hold after the copies in the queue.
        self._held = [-1 for _ in self._buffers]
        self._orders: dict[GGMLQuantizationType, Buffer] = {}
        #: What keeps the memory of the weights pinned, from the first copy on.  It is freed before the arrays.
        self._pins: list[object | None] | None = None
        self._parts: list[list[tuple[Matrix, DeviceWeight]]] = []
        for number, part in enumerate(parts):
            buffer, at, weights = self._buffers[number % 2], 0, []
            for matrix in part:
                if _is_copied(matrix):
                    own = Buffer(buffer.address + at, _device_bytes(matrix), _keep)
                    at += own.n_bytes
                    weights.append((matrix, _weight(matrix, own)))
                else:
                    assert isinstance(matrix, Weight)
                    resident = device.allocate(matrix.rows * matrix.data.shape[1], WHAT)
                    device.write(resident.address, matrix.part(0, matrix.rows))
                    weights.append((matrix, _weight(matrix, resident)))
            self._parts.append(weights)
        for records in copied:
            if records.format.type not in self._orders:
                order = regroup.order(records.format.type)
                self._orders[records.format.type] = device.allocate(order.nbytes, WHAT)
                device.write(self._orders[records.format.type].address, order)
                device.load(regroup.kernel_of(records.format))
        device.synchronize(WHAT)  # another queue reads what was written
        self.matrices = [[weight for _, weight in part] for part in self._parts]

    def begin(self, part: int) -> None:
        """Begin to copy the weights of a part, if it exists and they are not on the device.  No pass may use the weights of
        the part two before it any longer."""
        slot = part % len(self._buffers)
        if part >= len(self._parts) or self._held[slot] == part:
            return
        if self._pins is None:
            self._pins = self._pinned()
        self._held[slot] = -1
        for matrix, weight in self._parts[part]:
            if isinstance(matrix, Records):
                self._regroup(matrix, weight)
            elif isinstance(matrix, Weight) and _is_copied(matrix):
                at = weight.address
                for rows in matrix.stretches(0, matrix.rows):
                    self._queue.copy(at, rows)
                    at += rows.nbytes
        self._marks[slot].set()
        self._held[slot] = part

    def wait(self, part: int) -> None:
        """Wait until the weights of a part, whose copies :meth:`begin` has begun, are on the device."""
        slot = part % len(self._buffers)
        assert self._held[slot] == part, f"the weights of part {part} are not being copied"
        self._marks[slot].wait("the copies of weights")

    def _pinned(self) -> list[object | None]:
        """Pin the memory of the weights, so that it is copied without a detour and while the host continues.

        A model that reads no long prompt does not need it, and it takes time.
        """
        copied = [matrix for part in self._parts for matrix, _ in part if isinstance(matrix, Records)]
        return [self._queue.pin(memory) for memory in _mappings(copied)]

    def _regroup(self, matrix: Records, weight: DeviceWeight) -> None:
        groups = matrix.data.reshape(-1, matrix.data.shape[2])
        entry, blocks = matrix.format, matrix.columns // matrix.format.block
        step = max(1, self._staging.n_bytes // groups.shape[1] // regroup.GROUPS) * regroup.GROUPS
        for first in range(0, len(groups), step):
            part = groups[first : first + step]
            self._queue.copy(self._staging.address, part)
            addresses = self._staging.address, self._orders[entry.type].address, weight.address
            grid = blocks, -(-len(part) // regroup.GROUPS)
            self._queue.launch(
                regroup.kernel_of(entry), grid, 256, (*addresses, len(part), blocks, first // regroup.GROUPS)
            )


def can_be_streamed(matrix: Matrix) -> bool:
    """Whether the GPU can read a matrix as the CPU has it: in a stack, a record must not have missing rows."""
    if isinstance(matrix, Records):
        return matrix.count == 1 or matrix.rows % ROWS == 0
    return isinstance(matrix, Weight) and not matrix.format.quantized


def _is_copied(matrix: Matrix) -> bool:
    """Whether a matrix is copied for every pass."""
    return isinstance(matrix, Records) or _device_bytes(matrix) > RESIDENT


def _device_bytes(matrix: Matrix) -> int:
    """The bytes of a matrix on the device, in whole lines of 256 bytes."""
    if isinstance(matrix, Records):
        n_bytes = repack.repacked_bytes(matrix.format, matrix.count * matrix.rows, matrix.columns)
    else:
        assert isinstance(matrix, Weight)
        n_bytes = matrix.rows * matrix.data.shape[1]
    return -(-n_bytes // 256) * 256


def _weight(matrix: Matrix, memory: Buffer) -> DeviceWeight:
    assert isinstance(matrix, (Records, Weight))
    rows = matrix.rows * (matrix.count if isinstance(matrix, Records) else 1)
    return DeviceWeight(matrix.name, matrix.format, rows, matrix.columns, memory)


def _mappings(matrices: Sequence[Records]) -> Iterator[np.ndarray]:
    """The memory that the records are part of, each part once."""
    seen = set()
    for matrix in matrices:
        memory = whole_mapping(matrix.data)
        if memory is not None and memory.ctypes.data not in seen:
            seen.add(memory.ctypes.data)
            yield memory


def _keep(address: int, n_bytes: int) -> None:
    """Free nothing: the memory is part of a larger buffer."""
