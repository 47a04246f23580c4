"""How several GPUs that compute one pass wait for each other, in their queues and in a captured graph.

An event at the end of one queue is waited for in the others.  While the queue of the first device is captured, the waits
bring those of the others into the same graph, whose launch is then a single call.

Kernels of such a pass may wait for each other (``engine/cuda/gather.py``), and those that begin early behind them may fill a
GPU.  If two passes did so on the same GPUs, each could keep away what the other one waits for.  So a pass of several devices
starts after the latest one of other queues on any of its GPUs.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence

from engine.cuda.runtime.device import Device, Graph, Mark

_turn = threading.RLock()
"""Held while a pass of several devices is launched, so that all GPUs have these passes in the same order."""

_latest: "weakref.WeakValueDictionary[int, Mark]" = weakref.WeakValueDictionary()
"""The end of the latest pass of several devices on each GPU."""


class Meeting:
    """Points at which devices wait for each other.  The host never waits.  With a single device there is nothing to do."""

    def __init__(self, devices: Sequence[Device]) -> None:
        """devices: the first one has the graph.  Each can access the memory of the others."""
        self._first, *self._others = devices
        self._marks = {device: device.mark() for device in devices} if self._others else {}
        self._end = self._first.mark() if self._others else None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A context in which a pass is launched: between the latest and the next one of several devices on the same GPUs.  It
        begins and ends with the first device."""
        if self._end is None:
            yield
            return
        with _turn:
            gpus = [device.info.index for device in self._marks]
            for end in {_latest[gpu] for gpu in gpus if gpu in _latest} - {self._end}:
                self._first.follow(end)
            self.gather()
            yield
            self.part()
            self._end.set()
            _latest.update(dict.fromkeys(gpus, self._end))

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
        with self._meeting.turn():
            self._graph.launch()
