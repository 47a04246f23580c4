"""Recorded passes: which of them are kept, and which are captured as graphs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from engine.arrays import Batch, Role
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.device import Device, Graph, shared_percent
from engine.cuda.runtime.meeting import Meeting, MeetingGraph
from engine.cuda.runtime.recorder import Recorder
from engine.cuda.runtime.tensor import Launch, Plan, Tensor
from engine.limits import MOST_TOGETHER
from engine.ops.executor import Forward

WIDE_PLANS = 4
"""The number of prefill passes that are kept in addition to those with a usual number of rows.  Only the latest are kept,
because prompts differ in length.  Of those that read several prompts, which have one of two numbers of logits, twice as many
are kept."""

Key = tuple[Forward[Tensor], int, int, int, bool, Role]
"""The forward function, the number of rows, the number of rows with logits, the address of the tokens, whether the pass is
mixed, and its role."""


def padded(rows: int) -> int:
    """The next power of two, the number of rows of many passes, so that few graphs are needed."""
    return 1 << (rows - 1).bit_length()


def decode_size(rows: int) -> int:
    """The number of rows of a mixed decode pass for ``rows`` rows: 96, or the next power of two."""
    return 96 if 64 < rows <= 96 else padded(rows)


def logits_of_prompts(n_logits: int) -> int:
    """The number of logits of a pass that reads several prompts, of which ``n_logits`` are wanted: one of two, so that few
    recordings are needed."""
    return NARROW_ROWS if n_logits <= NARROW_ROWS else MOST_TOGETHER


def rows_of(place: Batch[Tensor], rows: int, n_logits: int, mixed: bool, role: Role) -> Batch[Tensor]:
    """The batch of the first ``rows`` rows of the inputs of a pass with ``n_logits`` logits."""
    batch = replace(place.part(slice(rows)), mixed=mixed, role=role)
    if role is Role.DECODE or not mixed:
        return batch
    assert place.ends is not None
    return replace(batch, runs=place.runs, ends=place.ends[:n_logits])


def percent(launches: Sequence[Launch], rows: int, shared_memory: int) -> int:
    """The percentage of fast memory that all kernels of a pass prefer as shared memory; 0 if each kernel keeps its own.

    Two kernels with different preferences do not overlap, so all kernels of a step use the largest preference.  Mixtures
    of experts and delta nets are slower with less cache, and in a wide pass the overlap is short compared with the kernels,
    so kernels of these passes keep their own.  shared_memory: the maximum shared memory of a block, in bytes.
    """
    kernels = [launch.kernel for launch in launches]
    if rows > NARROW_ROWS or any(kernel.kernel.cached for kernel in kernels):
        return 0
    return max((shared_percent(kernel.shared, kernel.blocks, shared_memory) for kernel in kernels), default=0)


class Plans:
    """The recorded passes of one backend.

    ``kept``: decode passes, and prefill passes with a usual number of rows: the maximum, or a power of two, as in prompts
    that are read while requests run; ``latest``: the latest of all other passes, oldest first.
    """

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self.kept: dict[Key, Plan] = {}
        self.latest: dict[Key, Plan] = {}
        self._device = device
        self._recorder = recorder
        self._meetings: dict[tuple[Device, ...], Meeting] = {}

    def plan(
        self,
        forward: Forward[Tensor],
        place: Batch[Tensor],
        rows: int,
        n_logits: int,
        most: int,
        mixed: bool = False,
        role: Role = Role.DECODE,
    ) -> Plan:
        """The pass over the first ``rows`` tokens of ``place`` that returns the logits of the last ``n_logits``; most: the
        number of rows of the largest pass; mixed, role: see :class:`engine.arrays.Batch`."""
        return self.prepare(forward, place, rows, n_logits, most, mixed, role, False)[0]

    def prepare(
        self,
        forward: Forward[Tensor],
        place: Batch[Tensor],
        rows: int,
        n_logits: int,
        most: int,
        mixed: bool,
        role: Role,
        at_once: bool,
    ) -> tuple[Plan, bool]:
        """The pass of :meth:`plan`, and whether it has been started as a whole.

        A decode pass, or a pass with the maximum number of rows, is captured at once.  Others are captured when they are
        launched as a whole for the second time.

        at_once: whether to start the kernels of a prefill pass while it is recorded, if it has to be.  Its inputs must be in
        place.  For a few hundred tokens recording takes as long as the kernels.
        """
        key, often = (forward, rows, n_logits, place.tokens.address, mixed, role), role is Role.DECODE or rows == most
        passing = not often and padded(rows) != rows
        plan = self.latest.pop(key, None) if passing else self.kept.get(key)
        alike = [other for other in self.latest if other[4] is mixed] if passing else []
        if len(alike) >= WIDE_PLANS * (2 if mixed else 1):
            self._device.synchronize()  # it may be in flight
            del self.latest[alike[0]]
        starts = plan is None and at_once and not often and rows > NARROW_ROWS
        if plan is None:
            batch = rows_of(place, rows, n_logits, mixed, role)
            start = partial(self._start_kernel, self._device) if starts else None
            plan = self._recorder.record(lambda: forward(batch, n_logits), role, start)
            plan.percent = percent(plan.launches, rows, self._device.shared_memory)
            if often:
                self.capture(plan)
            if starts:
                self.start(plan, which=slice(self._recorder.n_started, None))
                plan.started = True
        (self.latest if passing else self.kept)[key] = plan
        return plan, starts

    def capture(self, plan: Plan) -> None:
        """Compile the kernels of a plan and capture its graph."""
        for launch in plan.launches:
            plan.devices[launch.device].load(launch.kernel)
        with self._device.capture() as graph:
            self.include(plan)
        plan.graph = graph

    def include(self, plan: Plan, last: Callable[[], None] | None = None) -> None:
        """Launch the kernels of a plan in a graph that is being captured on its first device.  last: launches others there,
        which use the result; only what follows them waits for the other devices."""
        self._launch(plan, plan.launches, last=last)

    def whole(self, plan: Plan, graph: Graph) -> Graph | MeetingGraph:
        """A graph that includes a plan, as what one call launches on all of its devices."""
        return graph if len(plan.devices) == 1 else MeetingGraph(self._meeting(plan), graph)

    def start_whole(self, plan: Plan) -> None:
        """Launch a plan.  On its first launches it has no graph, so its kernels are launched one by one: the first ones run
        while the others are launched, and a prompt of a new length does not wait for a capture.  The second time it is
        captured, too, while the kernels run."""
        if plan.graph is None:
            self.start(plan)
            if plan.started:
                self.capture(plan)
            plan.started = True
            return
        self.whole(plan, plan.graph).launch()

    def start(self, plan: Plan, then: Callable[[Launch], None] | None = None, which: slice = slice(None)) -> None:
        """Launch the kernels of a plan one by one.  then: called after each kernel has ended; which: the kernels to
        launch."""
        with self._meeting(plan).turn():
            self._launch(plan, plan.launches[which], then)

    def _launch(
        self,
        plan: Plan,
        launches: Sequence[Launch],
        then: Callable[[Launch], None] | None = None,
        last: Callable[[], None] | None = None,
    ) -> None:
        """Launch kernels of a plan one by one, after everything that has been launched on its first device and before
        everything that is launched there next.  then: called after each kernel has ended; last: called at the end, before the
        first device waits for the others."""
        meeting = self._meeting(plan)
        meeting.part()
        for i, launch in enumerate(launches):
            device = plan.devices[launch.device]
            if i and launch.stretch != launches[i - 1].stretch:
                meeting.meet()
            self._start_kernel(device, launch, plan.percent)
            if then is not None:
                device.synchronize(f"the kernel {launch.kernel.name}")
                then(launch)
        if last is not None:
            last()
        meeting.gather()

    @staticmethod
    def _start_kernel(device: Device, launch: Launch, percent: int = 0) -> None:
        device.launch(launch.kernel, launch.grid, launch.block, launch.arguments, percent)
        if launch.finishes:
            device.finish()

    def _meeting(self, plan: Plan) -> Meeting:
        """How the devices of a plan wait for each other."""
        if plan.devices not in self._meetings:
            self._meetings[plan.devices] = Meeting(plan.devices)
        return self._meetings[plan.devices]
