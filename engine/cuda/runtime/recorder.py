"""Recording the launches of a pass, and allocating memory for their results."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import Role
from engine.cuda.products import quantize
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.device import Device
from engine.cuda.runtime.pool import Pool
from engine.cuda.runtime.tensor import Argument, DeviceWeight, Launch, Plan, Tensor

f32 = np.float32


class Int8(NamedTuple):
    """Activations in the layout for tensor cores (``engine/cuda/products/quantize.py``): integers, their scales, and sums of
    the integers."""

    q: Tensor
    scales: Tensor
    sums: Tensor

    def outputs(self) -> dict[str, Tensor]:
        """The arrays by name, for :meth:`Recorder.launch`; only q where it contains the others."""
        return {"q": self.q} if self.scales is self.q else self._asdict()


class Added(NamedTuple):
    """The inputs and the result ``out`` of (residual + normalized x) * scale."""

    residual: Tensor
    x: Tensor
    weight: Tensor
    eps: float
    scale: float
    out: Tensor


class Chains(NamedTuple):
    """A product whose blocks have shared the chains of its results (``engine/cuda/products/warpgroup_matmul.py``), to which
    ``residual`` is added.

    n_chains: the number of chains that have units; tiles: those of 8 activation rows in a block.
    """

    chains: Tensor
    n_chains: int
    tiles: int
    residual: Tensor | None


class Recorder:
    """Records the launches of a pass instead of executing them.

    Results are allocated from the memory pool of the pass's role.  Prefill passes have a separate pool, because decode passes
    may run between their launches.  When nothing refers to a result any longer, later launches reuse its memory.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._pools = {role: Pool(device) for role in Role}
        self._pool = self._pools[Role.DECODE]
        self._launches: list[Launch] | None = None
        #: What the latest launch adds, if a later one may do that instead.
        self._added: Added | Chains | None = None
        self._start: Callable[[Launch], None] | None = None
        #: The number of launches of the latest pass that were started while it was recorded.
        self.n_started = 0
        #: Those whose launches become part of the pass that is being recorded, and the devices of the pass.
        self._others: list[Recorder] = []
        self._devices: tuple[Device, ...] = (device,)
        #: The index of its device in the pass, and the number of meetings before the next launch.
        self._number = self._stretch = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of memory for intermediate results."""
        return sum(pool.n_bytes for pool in self._pools.values())

    @property
    def role(self) -> Role:
        """That of the pass that is being recorded, or of the one before."""
        return next(role for role, pool in self._pools.items() if pool is self._pool)

    def record(
        self,
        forward: Callable[[], Tensor | None],
        role: Role = Role.DECODE,
        start: Callable[[Launch], None] | None = None,
    ) -> Plan:
        """Call ``forward`` and return its launches and its result.

        role: what the pass is for.
        start: starts a launch.  It is called for each launch, in order, as soon as no operation can change it any more, which
            is when the next one is recorded.  So the last one is left to the caller, and so are all that follow
            :meth:`together`.
        """
        self._launches, self._added = [], None
        self._start, self.n_started = start, 0
        self._pool = self._pools[role]
        try:
            result = forward()
            return Plan(self._launches, result, self._devices)
        finally:
            self._launches = self._added = self._start = None
            self._devices, self._stretch = (self.device,), 0

    @contextlib.contextmanager
    def together(self, others: "Sequence[Recorder]") -> Iterator[None]:
        """Add the launches of the others to the pass that is being recorded.  Until :meth:`meet`, each has its own list."""
        self._start = None
        role = self.role
        self._others = list(others)
        self._devices = tuple(dict.fromkeys([self.device, *(other.device for other in others)]))
        for other in others:
            other._launches, other._added, other._pool = [], None, other._pools[role]
            other._number, other._stretch = self._devices.index(other.device), self._stretch
        try:
            yield
            self.meet()
        finally:
            self._others = []
            for other in others:
                other._launches = other._added = None
                other._number = other._stretch = 0

    def meet(self) -> None:
        """Continue when the launches so far, of all that record together, have ended."""
        assert self._launches is not None
        for other in self._others:
            assert other._launches is not None
            self._launches += other._launches
            other._launches, other._added, other._stretch = [], None, self._stretch + 1
        self._added, self._stretch = None, self._stretch + 1

    def launch(
        self,
        kernel: Specialization,
        grid: tuple[int, ...],
        block: int,
        arguments: Sequence[Argument],
        **outputs: Tensor,
    ) -> None:
        """Record a launch.  The kernel receives the addresses of arrays and matrices among the arguments.  outputs: the
        arrays that it writes, under the names that :class:`engine.cuda.runtime.tensor.Launch` lists."""
        plain = tuple([a.address if isinstance(a, (Tensor, DeviceWeight)) else a for a in arguments])
        assert self._launches is not None, "operations belong into a pass: Backend.run or Backend.record"
        self._added = None
        if self._start is not None:
            for final in self._launches[self.n_started :]:
                self.n_started += 1
                self._start(final)
        # Record addresses only, so that the results are not kept alive and later launches can reuse their memory.
        written = tuple([Tensor(o.address, o.shape, o.dtype, None) for o in outputs.values()])
        names = tuple(outputs)
        launch = Launch(kernel, grid, block, plain, written, names, False, self._number, self._stretch)
        self._launches.append(launch)

    @property
    def latest(self) -> Launch | None:
        """The latest launch; None if there is none since :meth:`meet`."""
        return self._launches[-1] if self._launches else None

    def replace_latest(self, kernel: Specialization, arguments: Sequence[float]) -> None:
        """Let another kernel, with the same grid and the same results, take the place of that of the latest launch, which has
        not been started."""
        assert self._launches and self.n_started < len(self._launches)
        self._launches[-1] = self._launches[-1]._replace(kernel=kernel, arguments=tuple(arguments))

    def finish(self) -> None:
        """Let the next launch start only after the latest one has ended."""
        assert self._launches
        self._launches[-1] = self._launches[-1]._replace(finishes=True)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = f32) -> Tensor:
        """An uninitialized array for a result."""
        dtype = np.dtype(dtype)
        loan = self._pool.take(math.prod(shape) * dtype.itemsize)
        return Tensor(loan.address, shape, dtype, loan)

    def int8(self, unit: int, rows: int, columns: int, *, layout: int = quantize.NARROW) -> Int8:
        """Uninitialized arrays for activations [rows, columns] as int8, with a scale for every ``unit`` values."""
        q, d, sums = quantize.activation_words(unit, rows, columns, layout)
        if layout in quantize.BLOCKS:
            block = quantize.block_parts(layout)[2]
            everything = self.empty((q // block, block), np.uint32)
            return Int8(everything, everything, everything)
        return Int8(self.empty((q,), np.uint32), self.empty((d,)), self.empty((sums,), np.uint32))

    def add(self, kernel: Specialization, grid: tuple[int, ...], block: int, added: Added) -> None:
        """Record the launch of a sum with a residual.  The inputs are kept alive until the next launch, which may compute the
        sum itself (:meth:`take_added`)."""
        columns = added.x.shape[1]
        self.launch(kernel, grid, block, (*added[:-1], columns, added.out), result=added.out)
        self._added = added

    def add_chains(
        self,
        kernel: Specialization,
        grid: tuple[int, ...],
        arguments: Sequence[Argument],
        chains: Chains,
        **results: Tensor,
    ) -> None:
        """Record the launch that adds the chains of all results of a product.  They are kept alive until the next launch,
        which may add them itself (:meth:`take_chains`)."""
        self.launch(kernel, grid, 256, arguments, **results)
        self._added = chains

    def take_added(self, y: Tensor) -> Added | None:
        """If y is the result of a sum that the previous launch computes, remove this launch and return the sum: the next
        launch must compute it.  Otherwise do nothing and return None."""
        added = self._added
        return added if isinstance(added, Added) and self._remove_latest(y) else None

    def take_chains(self, *results: Tensor) -> Chains | None:
        """As ``take_added``, if the previous launch adds the chains of exactly these results, in this order.  The next launch
        must compute them, unless nothing else reads them."""
        chains = self._added
        return chains if isinstance(chains, Chains) and self._remove_latest(*results) else None

    def _remove_latest(self, *results: Tensor) -> bool:
        """Remove the latest launch if these are its results; returns whether they are."""
        assert self._launches
        outputs = self._launches[-1].outputs
        if [(out.address, out.shape) for out in outputs] != [(y.address, y.shape) for y in results]:
            return False
        self._launches.pop()
        return True
