"""Steps of a model whose layers several GPUs share: the first of them, the lead, chooses the tokens.

A step is one graph, as on a single GPU.  It has the kernels of all owners, and at its end those that choose the tokens, which
run on the lead.  The rows of a step are in the memory of the lead, from where all owners copy them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import Batch
from engine.decode.graph_operations import GraphOperations
from engine.group.backend import DeviceGroup
from engine.group.values import Divided, Whole
from engine.ops.device import DeviceOperations
from engine.ops.executor import Forward
from engine.shares import Cut

if TYPE_CHECKING:
    # The packages that these need are optional.
    from engine.cuda.runtime.device import Device, Graph
    from engine.cuda.runtime.meeting import MeetingGraph
    from engine.cuda.runtime.occupant import Occupant
    from engine.cuda.runtime.tensor import Plan, Tensor
    from engine.ops.crossing import Crossing


class GroupOperations:
    """What steps use of a group: the memory of its lead, and passes of all owners (:class:`GraphOperations`)."""

    def __init__(self, group: DeviceGroup, lead: GraphOperations) -> None:
        self._group = group
        self._lead = lead
        self.device = lead.device
        self.tokens, self.positions, self.sequences = lead.tokens, lead.positions, lead.sequences

    @property
    def devices(self) -> "tuple[Device, ...]":
        """The devices of all owners, each once."""
        owners = (cast(GraphOperations, ops) for ops in self._group.owners)
        return tuple(dict.fromkeys(ops.device for ops in owners))

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> "Tensor":
        """A zeroed array of the lead that outlives the pass."""
        return self._lead.zeros(shape, dtype)

    def upload(self, array: np.ndarray) -> "Tensor":
        """A copy of an array in the memory of the lead."""
        return self._lead.upload(array)

    def inputs(self) -> "Batch[Tensor]":
        """Memory of the lead for the tokens, positions and slots of passes."""
        return self._lead.inputs()

    def plan(
        self,
        forward: "Forward[Tensor]",
        rows: int,
        n_logits: int,
        inputs: "Batch[Tensor] | None" = None,
        mixed: bool = False,
    ) -> "Plan":
        """A recorded pass of all owners."""
        return self._lead.plan(self._group.of_all(forward), rows, n_logits, inputs, mixed)

    def plan_maxima(self, forward: "Forward[Tensor]", rows: int, n_logits: int, mixed: bool = False) -> "Plan":
        """A recorded pass of all owners whose result is the largest logits that each has found among its own, as keys."""
        return self.plan(_Maxima(self._group, forward), rows, n_logits, None, mixed)

    def padded_rows(self, rows: int, mixed: bool) -> int:
        """The number of rows that the recording of a pass has."""
        return self._lead.padded_rows(rows, mixed)

    def include(self, plan: "Plan", last: Callable[[], None] | None = None) -> None:
        """Launch its kernels in a graph that ``device`` captures.  last: launches others on the lead, which use the result;
        only what follows them waits for the other owners."""
        self._lead.include(plan, last)

    def whole(self, plan: "Plan", graph: "Graph") -> "Graph | MeetingGraph":
        """A graph that includes a pass, as what one call launches on all of its devices."""
        return self._lead.whole(plan, graph)

    def crossing(self, source: GraphOperations, n_bytes: int) -> "Crossing[Tensor]":
        """The way of up to ``n_bytes`` bytes at a time from another GPU to the lead."""
        return self._lead.crossing(source, n_bytes)

    def occupy(self, occupant: "Occupant") -> None:
        """Note whose pass is the next one; whoever started the one before is told (``Occupant.leave``)."""
        self._lead.occupy(occupant)

    def shares_memory_with(self, other: DeviceOperations) -> bool:
        """Whether the other backend is this group, or uses the device object of its lead."""
        return other is self._group or self._lead.shares_memory_with(other)


@dataclass(frozen=True)
class _Maxima:
    """A pass of a group that returns the largest logits of each row, as keys."""

    group: DeviceGroup
    forward: Forward[Any]

    def __call__(self, batch: Batch[Any], n_logits: int) -> Any:
        from engine.cuda.sample import owned_groups

        logits, owners = self.forward(batch, n_logits), cast(Sequence[Any], self.group.owners)
        n, groups = len(owners), owned_groups(len(owners))
        assert logits is not None, "no logits are wanted"
        if isinstance(logits, Whole):  # a small vocabulary
            return Whole([owners[0].maxima(logits.copies[0], 0, groups)])
        rows, _ = logits.shape
        # A key is two of the words in which owners exchange columns.
        words = [
            replace(ops.maxima(part, first, groups), shape=(rows, 2 * groups), dtype=np.float32)
            for ops, part, ((first, _),) in zip(owners, logits.parts, logits.cut.runs, strict=True)
        ]
        cut = Cut(tuple(((2 * groups * i, 2 * groups * (i + 1)),) for i in range(n)))
        found = Divided(cut, words, self.group.gathered).whole()
        return Whole([replace(copy, shape=(rows, n * groups), dtype=np.uint64) for copy in found.copies])


def graph_operations(ops: DeviceOperations) -> GraphOperations | None:
    """What steps use of a backend whose device chooses tokens; None if the host does."""
    if isinstance(ops, GraphOperations):
        return ops
    lead = ops.owners[0]
    return GroupOperations(ops, lead) if isinstance(ops, DeviceGroup) and isinstance(lead, GraphOperations) else None
