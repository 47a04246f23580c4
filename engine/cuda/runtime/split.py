"""A pass that is launched in pieces, so that other passes can run between them."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from engine.cuda.runtime.device import Device
from engine.cuda.runtime.plans import Plans
from engine.cuda.runtime.tensor import Plan, Tensor


class PlanOperations(Protocol):
    """The interface of a GPU backend that a pass in pieces uses."""

    device: Device
    plans: Plans

    def download(self, array: Tensor, out: np.ndarray | None = None) -> np.ndarray:
        """A copy of an array as a NumPy array, after everything launched so far has ended."""


class SplitPlan:
    """A pass whose inputs have been written.  A piece of a prefill pass is one launch; a decode pass is one piece.

    Decode passes may run between two pieces, because prefill passes have their own memory for inputs and intermediate
    results.  All prefill passes share this memory, so a pass must be finished or cancelled before another one starts.
    """

    def __init__(
        self, plan: Plan, ops: PlanOperations, wanted: Sequence[Tensor], whole: bool, is_started: bool = False
    ) -> None:
        """wanted: the parts of the result to download; whole: whether the pass is one piece; is_started: whether all of its
        launches have been started."""
        self.pieces = 1 if whole else len(plan.launches)
        self._plan = plan
        self._ops = ops
        self._wanted = wanted
        self._started = self.pieces if is_started else 0
        self._result: np.ndarray | None = None
        self._reader: Callable[[Tensor], np.ndarray] | None = None

    def read_by(self, reader: Callable[[Tensor], np.ndarray]) -> None:
        """Let a function read the logits of a pass that returns those of consecutive rows, instead of a copy of them."""
        self._reader = reader

    def advance(self, count: int) -> int:
        """Launch the next ``count`` pieces without waiting for them; returns the number of pieces left."""
        first, end = self._started, min(self._started + count, self.pieces)
        if first == 0 and end == self.pieces:
            self._ops.plans.start_whole(self._plan)
        elif first < end:
            self._ops.plans.start(self._plan, which=slice(first, end))
        self._started = end
        return self.pieces - end

    def finish(self) -> None:
        """Launch the pieces left and keep the logits, because another pass is about to overwrite them."""
        self.advance(self.pieces)
        self._result = self.logits(wait=False)

    def logits(self, wait: bool, out: np.ndarray | None = None) -> np.ndarray | None:
        """The logits of the last rows of the pass, float32 [n_logits, n_vocab]; None if none were requested.  All pieces must
        have been launched.  wait: whether to wait for the pass even then; out: the array for them, None: a new one."""
        wanted, self._wanted = self._wanted, ()
        if wanted and self._reader is not None:
            (rows,) = wanted
            return self._reader(rows)
        if len(wanted) == 1:
            return self._ops.download(wanted[0], out)
        if wanted:
            return np.concatenate([self._ops.download(part) for part in wanted])
        if wait:
            self._ops.device.synchronize()
        return self._result

    @property
    def output(self) -> Tensor | None:
        """The result of the pass."""
        return self._plan.result

    def cancel(self) -> None:
        """Launch no further piece."""
        self._started, self._wanted = self.pieces, ()
