"""The objects that GPU operations exchange and record: arrays, weights, launches, and passes made of launches."""

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from engine.cuda.products import repack
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.device import Buffer, Graph
from engine.gguf.quants import Format


@dataclass
class Tensor:
    """An array on the device: its address, shape and dtype, and the memory that it keeps alive."""

    address: int
    shape: tuple[int, ...]
    dtype: DTypeLike
    memory: object

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def reshape(self, *shape: int) -> "Tensor":
        """An array of this shape with the same elements, without a copy."""
        return Tensor(self.address, shape, self.dtype, self.memory)

    def __getitem__(self, rows: slice) -> "Tensor":
        """A contiguous slice of the first axis, without a copy."""
        first, last, _ = rows.indices(self.shape[0])
        step = self.size // self.shape[0] * np.dtype(self.dtype).itemsize
        return Tensor(self.address + first * step, (last - first, *self.shape[1:]), self.dtype, self.memory)


@dataclass(frozen=True)
class DeviceWeight:
    """A weight matrix in memory that the device reads: records (``engine/cuda/products/repack.py``), or the rows of a float
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
"""An argument of a launch: an array or a matrix, whose address the kernel receives, or a number; 0 for an array that is
absent."""


@dataclass(frozen=True)
class Launch:
    """One kernel of a recorded pass.

    ``outputs`` are the arrays that it writes, valid until a later launch reuses their memory; ``names`` are their names:

    - result: a result of the operation, or part of one (result_1, ... where a kernel has several);
    - q, scales, sums: activations as int8 (``engine/cuda/products/quantize.py``);
    - query, query_scales: rotated queries, float32, or int8 and its scales; words: keys and values as stored;
    - mass, values: the results of attention for each chunk: largest score and sum, and weighted values;
    - convolved, gates: the inputs of a gated delta rule: q, k, v of each row, and decay and rate;
    - logits, ids, weights, listed, items: the choice of experts, and pairs of rows and experts sorted by expert.
    """

    kernel: Specialization
    grid: tuple[int, ...]
    block: int
    arguments: tuple[float, ...]
    outputs: tuple[Tensor, ...]
    names: tuple[str, ...]


class Plan:
    """A recorded pass: its launches, its graph, and its inputs and results."""

    def __init__(self, launches: list[Launch], result: Tensor | None) -> None:
        self.launches = launches
        self.result = result
        self.graph: Graph | None = None
        #: Whether it has been started as a whole.
        self.started = False
        #: The percentage of fast memory that all kernels prefer as shared memory; 0: each its own.
        self.percent = 0
