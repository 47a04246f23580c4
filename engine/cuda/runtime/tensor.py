"""What operations on a GPU pass to one another: arrays, values that are yet to be computed, weights, launches."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.cuda.attention import attend as attention
from engine.cuda.products import repack
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.device import Buffer, Graph
from engine.gguf.quants import Format


@dataclass
class Tensor:
    """An array on the device: where it begins, its shape and element type, and the memory it keeps alive."""

    address: int
    shape: tuple[int, ...]
    dtype: Any
    memory: Any

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def reshape(self, *shape: int) -> "Tensor":
        """The same elements under another shape."""
        return Tensor(self.address, shape, self.dtype, self.memory)

    def __getitem__(self, rows: slice) -> "Tensor":
        """Some rows: a contiguous slice of the first axis."""
        first, last, _ = rows.indices(self.shape[0])
        step = self.size // self.shape[0] * np.dtype(self.dtype).itemsize
        return Tensor(self.address + first * step, (last - first, *self.shape[1:]), self.dtype, self.memory)


@dataclass
class Deferred:
    """A value that is computed where it is used: ``kind`` "rms_norm" of (x, weight) with eps, "gated_norm" of these and
    ``gate``, "swiglu" or "geglu" of (gate, up)."""

    kind: str
    first: Tensor
    second: Tensor
    eps: float = 0.0
    gate: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.first.shape


@dataclass(kw_only=True)
class Attended(Deferred):
    """The result of attention, whose chunks have yet to be joined: ``kind`` "combine" of (weights, sums), with ``gate`` where
    heads are gated (``engine/cuda/attention/combine.py``)."""

    positions: Tensor
    geometry: attention.Geometry
    slots: int
    window: int
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.positions.size, self.columns


@dataclass(frozen=True)
class DeviceWeight:
    """A weight matrix in memory the device reads: records (``engine/cuda/products/repack.py``), or the rows of a float format."""

    name: str
    format: Format
    rows: int
    columns: int
    memory: Buffer

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.memory.address

    @property
    def tiles(self) -> int:
        """Number of tiles of 16 rows."""
        return -(-self.rows // repack.TILE)


@dataclass(frozen=True)
class Launch:
    """One kernel of a recorded pass; ``outputs`` are the arrays it writes, there until a later launch uses their memory."""

    kernel: Specialization
    grid: tuple[int, ...]
    block: int
    arguments: tuple[Any, ...]
    outputs: tuple[Tensor, ...]


class Plan:
    """A recorded pass: its launches, the graph made of them, and where its inputs and results lie."""

    def __init__(self, launches: list[Launch], result: Tensor | None) -> None:
        self.launches = launches
        self.result = result
        self.graph: Graph | None = None
