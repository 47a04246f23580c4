"""A pass that is started in pieces.  On the CPU, it has only one."""

from collections.abc import Callable

import numpy as np


class WholePass:
    """A pass in one piece: the CPU reads a prompt beside answers in passes of few rows."""

    def __init__(self, run: Callable[[], np.ndarray | None]) -> None:
        """run: computes the pass and returns its logits."""
        self.pieces = 1
        self._run = run
        self._result: np.ndarray | None = None

    def advance(self, count: int) -> int:
        """Compute the pass; returns 0, the number of pieces that are left."""
        self._result = self._run()
        return 0

    def logits(self, wait: bool) -> np.ndarray | None:
        """The logits of its last rows, float32 [n_logits, n_vocab]; None if none are wanted.  wait: has no effect, since the
        pass has ended."""
        return self._result

    def cancel(self) -> None:
        """Do nothing: no piece is left."""
