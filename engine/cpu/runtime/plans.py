"""Recorded passes, and which of them are kept."""

from dataclasses import dataclass

import numpy as np

from engine.arrays import Batch, Role
from engine.cpu.runtime.program import Program
from engine.cpu.runtime.recorder import Recorder
from engine.limits import DECODE_ROWS
from engine.ops.executor import Forward

WIDE_PLANS = 4
"""The number of passes of many rows that are kept in addition to the largest prefill pass.  Only the latest are kept, because
prompts differ in length, and batches in the number of answers."""

Key = tuple[Forward[np.ndarray], int, int, bool, bool]
"""The forward function, the number of rows, the number of rows with logits, whether the pass is mixed, and whether it is told
which rows have logits."""


@dataclass
class Plan:
    """A recorded pass.  Tokens, positions and slots must be written to ``inputs`` before the program is run."""

    inputs: Batch[np.ndarray]
    program: Program

    def fill(self, batch: Batch[np.ndarray]) -> None:
        """Write these rows to the inputs."""
        self.inputs.tokens[:], self.inputs.positions[:] = batch.tokens, batch.positions
        self.inputs.sequences[:] = batch.sequences
        if self.inputs.ends is not None:
            self.inputs.ends[:] = batch.ends


class Plans:
    """The recorded passes of one backend.

    ``kept``: decode passes, unless they have many rows, and prefill passes with the maximum number of rows; ``latest``: the
    latest of all other passes, oldest first.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.kept: dict[Key, Plan] = {}
        self.latest: dict[Key, Plan] = {}
        self._recorder = recorder

    def record(
        self, forward: Forward[np.ndarray], rows: int, n_logits: int, mixed: bool = False, ends: bool = False
    ) -> Plan:
        """A pass over ``rows`` tokens that returns the logits of the last ``n_logits``, or, with ``ends``, of those that the
        batch names; not yet compiled."""
        tokens, positions, sequences = (np.zeros(rows, np.int32) for _ in range(3))
        inputs = Batch(tokens, positions, sequences, mixed, ends=np.ones(n_logits, np.int32) if ends else None)
        return Plan(inputs, self._recorder.record(lambda: forward(inputs, n_logits)))

    def forget(self, rows: range) -> None:
        """Drop kept passes with these numbers of rows, so that they are recorded again when they are used."""
        self.kept = {key: plan for key, plan in self.kept.items() if key[1] not in rows}

    def plan(
        self,
        forward: Forward[np.ndarray],
        rows: int,
        n_logits: int,
        most: int,
        mixed: bool = False,
        role: Role = Role.DECODE,
        ends: bool = False,
    ) -> Plan:
        """The pass over ``rows`` tokens that returns the logits of the last ``n_logits``; most: the number of rows of the
        largest pass; mixed, role: see :class:`engine.arrays.Batch`; ends: whether the batch names the rows with logits."""
        # The results of a kept pass stay in memory, and those of many rows are large.
        many = mixed and rows > DECODE_ROWS
        key, passing = (forward, rows, n_logits, mixed, ends), many or (role is Role.PREFILL and rows < most)
        plan = self.latest.pop(key, None) if passing else self.kept.get(key)
        if plan is None:
            plan = self.record(forward, rows, n_logits, mixed, ends)
            plan.program.finish()
        if passing and len(self.latest) >= WIDE_PLANS:
            del self.latest[next(iter(self.latest))]
        (self.latest if passing else self.kept)[key] = plan
        return plan
