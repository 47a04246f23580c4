"""The execution of passes: recording, splitting and running them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np

from engine.arrays import A, A_co, Batch
from engine.compile.jobs import Job
from engine.ops.gathering import Gathering
from engine.ops.model import AnyModel, Recordable
from engine.ops.observation import Observer

Forward: TypeAlias = Callable[[Batch[A], int], A | None]
"""A pass as a function that calls operations: ``forward(batch, n_logits)`` returns the logits of the last ``n_logits`` rows,
or None.  A backend may record the pass once and replay it.  The sequence of operations may therefore depend on the number of
rows, but not on values."""


class SplitPass(Protocol):
    """A pass over a part of a prompt that is started in pieces, so that steps can run between them.

    The results have the same bits as those of an unsplit pass.
    """

    pieces: int
    """The number of pieces, at least 1."""

    def advance(self, count: int) -> int:
        """Start the next ``count`` pieces, and return the number of pieces that are left."""

    def is_running(self) -> bool:
        """Whether the device is known to compute the pass still; all pieces must have been started."""

    def logits(self, wait: bool) -> np.ndarray | None:
        """The logits of the last rows, float32 [n_logits, n_vocab]; None if the pass computes no logits.

        All pieces must have been started.  wait: whether to wait for the end of the pass even if it computes no logits.
        """

    def cancel(self) -> None:
        """Abandon the pass: no further pieces can be started.  The contents of the positions that it should have stored are
        undefined."""


class BackendPass(SplitPass, Protocol[A_co]):
    """A pass of a backend."""

    @property
    def output(self) -> A_co | None:
        """What the function of the pass has returned, in the memory of the backend: valid for everything that is started
        there before another pass of the same role.  All pieces must have been started."""


class ReadablePass(SplitPass, Protocol):
    """A pass whose logits a function can read in the memory of the device."""

    def read_by(self, reader: Callable[[Any], np.ndarray]) -> None:
        """Let :meth:`logits` return what a function makes of the rows, an array of the device with float32 [n_logits,
        n_vocab], instead of a copy of them.  The function may change them."""


class QueueMark(Protocol):
    """A point in the queue of a backend: that of the last call of :meth:`set`."""

    def set(self) -> None:
        """Move it to the end of everything that has been started."""

    def wait(self, what: str) -> None:
        """Wait until everything before it has ended; for nothing before the first :meth:`set`.  Raises DeviceError, naming
        the operation ``what``, if that has failed."""


class Executor(Protocol[A]):
    """The execution of passes on a backend, which may record a pass once for each number of rows and replay it."""

    max_rows: int
    """The maximum number of rows in a pass that reads a prompt.  A model may use fewer."""

    decode_rows: int
    """The maximum number of rows of an answer in a decode batch."""

    drafted_rows: int
    """The maximum number of rows in a decode batch with drafts, for all answers that it continues; at least
    ``decode_rows``."""

    decode_answers: int
    """The maximum number of answers in a decode batch."""

    splits: bool
    """Whether prefill passes are split into several pieces (``split``)."""

    def inputs(self) -> Batch[A] | None:
        """Allocate memory for the tokens and positions, int32 [rows] each, of passes that run between the steps of an answer.

        Returns None if passes take tokens and positions as arguments.
        """

    def run(
        self,
        forward: Forward[A],
        batch: Batch[np.ndarray],
        n_logits: int,
        inputs: Batch[A] | None = None,
        most: int = 0,
        out: np.ndarray | None = None,
    ) -> np.ndarray | None:
        """Run a pass over the rows of ``batch`` and return its logits, float32 [n_logits, n_vocab]; None if n_logits is 0.

        The parts of a divided model are passes over the same ``batch`` object, whose rows may then be written only once.

        inputs: memory for tokens and positions, allocated by :meth:`inputs`; None: the memory of the backend.
        most: the maximum number of rows in a pass of the model that reads a prompt; 0: ``max_rows``.  The recordings of
            passes with this number of rows are kept.
        out: a contiguous array that the result is written to, and which is returned; None: a new one.
        """

    def split(
        self, forward: Forward[A], batch: Batch[np.ndarray], n_logits: int, most: int = 0, at_once: bool = False
    ) -> BackendPass[A]:
        """Prepare a pass over the rows of ``batch`` that is started in pieces.  If the batch has ``ends``, the logits of the
        rows that it names are computed instead of those of the last rows.

        Other passes may run between the pieces.  A pass that needs the memory of this one lets all pieces be started before;
        the logits of this one can be asked for later.

        most: see :meth:`run`.
        at_once: whether nothing needs to run between the pieces.  The pass may then have been started when this returns.
        """

    def mark(self) -> QueueMark:
        """A point in the queue, which is nowhere yet."""

    def many_answers(self, weights: Mapping[str, int]) -> int:
        """The number of answers from which a decode batch of more than ``decode_rows`` is faster than several batches.

        weights: the bytes of a model's matrices by the names of their formats.
        """

    def next_rows(self, left: int, most: int, beside: bool = False) -> int:
        """The number of tokens that the next pass over prompts should read, from 1 to ``most``.

        left: the number of tokens, of one prompt or of several that a pass may read together, that have not been read.
        most: the maximum number of rows in a pass of the model that reads a prompt, at most ``max_rows``.
        beside: whether steps of answers run between the pieces of the pass.
        """

    def padded_rows(self, rows: int, mixed: bool) -> int:
        """The number of rows that the recording of a pass of ``rows`` rows has: further rows are copies of the last one.
        mixed: see :class:`engine.arrays.Batch`."""

    def jobs(self, model: Recordable[A]) -> list[Job]:
        """Compile jobs, one for each kernel that the passes of a model use.  Any process can run them."""

    def warm_up(self, model: AnyModel[A]) -> None:
        """Load the kernels of :meth:`jobs`, and compile those that are not compiled yet.  Overwrites the cache of the
        model."""

    def pass_jobs(self, forward: Forward[A], most: int = 1) -> list[Job]:
        """Compile jobs, one for each kernel of passes of 1 to ``most`` rows that return the logits of at most the last
        row."""

    def load_pass(self, forward: Forward[A], most: int = 1) -> None:
        """Load the kernels of :meth:`pass_jobs`, and compile those that are not compiled yet.  A backend may run a pass of
        one row, which overwrites position 0 of the sequence in slot 0."""

    def expect_drafts(self) -> None:
        """Select kernels that are fast for passes of a few rows, because passes will verify drafts or continue several
        answers."""

    def together(self, others: Sequence[Any]) -> AbstractContextManager[None]:
        """A context, within a pass that this backend records, in which the operations of other backends are recorded into
        the same pass.  others: backends of the same kind whose arrays it can read, such as those of the owners of a group
        (``engine/group/backend.py``)."""

    def meet(self) -> None:
        """In :meth:`together`: let all operations that follow, of any of the backends, begin when all before them have
        ended.  Operations of different backends are otherwise not ordered."""

    def gathering(self, owners: Sequence[Any]) -> Gathering | None:
        """How the owners of a group, of which this is the first one, bring columns together in steps of answers; None: only
        by :meth:`meet`.  owners: as for :meth:`together`.  Raises DeviceError if memory runs out."""

    def own_rows(self, batch: Batch[A]) -> Batch[A]:
        """In :meth:`together`: the rows of a pass, which are in the memory of another backend, in the memory of this one."""

    def observe(self, observer: Observer[A] | None) -> None:
        """Call ``observer`` with intermediate values of all following operations.  None removes the observer.

        The CPU reports intermediate values of operations: "query" in attention, the normalized and rotated queries [rows,
        n_head, d_k], and "convolved" in a delta net, q, k and v of each row, concatenated: [rows, n_channels].

        A GPU reports each kernel that ``Backend.start`` launches, after it has ended, with the arrays that it wrote.  The
        names of the arrays are those in ``engine.cuda.runtime.tensor.Launch``.
        """
