"""Launches as they are noted while a pass is recorded, and the memory of their results."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from engine.cuda.products import quantize
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.device import Device
from engine.cuda.runtime.pool import Pool
from engine.cuda.runtime.tensor import Argument, DeviceWeight, Launch, Plan, Tensor

f32 = np.float32


class Int8(NamedTuple):
    """Activations as tensor cores take them (``engine/cuda/products/quantize.py``): integers, their scales, sums of the
    integers."""

    q: Tensor
    scales: Tensor
    sums: Tensor


class Added(NamedTuple):
    """The inputs and the result ``out`` of (residual + normalized x) * scale."""

    residual: Tensor
    x: Tensor
    weight: Tensor
    eps: float
    scale: float
    out: Tensor


class Recorder:
    """Notes the launches of a pass instead of starting them.

    Results lie in one pool of memory; that of a result comes back when nothing refers to it any more, and later launches
    write there.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._pool = Pool(device)
        self._launches: list[Launch] | None = None
        self._added: Added | None = None

    def record(self, forward: Callable[[], Tensor | None]) -> Plan:
        """The launches that ``forward`` asks for, and its result."""
        self._launches, self._added = [], None
        try:
            result = forward()
            return Plan(self._launches, result)
        finally:
            self._launches = self._added = None

    def launch(
        self,
        kernel: Specialization,
        grid: tuple[int, ...],
        block: int,
        arguments: Sequence[Argument],
        **outputs: Tensor,
    ) -> None:
        """Note a launch; arrays and matrices among the arguments stand for their addresses.  outputs: what it writes, by
        the names of :class:`engine.cuda.runtime.tensor.Launch`."""
        plain = tuple(a.address if isinstance(a, (Tensor, DeviceWeight)) else a for a in arguments)
        assert self._launches is not None, "operations belong into a pass: Backend.run or Backend.record"
        self._added = None
        # Where results lie, not the results: what comes later may use their memory again.
        written = tuple(Tensor(o.address, o.shape, o.dtype, None) for o in outputs.values())
        self._launches.append(Launch(kernel, grid, block, plain, written, tuple(outputs)))

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = f32) -> Tensor:
        """Memory for a result, not cleared."""
        loan = self._pool.take(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return Tensor(loan.address, shape, np.dtype(dtype), loan)

    def int8(self, unit: int, rows: int, columns: int) -> Int8:
        """Memory for activations [rows, columns] as int8, ``unit`` values a scale."""
        q, d, sums = quantize.activation_words(unit, rows, columns)
        return Int8(self.empty((q,), np.uint32), self.empty((d,)), self.empty((sums,), np.uint32))

    def add(self, kernel: Specialization, grid: tuple[int, ...], block: int, added: Added) -> None:
        """Note the launch of a sum with a residual.  What it reads is kept until the next launch, which may do its work as
        well (:meth:`take_added`)."""
        columns = added.x.shape[1]
        self.launch(kernel, grid, block, (*added[:-1], columns, added.out), result=added.out)
        self._added = added

    def take_added(self, y: Tensor) -> Added | None:
        """The sum that the launch before has made, if y is its result: that launch is taken out of the pass again, and the
        next one has to do its work.  None, and nothing happens, for any other y."""
        added = self._added
        if added is None or (y.address, y.shape) != (added.out.address, added.out.shape):
            return None
        assert self._launches
        self._launches.pop()
        return added
