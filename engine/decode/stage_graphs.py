"""Steps of a model whose layers are on several GPUs: a graph for each device, and copies between them.

The last device chooses tokens, so the rows of a step are in its memory.  A step is started there, as for one GPU, but what
its graph begins with comes from the others::

    last GPU:   rows of the step, send ............................... receive x | last stage, choice of tokens
    GPU 0:      receive rows | embedding, stage 0, send x
    GPU 1:      receive rows ..................... receive x | stage 1, send x
"""

from collections.abc import Sequence
from typing import Protocol, cast

from engine.cuda.runtime.device import Graph
from engine.cuda.runtime.tensor import Plan, Tensor
from engine.decode.graph_operations import GraphOperations
from engine.ops.crossing import Crossing
from engine.ops.executor import Forward
from engine.ops.relay import StageRelay


class Launchable(Protocol):
    """What one call starts."""

    def launch(self) -> None:
        """Start it after everything that was started before."""


class Launches:
    """What a step of several parts starts, in order."""

    def __init__(self, parts: Sequence[Graph | Launchable]) -> None:
        self._parts = parts

    def launch(self) -> None:
        """Start all parts."""
        for part in self._parts:
            part.launch()


class StageGraphs:
    """What the steps of one model start on all devices but the last."""

    def __init__(self, last: GraphOperations, relay: StageRelay[Tensor]) -> None:
        """last: the backend of the last stage."""
        self._last, self._relay = last, relay
        #: The backends of the other stages.
        self._others = [cast(GraphOperations, stage.ops) for stage in relay.stages[:-1]]
        n_bytes = 4 * sum(array.size for array in self._rows(last))
        #: The way of a step's rows to each of them.
        self._ways: list[Crossing[Tensor]] = [each.crossing(last, n_bytes) for each in self._others]

    @staticmethod
    def _rows(ops: GraphOperations) -> tuple[Tensor, Tensor, Tensor]:
        return ops.tokens, ops.positions, ops.sequences

    def of(self, rows: int, mixed: bool) -> Launchable:
        """What a step of so many rows starts before the graph of its last stage; mixed: whether they belong to several
        requests."""
        relay = self._relay
        told = None
        if relay.tell is not None:
            told = self._plan(self._others[0], relay.tell, rows, mixed)
        pairs = zip(self._others, relay.stages, strict=False)
        plans = [self._plan(ops, stage.compute, rows, mixed) for ops, stage in pairs]
        return _Before(self, rows, told, plans)

    @staticmethod
    def _plan(ops: GraphOperations, forward: Forward[Tensor], rows: int, mixed: bool) -> Plan:
        plan = ops.plan(forward, rows, rows, None, mixed)
        assert plan.graph is not None and plan.result is not None
        return plan

    def start(self, rows: int, told: Plan | None, plans: Sequence[Plan]) -> None:
        """Start all stages but the last, and the copies to the last device."""
        course = self._relay.begin()
        try:
            for ops, way in zip(self._others, self._ways, strict=True):
                ticket = way.send([array[slice(rows)] for array in self._rows(self._last)])
                try:
                    way.receive(ticket, [array[slice(rows)] for array in self._rows(ops)])
                except BaseException:
                    way.forget(ticket)
                    raise
            if told is not None:
                course.tell(_launched(told))
            for i, plan in enumerate(plans):
                course.enter(i)
                course.leave(i, _launched(plan))
            course.enter(len(plans))
        except BaseException:
            course.cancel()
            raise


class _Before:
    """The stages before the last one, for steps of one number of rows."""

    def __init__(self, graphs: StageGraphs, rows: int, told: Plan | None, plans: Sequence[Plan]) -> None:
        self._graphs, self._rows, self._told, self._plans = graphs, rows, told, plans

    def launch(self) -> None:
        self._graphs.start(self._rows, self._told, self._plans)


def _launched(plan: Plan) -> Tensor:
    """The result of a captured pass, which is started."""
    assert plan.graph is not None and plan.result is not None
    plan.graph.launch()
    return plan.result
