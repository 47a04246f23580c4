"""A pass that is launched in pieces, so that other passes can run between them."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from engine.cuda.runtime.device import Device, Mark
from engine.cuda.runtime.plans import Plans, padded
from engine.cuda.runtime.tensor import Plan, Tensor
from engine.limits import MOST_TOGETHER


class PlanOperations(Protocol):
    """The interface of a GPU backend that a pass in pieces uses."""

    device: Device
    plans: Plans

    def download(self, array: Tensor, out: np.ndarray | None = None) -> np.ndarray:
        """A copy of an array as a NumPy array, after everything launched so far has ended."""


WHAT = "a pass over a prompt"
"""What is awaited, for errors."""


class CopiedRows:
    """Rows on their way to pinned memory, which a later copy overwrites once they were taken."""

    def __init__(self, device: Device, mark: Mark, rows: np.ndarray | None) -> None:
        """mark: the point in the queue after the copy; rows: the pinned memory, None if nothing is copied."""
        self._device, self._mark, self._rows = device, mark, rows
        self._is_taken = False

    def take(self) -> np.ndarray | None:
        """Wait for the copy, but not for what was launched after it; returns the rows, None if nothing was copied."""
        if not self._is_taken:
            self._mark.wait(WHAT)
            self._device.check_alarms()
            self._rows = None if self._rows is None else self._rows.copy()
            self._is_taken = True
        return self._rows

    def is_there(self) -> bool:
        """Whether :meth:`take` would return at once."""
        return self._is_taken or self._mark.is_passed(WHAT)


class RowCopies:
    """Copies of logits to pinned memory, so that the next pass may overwrite them before the host needs them.  There is
    memory for those of two passes; before a third copy begins, the first one is awaited."""

    def __init__(self, device: Device) -> None:
        self._device = device
        #: Pinned memory and its address on the device: that of the older copy first.
        self._memory = [(np.empty(0, np.float32), 0)] * 2
        #: The latest copies, the older one first.
        self._copies: list[CopiedRows] = []

    def start(self, rows: Tensor | None) -> CopiedRows:
        """Copy rows, float32 [n, width], after everything launched so far.  None: copy nothing, and only note how much has
        been launched."""
        mark = self._device.mark()
        if rows is None:
            mark.set()
            return CopiedRows(self._device, mark, None)
        if len(self._copies) == 2:
            self._copies[0].take()
            del self._copies[0]
        if self._memory[0][0].size < rows.size:
            size, what = padded(rows.size), "the logits of prompts"
            self._memory[0] = self._device.pinned((size,), np.float32, what, zeroed=False)
        array, address = self._memory[0]
        self._device.move(address, rows.address, 4 * rows.size)
        mark.set()
        self._memory.reverse()
        self._copies.append(CopiedRows(self._device, mark, array[: rows.size].reshape(rows.shape)))
        return self._copies[-1]


class SplitPlan:
    """A pass whose inputs have been written.  A piece of a prefill pass is one launch; a decode pass is one piece.

    Decode passes may run between two pieces, because prefill passes have their own memory for inputs and intermediate
    results.  All prefill passes share this memory, so all pieces of a pass must be launched, or the pass cancelled, before
    another one starts.
    """

    def __init__(
        self,
        plan: Plan,
        ops: PlanOperations,
        wanted: Sequence[Tensor],
        whole: bool,
        is_started: bool = False,
        copies: RowCopies | None = None,
    ) -> None:
        """wanted: the parts of the result to download; whole: whether the pass is one piece; is_started: whether all of its
        launches have been started; copies: where few logits are copied when the pass ends, None: they are copied when they
        are asked for."""
        self.pieces = 1 if whole else len(plan.launches)
        self._plan = plan
        self._ops = ops
        self._wanted = wanted
        self._started = self.pieces if is_started else 0
        self._result: np.ndarray | None = None
        self._reader: Callable[[Tensor], np.ndarray] | None = None
        self._copies = copies
        self._copied: CopiedRows | None = None

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
        if end == self.pieces:
            self._copy()
        return self.pieces - end

    def _copy(self) -> None:
        """Let the device copy the logits, once, if they are few and the host reads them."""
        copies, self._copies = self._copies, None
        rows = sum(part.shape[0] for part in self._wanted)
        if copies is not None and self._reader is None and rows <= MOST_TOGETHER:
            self._copied = copies.start(*self._wanted or (None,))

    def is_running(self) -> bool:
        return self._copied is not None and not self._copied.is_there()

    def finish(self) -> None:
        """Launch the pieces left and keep the logits, because another pass is about to overwrite them."""
        self.advance(self.pieces)
        if self._copied is None:
            self._result = self.logits(wait=False)

    def logits(self, wait: bool, out: np.ndarray | None = None) -> np.ndarray | None:
        """The logits of the last rows of the pass, float32 [n_logits, n_vocab]; None if none were requested.  All pieces must
        have been launched.  wait: whether to wait for the pass even then; out: the array for them, None: a new one."""
        if self._copied is not None:
            return self._copied.take() if self._wanted or wait else None
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
        self._started, self._wanted, self._copies = self.pieces, (), None
