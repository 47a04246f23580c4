"""Recorded passes: which ones are kept, and which ones are captured as graphs."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.arrays import Batch
from engine.cuda.runtime.device import Device, shared_percent
from engine.cuda.runtime.recorder import Recorder
from engine.cuda.runtime.tensor import Launch, Plan, Tensor
from engine.limits import STEP_ROWS
from engine.ops.operations import Forward

WIDE_PLANS = 4
"""The number of passes with more rows than a step that are kept, besides the usual ones; only the latest, because prompts
differ in length."""

Key = tuple[Forward[Tensor], int, int, int, bool]
"""A pass, its number of rows, its number of rows with logits, the address of its tokens, and whether it is mixed."""


def padded(rows: int) -> int:
    """The number of rows of the pass that reads ``rows`` rows of several sequences: a power of two, so that few graphs serve
    all of them."""
    return 1 << (rows - 1).bit_length()


def percent(launches: Sequence[Launch], rows: int, shared_memory: int) -> int:
    """The percentage of fast memory that all kernels of a pass prefer as shared memory; 0: each its own.

    Two kernels with different preferences do not overlap, so kernels of a step prefer what the most demanding one needs.
    Mixtures and delta nets are slower without the cache, and in a pass of many rows kernels take much longer than what
    overlaps.  shared_memory: the most bytes that a block may request.
    """
    kernels = [launch.kernel for launch in launches]
    if rows > STEP_ROWS or any(kernel.kernel.cached for kernel in kernels):
        return 0
    return max((shared_percent(kernel.shared, kernel.blocks, shared_memory) for kernel in kernels), default=0)


class Plans:
    """The passes of one backend.

    ``kept``: the usual passes, with at most as many rows as a step, with the most rows, or with a power of two, of which
    prompts consist that are read beside answers; ``latest``: the latest of all other passes, oldest first.
    """

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self.kept: dict[Key, Plan] = {}
        self.latest: dict[Key, Plan] = {}
        self._device = device
        self._recorder = recorder

    def plan(
        self, forward: Forward[Tensor], place: Batch[Tensor], rows: int, n_logits: int, most: int, mixed: bool = False
    ) -> Plan:
        """The pass over the first ``rows`` tokens of ``place`` that returns the logits of the last ``n_logits``; most: the
        number of rows of the largest pass; mixed: see :class:`engine.arrays.Batch`.

        A pass with at most as many rows as a step, or with the most rows, is captured.  The others are captured when they are
        started as a whole for the second time.
        """
        key, often = (forward, rows, n_logits, place.tokens.address, mixed), rows <= STEP_ROWS or rows == most
        passing = not often and padded(rows) != rows
        plan = self.latest.pop(key, None) if passing else self.kept.get(key)
        if plan is None:
            batch = replace(place.part(slice(rows)), mixed=mixed)
            plan = self._recorder.record(lambda: forward(batch, n_logits), rows > STEP_ROWS)
            plan.percent = percent(plan.launches, rows, self._device.shared_memory)
            if often:
                self.capture(plan)
        if passing and len(self.latest) >= WIDE_PLANS:
            self._device.synchronize()  # it may be in flight
            del self.latest[next(iter(self.latest))]
        (self.latest if passing else self.kept)[key] = plan
        return plan

    def capture(self, plan: Plan) -> None:
        """Compile the kernels of a plan and capture its graph."""
        for launch in plan.launches:
            self._device.load(launch.kernel)
        with self._device.capture() as graph:
            self.start(plan)
        plan.graph = graph

    def start_whole(self, plan: Plan) -> None:
        """Start a plan.  Without a graph, its kernels are started one by one, and the first of them run while the others are
        started; so a prompt of a new length does not wait for a capture."""
        if plan.graph is None and plan.started:
            self.capture(plan)
        plan.started = True
        if plan.graph is not None:
            plan.graph.launch()
        else:
            self.start(plan)

    def start(self, plan: Plan, then: Callable[[Launch], None] | None = None, which: slice = slice(None)) -> None:
        """Start the kernels of a plan one by one; then: called after each kernel, once it has ended; which: the launches to
        start."""
        for launch in plan.launches[which]:
            self._device.launch(launch.kernel, launch.grid, launch.block, launch.arguments, plan.percent)
            if then is not None:
                self._device.synchronize(f"the kernel {launch.kernel.name}")
                then(launch)
