"""A pass that is started in pieces, between which other passes run."""

from typing import Protocol

import numpy as np

from engine.cuda.runtime.device import Device
from engine.cuda.runtime.plans import Plans
from engine.cuda.runtime.tensor import Plan, Tensor


class PlanOperations(Protocol):
    """The interface of a GPU's backend that a pass in pieces uses."""

    device: Device
    plans: Plans

    def download(self, array: Tensor) -> np.ndarray:
        """A copy of an array as a NumPy array, after all work started earlier has ended."""


class SplitPlan:
    """A pass whose inputs are in place.  A piece is one launch of a pass of many rows; any other pass is one piece.

    Steps may run between two pieces: intermediate results and inputs of passes of many rows have memory of their own.  Two of
    these passes share that memory, so one has to be finished or cancelled before another begins.
    """

    def __init__(self, plan: Plan, ops: PlanOperations, wanted: Tensor | None, whole: bool) -> None:
        """wanted: the rows of its result that are wanted, None: none; whole: whether the pass is one piece."""
        self.pieces = 1 if whole else len(plan.launches)
        self._plan = plan
        self._ops = ops
        self._wanted = wanted
        self._started = 0
        self._result: np.ndarray | None = None

    def advance(self, count: int) -> int:
        """Start the next ``count`` pieces without waiting for them; returns how many are left."""
        first, end = self._started, min(self._started + count, self.pieces)
        if first == 0 and end == self.pieces:
            self._ops.plans.start_whole(self._plan)
        elif first < end:
            self._ops.plans.start(self._plan, which=slice(first, end))
        self._started = end
        return self.pieces - end

    def finish(self) -> None:
        """Start what is left, and keep the logits: another pass is about to use their memory."""
        self.advance(self.pieces)
        self._result = self.logits(wait=False)

    def logits(self, wait: bool) -> np.ndarray | None:
        """The logits of the last rows of the pass, all of which has been started, float32 [n_logits, n_vocab]; None if none
        are wanted.  wait: whether to wait for the pass in any case."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            return self._ops.download(wanted)
        if wait:
            self._ops.device.synchronize()
        return self._result

    def cancel(self) -> None:
        """Start no further piece."""
        self._started, self._wanted = self.pieces, None
