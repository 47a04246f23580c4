"""The interface of models and drafters that a backend uses."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.arrays import A, Batch
from engine.cache.kv import KVCache
from engine.cache.sequence import Sequence as TokenSequence
from engine.ops.device import DeviceOperations


class VocabularySize(Protocol):
    """What a backend uses of the description of a model."""

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""


class Drafter(Protocol[A]):
    """A network that drafts tokens from the outputs of a model: a layer after its trunk, or an assistant."""

    @property
    def ops(self) -> DeviceOperations:
        """The backend that computes the drafts: one of the same kind as the model's."""

    @property
    def inputs(self) -> Batch[A] | None:
        """Memory for the inputs of its passes (``Operations.inputs``)."""

    @property
    def hidden(self) -> A:
        """Outputs of the trunk, float32 [sequences, length, n]: row p % length of a sequence is that of the token at position
        p."""

    @property
    def n_bytes(self) -> int:
        """Bytes of weights that one draft reads."""

    def follow(self, batch: Batch[A], hidden: A) -> None:
        """Store the outputs ``hidden`` [rows, n] of the trunk for the tokens of a pass."""

    def compute(self, batch: Batch[A], n_logits: int) -> A:
        """Logits after one token: float32 [1, n_vocab]."""

    def forward(self, token: int, position: int, sequence: TokenSequence) -> np.ndarray:
        """Logits float32 [n_vocab] for the token after ``token`` at ``position`` of a sequence."""

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""


class AnyModel(Protocol[A]):
    """The interface of a model that a backend uses; ``engine.models.base.Model`` implements it."""

    @property
    def ops(self) -> DeviceOperations:
        """The backend that computes it."""

    @property
    def config(self) -> VocabularySize:
        """Its description."""

    cache: KVCache
    sequence: TokenSequence

    @property
    def drafter(self) -> Drafter[A] | None:
        """The network that drafts from its outputs, or None."""

    def compute(self, batch: Batch[A], n_logits: int) -> A | None:
        """The operations of a pass (``engine.ops.executor.Forward``)."""

    def forward(self, tokens: np.ndarray, positions: np.ndarray, n_logits: int, sequence: TokenSequence) -> np.ndarray:
        """Run a pass and return the logits of its last rows, float32 [n_logits, n_vocab]."""

    def step(self, parts: Sequence[tuple[TokenSequence, Sequence[int]]]) -> list[np.ndarray]:
        """Run a pass of some sequences and return the logits of the rows of each.  The caller commits the tokens that it
        keeps."""

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""
