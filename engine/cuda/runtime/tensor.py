"""The objects that GPU operations exchange and record: arrays, weights, launches, and passes."""

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from engine.cuda.products import repack
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.device import Buffer, Device, Graph
from engine.gguf.quants import Format


@dataclass
class Tensor:
    """An array on the device: its address, shape and dtype, and the object that owns its memory."""

    address: int
    shape: tuple[int, ...]
    dtype: DTypeLike
    memory: object

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def reshape(self, *shape: int) -> "Tensor":
        """A view with this shape."""
        return Tensor(self.address, shape, self.dtype, self.memory)

    def __getitem__(self, rows: slice) -> "Tensor":
        """A view of a contiguous slice of the first axis."""
        first, last, _ = rows.indices(self.shape[0])
        step = self.size // self.shape[0] * np.dtype(self.dtype).itemsize
        return Tensor(self.address + first * step, (last - first, *self.shape[1:]), self.dtype, self.memory)


@dataclass(frozen=True)
class DeviceWeight:
    """A weight matrix in memory that the device can read: records (``engine/cuda/products/repack.py``), or rows for a float
    format."""

    name: str
    format: Format
    rows: int
    columns: int
    memory: Buffer

    @property
    def address(self) -> int:
        """The device address of the first byte."""
        return self.memory.address

    @property
    def tiles(self) -> int:
        """Number of tiles of 16 rows."""
        return -(-self.rows // repack.TILE)


Argument: TypeAlias = Tensor | DeviceWeight | float
"""An argument of a launch: an array or a matrix, whose address the kernel receives, or a number.  0 stands for an absent
array."""


class Launch(NamedTuple):
    """One kernel of a recorded pass.

    ``outputs`` are the arrays that it writes, which are valid until a later launch reuses their memory.  ``names`` are their
    names:

    - result: a result of the operation, or part of one (result_1, ... where a kernel has several);
    - q, scales, sums: activations as int8 (``engine/cuda/products/quantize.py``);
    - query, query_scales: rotated queries, float32, or int8 and its scales; words: keys and values as stored;
    - mass, values: the results of attention for each chunk: largest score and sum, and weighted values;
    - convolved, gates: the inputs of a gated delta rule: q, k, v of each row, and decay and rate;
    - vectors, values, records: the same for rows of several sequences: q and k, v, and how tokens of a segment act on others;
    - logits, ids, weights, listed, items: the choice of experts, and pairs (row, expert) sorted by expert.

    finishes: whether the next launch starts only after this one has ended.
    device: the index of its device in ``Plan.devices``.
    stretch: between two stretches, all devices wait for each other.
    """

    kernel: Specialization
    grid: tuple[int, ...]
    block: int
    arguments: tuple[float, ...]
    outputs: tuple[Tensor, ...]
    names: tuple[str, ...]
    finishes: bool = False
    device: int = 0
    stretch: int = 0


class Plan:
    """A recorded pass: its launches, its graph, and its inputs and results.

    devices: those that compute it; the first one has the inputs and the result.
    """

    def __init__(self, launches: list[Launch], result: Tensor | None, devices: tuple[Device, ...]) -> None:
        self.launches = launches
        self.result = result
        self.devices = devices
        self.graph: Graph | None = None
        #: Whether it has been launched as a whole.
        self.started = False
        #: The percentage of fast memory that all kernels prefer as shared memory; 0: each kernel has its own.
        self.percent = 0
