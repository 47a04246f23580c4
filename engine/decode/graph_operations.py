"""The interface of a backend whose device chooses tokens: it captures passes as graphs."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import Batch
from engine.ops.device import DeviceOperations
from engine.ops.executor import Forward

if TYPE_CHECKING:
    # The packages that these need are optional.
    from engine.cuda.runtime.device import Device, Graph
    from engine.cuda.runtime.meeting import MeetingGraph
    from engine.cuda.runtime.occupant import Occupant
    from engine.cuda.runtime.tensor import Plan, Tensor
    from engine.ops.crossing import Crossing


@runtime_checkable
class GraphOperations(Protocol):
    """What steps use of such a backend."""

    device: "Device"
    """The device that chooses tokens."""
    tokens: "Tensor"
    positions: "Tensor"
    sequences: "Tensor"

    @property
    def devices(self) -> "tuple[Device, ...]":
        """The devices of its passes, the first of which is ``device``."""

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> "Tensor":
        """A zeroed array that outlives the pass."""

    def upload(self, array: np.ndarray) -> "Tensor":
        """A copy of an array in the GPU's memory."""

    def inputs(self) -> "Batch[Tensor]":
        """Memory for the tokens, positions and slots of passes, in addition to ``tokens``, ``positions`` and
        ``sequences``."""

    def plan(
        self,
        forward: "Forward[Tensor]",
        rows: int,
        n_logits: int,
        inputs: "Batch[Tensor] | None" = None,
        mixed: bool = False,
    ) -> "Plan":
        """A recorded pass."""

    def plan_maxima(self, forward: "Forward[Tensor]", rows: int, n_logits: int, mixed: bool = False) -> "Plan | None":
        """A recorded pass whose result is, instead of logits, the largest of each row, as keys uint64 [n_logits, groups] of
        groups of tokens (``engine/cuda/sample.py``).  None if a pass that returns logits takes no longer."""

    def padded_rows(self, rows: int, mixed: bool) -> int:
        """The number of rows that the recording of a pass of ``rows`` rows has."""

    def include(self, plan: "Plan", last: "Callable[[], None] | None" = None) -> None:
        """Launch its kernels in a graph that ``device`` captures.  last: launches others on ``device``, which use the result;
        only what follows them waits for the other devices of the pass."""

    def whole(self, plan: "Plan", graph: "Graph") -> "Graph | MeetingGraph":
        """A graph that includes a pass, as what one call launches on all of its devices."""

    def crossing(self, source: "GraphOperations", n_bytes: int) -> "Crossing[Tensor]":
        """The way of up to ``n_bytes`` bytes at a time from another GPU to this one."""

    def occupy(self, occupant: "Occupant") -> None:
        """Note whose pass is the next one; whoever started the one before is told (``Occupant.leave``)."""

    def shares_memory_with(self, other: DeviceOperations) -> bool:
        """Whether the other backend uses the same device object, and so the same memory and queue."""
