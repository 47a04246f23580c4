"""How several GPUs that compute one pass wait for each other, in their queues and in a captured graph.

An event at the end of one queue is waited for in the others.  While the queue of the first device is captured, the waits
bring those of the others into the same graph, whose launch is then a single call.
"""

from collections.abc import Sequence

from engine.cuda.runtime.device import Device, Graph


class Meeting:
    """Points at which devices wait for each other.  The host never waits.  With a single device there is nothing to do."""

    def __init__(self, devices: Sequence[Device]) -> None:
        """devices: the first one has the graph.  Each can access the memory of the others."""
        self._first, *self._others = devices
        self._marks = {device: device.mark() for device in devices} if self._others else {}

    def gather(self) -> None:
        """Let the first device wait for all others."""
        for device in self._others:
            self._marks[device].set()
            self._first.follow(self._marks[device])

    def part(self) -> None:
        """Let all others wait for the first device."""
        if self._others:
            self._marks[self._first].set()
        for device in self._others:
            device.follow(self._marks[self._first])

    def meet(self) -> None:
        """Let every device wait for all others."""
        for mark in self._marks.values():
            mark.set()
        for device in self._marks:
            for other, mark in self._marks.items():
                if other is not device:
                    device.follow(mark)


class MeetingGraph:
    """A graph with kernels on several devices.  It starts after everything that was launched on any of them, and what is
    launched next on any of them starts after it."""

    def __init__(self, meeting: Meeting, graph: Graph) -> None:
        self._meeting = meeting
        self._graph = graph

    def launch(self) -> None:
        """Launch the graph."""
        self._meeting.gather()
        self._graph.launch()
        self._meeting.part()
