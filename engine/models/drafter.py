"""The interface of a network that drafts."""

from collections.abc import Sequence as SequenceOf
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


class Drafter(Protocol):
    """A network that drafts tokens from the outputs of a model: a layer after its trunk, or an assistant."""

    @property
    def ops(self) -> Ops:
        """The backend that computes the drafts.  It is of the same kind as the backend of the model."""

    @property
    def inputs(self) -> Batch[Array] | None:
        """Memory for the inputs of the drafter's passes (``Operations.inputs``)."""

    @property
    def hidden(self) -> Array:
        """Outputs of the trunk, float32 [sequences, length, n].  The output for the token at position p of a sequence is in
        row p % length."""

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

    def forward(self, token: int, position: int, sequence: Sequence, number: int = 0) -> np.ndarray:
        """Run the pass of draft ``number`` of a step.  Returns the logits, float32 [n_vocab], of the token that follows
        ``token`` at ``position``."""

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""
