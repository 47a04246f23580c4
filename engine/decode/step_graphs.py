"""The graphs of steps: a pass, the drafts before it, and the sampling of its tokens."""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import NamedTuple

from engine.cuda import accept, digest
from engine.cuda.runtime.compiler import Specialization
from engine.cuda.runtime.device import Graph
from engine.cuda.runtime.plans import decode_size, padded
from engine.cuda.runtime.tensor import Plan, Tensor
from engine.decode.device_drafts import DeviceDrafts
from engine.decode.device_sampler import DeviceSampler
from engine.decode.graph_operations import GraphOperations
from engine.decode.running import InFlightRequest
from engine.decode.stage_graphs import Launchable, Launches, StageGraphs
from engine.decode.step_kind import kind_of, masked
from engine.decode.step_rows import StepRows
from engine.ops.model import AnyModel


class Choice(NamedTuple):
    """The sampling of the tokens of a pass: its graph, the address of the logits, and the elements from one row to the
    next."""

    graph: Graph
    logits: int
    stride: int


class Graphs(NamedTuple):
    """The graph of a step, or, if a request has a grammar, the graph of its pass and the sampling of its tokens.  If several
    GPUs have some layers each, there are more graphs, and copies between them."""

    graph: Launchable
    choice: Choice | None


class StepGraphs:
    """The graphs of the steps of one model, each captured when it is first needed."""

    def __init__(self, ops: GraphOperations, model: AnyModel[Tensor], chooser: DeviceSampler, rows: StepRows) -> None:
        self._ops = ops
        self._device = ops.device
        self._model = model
        self._chooser = chooser
        self._rows = rows
        #: What steps start on all devices but the last; None: there is one device.
        self._before = None if model.relay is None else StageGraphs(ops, model.relay)
        #: The operations of the device that chooses tokens.
        self._compute = model.compute if model.relay is None else model.relay.stages[-1].compute
        self._graphs: dict[tuple[Hashable, ...], Graphs] = {}

    def forget_drafts(self) -> None:
        """Drop the graphs of steps whose drafts the device makes, because another source makes them."""
        self._graphs = {key: graphs for key, graphs in self._graphs.items() if not key[-1]}

    def of(self, requests: Sequence[InFlightRequest], rows_of: Sequence[int], drafts: DeviceDrafts | None) -> Graphs:
        """The graph of a step of these requests, or its two graphs if a request has a grammar.  rows_of: the number of rows
        of each; drafts: what makes their drafts on the device, or None."""
        kind, n, apart = kind_of(requests), len(requests), any(map(masked, requests))
        used = sum(rows_of)
        rows = used if n == 1 else decode_size(used)
        count = max(rows_of) - 1 if drafts is not None else 0
        entries, drafted = (1, 1) if n == 1 else (rows, padded(n))
        drafting = (count, drafted, drafts.scripted) if drafts is not None and count else ()
        digested = any(request.running.request.receipt for request in requests)
        key = (rows, entries, kind, apart, digested, drafting)
        if key not in self._graphs:
            mixed = n > 1
            before = self._before.of(rows, mixed) if self._before is not None else None
            # Only then do all logits have to be where tokens are chosen.
            of_logits = not kind.greedy or kind.with_edit or apart or digested
            self._plan(rows, mixed, of_logits)
            kernels: list[Specialization] = [accept.lay_out()]
            if drafts is not None and drafting:
                kernels += drafts.kernels(count, drafted, rows, kind)
            if digested:
                kernels += digest.kernels()
                _ = self._chooser.digest_memory  # allocated before a capture begins
            place = self._rows.addresses(rows, mixed)
            lists = drafts.lists(kind.mode) if drafts is not None and drafting else None
            plan, has_logits = self._plan(rows, mixed, of_logits)
            assert plan.result is not None
            # Of logits, or of keys.
            address, width = plan.result.address, plan.result.shape[-1]
            where = (address, width, rows, place, self._rows.at.address)
            if has_logits:
                kernels += self._chooser.kernels(*kind)
                choose = partial(self._chooser.launch, *where, *kind, draft_lists=lists, n_entries=entries)
            else:
                kernels += self._chooser.kernels_of_maxima(width)
                choose = partial(self._chooser.launch_maxima, *where, n_entries=entries)
            for kernel in kernels:
                self._device.load(kernel)  # before a capture begins

            def end() -> None:
                if digested:
                    self._chooser.launch_digests(address, width, rows, place)
                if not apart:
                    choose()

            parts: list[Graph | Launchable] = []
            if before is not None:
                if drafts is not None and drafting:
                    with self._device.capture() as drafted_first:
                        drafts.launch(count, drafted, place, rows, kind)
                    parts.append(drafted_first)
                parts.append(before)
            with self._device.capture() as graph:
                if drafts is not None and drafting and before is None:
                    drafts.launch(count, drafted, place, rows, kind)
                self._ops.include(plan, end)
            last = self._ops.whole(plan, graph)
            whole = Launches([*parts, last]) if parts else last
            graphs = Graphs(whole, None)
            if apart:
                with self._device.capture() as choice:
                    choose()
                graphs = Graphs(whole, Choice(choice, address, width))
            self._graphs[key] = graphs
        return self._graphs[key]

    def _plan(self, rows: int, mixed: bool, of_logits: bool) -> tuple[Plan, bool]:
        """The pass of a step, and whether its result are logits; if not, it has the largest ones as keys.  of_logits: whether
        it has to be logits."""
        if not of_logits:
            plan = self._ops.plan_maxima(self._compute, rows, rows, mixed)
            if plan is not None:
                return plan, False
        return self._ops.plan(self._compute, rows, rows, None, mixed), True
