"""Passes: recorded, divided and run."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np

from engine.arrays import A, Batch
from engine.compile.jobs import Job
from engine.ops.model import AnyModel
from engine.ops.observation import Observer

Forward: TypeAlias = Callable[[Batch[A], int], A | None]
"""A pass, written in operations: ``forward(batch, n_logits)`` returns the logits of the last ``n_logits`` rows, or None.  A
backend may record it once and replay it, so the operations it calls may depend on the number of rows, never on values."""


class SplitPass(Protocol):
    """A pass over a part of a prompt, started in pieces, so that steps can run between them.  It computes the same bits as in
    one piece."""

    pieces: int
    """The number of pieces, at least 1."""

    def advance(self, count: int) -> int:
        """Start the next ``count`` pieces; returns how many are left."""

    def logits(self, wait: bool) -> np.ndarray | None:
        """The logits of the last rows of the pass, all of which has been started, float32 [n_logits, n_vocab]; None if none
        are wanted.  wait: whether to wait for the pass in any case."""

    def cancel(self) -> None:
        """Start no further piece.  What the pass should have stored is undefined."""


class Executor(Protocol[A]):
    """How a backend runs passes: it records one once for each number of rows, and replays the recording."""

    max_rows: int
    """The number of rows of the largest pass that reads a prompt."""

    decode_rows: int
    """The most rows of a decode batch: of all answers that one pass continues, with their drafts."""

    splits: bool
    """Whether prefill passes have several pieces (``split``)."""

    ahead_drafted: int
    """The number of steps with drafts that may be in flight at once."""

    def inputs(self) -> Batch[A] | None:
        """Memory for the tokens and positions of passes that run between the steps of an answer, int32 [rows] each; None
        if passes take them as arguments."""

    def run(
        self, forward: Forward[A], batch: Batch[np.ndarray], n_logits: int, inputs: Batch[A] | None = None
    ) -> np.ndarray | None:
        """Run a pass over the rows of ``batch`` and return its result, float32 [n_logits, n_vocab]; None for no logits.

        inputs: the memory for its tokens and positions, from ``inputs()``; None: the backend's own.
        """

    def split(self, forward: Forward[A], batch: Batch[np.ndarray], n_logits: int) -> SplitPass:
        """The pass over the rows of ``batch``, to be started in pieces.  Any other pass may run between two of them, and if
        that needs the memory of this one, it lets this one end first."""

    def next_rows(self, left: int, beside: bool = False) -> int:
        """The number of tokens, out of the ``left`` ones of a prompt, that the next pass should read: 1 to ``max_rows``;
        beside: whether steps of answers run between its pieces."""

    def jobs(self, model: AnyModel[A]) -> list[Job]:
        """A compile job for every kernel that the passes and steps of a model use; any process can run it."""

    def warm_up(self, model: AnyModel[A]) -> None:
        """Load the kernels of ``jobs``, and compile those that are not compiled yet.  Overwrites the model's cache."""

    def expect_drafts(self) -> None:
        """Choose kernels that are fast for passes of a few rows, which verify drafts."""

    def observe(self, observer: Observer[A] | None) -> None:
        """Call ``observer`` with intermediate values of all further operations; None: stop.

        The CPU reports values inside its operations: "query" in attention, the normalized and rotated queries [rows, n_head,
        d_k]; "convolved" in a delta net, q, k and v of each row, concatenated: [rows, n_channels].

        A GPU reports each kernel that ``Backend.start`` starts, once it has ended, with the arrays that it wrote.  Their
        names are those of ``engine.cuda.runtime.tensor.Launch``.
        """
