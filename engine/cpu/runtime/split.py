"""A pass that is run in pieces.  On the CPU it is one piece."""

from collections.abc import Callable

import numpy as np


class WholePass:
    """A pass in one piece.  While requests run, the CPU reads prompts in passes of few rows instead."""

    def __init__(self, run: Callable[[], np.ndarray | None]) -> None:
        """run: computes the pass and returns its logits."""
        self.pieces = 1
        self._run = run
        self._result: np.ndarray | None = None

    def advance(self, count: int) -> int:
        """Run the pass; returns 0, the number of pieces left."""
        self._result = self._run()
        return 0

    def logits(self, wait: bool) -> np.ndarray | None:
        """The logits of the last rows, float32 [n_logits, n_vocab]; None if none were requested.  wait: has no effect,
        because the pass has ended."""
        return self._result

    def is_running(self) -> bool:
        """False: it has ended when :meth:`advance` returns."""
        return False

    @property
    def output(self) -> np.ndarray | None:
        """The result of the pass."""
        return self._result

    def cancel(self) -> None:
        """Do nothing, because no piece is left."""


class NoMark:
    """A point that everything has already passed (``engine.ops.executor.QueueMark``)."""

    def set(self) -> None:
        """Do nothing."""

    def wait(self, what: str) -> None:
        """Do nothing."""
