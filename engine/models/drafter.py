"""The interface of a network that drafts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.arrays import A, Array, Batch
from engine.cache.sequence import Sequence
from engine.ops.executor import Forward
from engine.ops.operations import Ops


def pass_of(passes: SequenceOf[Forward[A]], number: int) -> Forward[A]:
    """The pass that makes draft ``number`` of a step, the last one for all further drafts (:attr:`Drafter.passes`)."""
    return passes[min(number, len(passes) - 1)]


class Fusion(Protocol):
    """What a drafter reads of several layers of the trunk."""

    def apply(self, ops: Ops, taps: SequenceOf[Array]) -> Array:
        """A row of float32 [rows, n] for the rows of the residual stream before each layer, float32 [rows, n_embd]."""


@dataclass(frozen=True)
class BlockPass:
    """A pass that computes all drafts of a step together (``engine/models/dflash.py``).  Its rows are those of the step that
    verifies the drafts: for each sequence the last sampled token, and a mask token in the place of each draft.

    compute: its operations, which return nothing.
    mask: the mask token.
    shift: the number of rows between the row of a token and the row that predicts the token after it: 1 if a row predicts the
        token in its own place, 0 if it predicts the next one.
    causal: whether rows see only the rows before them.
    last: int32 [decode_rows], the last position to which each row attends.
    places: int32 [decode_rows, decode_rows]: element [i, e] is 1 + the row that predicts draft i of sequence e.
    """

    compute: Forward[Array]
    mask: int
    shift: int
    causal: bool
    last: Array
    places: Array


class Drafter(Protocol):
    """A network that drafts tokens from the outputs of a model: a layer after its trunk, or an assistant."""

    @property
    def ops(self) -> Ops:
        """The backend that computes the drafts.  It is of the same kind as the backend of the model."""

    @property
    def inputs(self) -> Batch[Array] | None:
        """Memory for the inputs of the drafter's passes (``Operations.inputs``)."""

    @property
    def hidden(self) -> Array | None:
        """Outputs of the trunk, float32 [sequences, length, n].  The output for the token at position p of a sequence is in
        row p % length.  None if the drafter keeps no outputs."""

    @property
    def n_bytes(self) -> int:
        """The size in bytes of the weights that one draft reads."""

    def follow(self, batch: Batch[Array], hidden: Array) -> None:
        """Store the outputs ``hidden`` [rows, n] of the trunk for the tokens of a pass."""

    @property
    def passes(self) -> SequenceOf[Forward[Array]]:
        """The operations of draft passes, which compute the logits after each token, float32 [rows, n_vocab].

        The i-th pass makes the i-th draft of a step, and the last one also makes all further drafts.
        """

    @property
    def block(self) -> "BlockPass | None":
        """The pass that precedes the draft passes of a step; None if there is none."""

    @property
    def listed(self) -> SequenceOf[tuple[Forward[Array], int]]:
        """Passes that together use every kernel, each with the maximum number of its rows for one sequence."""

    def forward(self, token: int, position: int, sequence: Sequence, number: int = 0, count: int = 1) -> np.ndarray:
        """Run the pass of draft ``number`` of a step with ``count`` drafts.  Returns the logits, float32 [n_vocab], of the
        token that follows ``token`` at ``position``."""

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""


class ChainDrafter(ABC):
    """A drafter whose passes make one draft after another."""

    block = None

    @property
    @abstractmethod
    def passes(self) -> SequenceOf[Forward[Array]]:
        """The operations of draft passes (:attr:`Drafter.passes`)."""

    @property
    def listed(self) -> SequenceOf[tuple[Forward[Array], int]]:
        """Passes that together use every kernel, each with the maximum number of its rows for one sequence."""
        return [(each, 1) for each in self.passes]


def row_after(
    ops: Ops, forward: Forward[Array], token: int, position: int, slot: int, inputs: Batch[Array] | None
) -> np.ndarray:
    """The result of a pass over a single token, float32 [n].

    position, slot: those of the token.
    inputs: memory for the inputs of the pass (``Operations.inputs``).
    """
    tokens, positions, slots = (np.array([value], np.int32) for value in (token, position, slot))
    result = ops.run(forward, Batch(tokens, positions, slots), 1, inputs)
    assert result is not None
    return result[0]
