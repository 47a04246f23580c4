"""The interface of models and drafters that a backend uses."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.arrays import A, Batch
from engine.cache.kv import KVCache
from engine.cache.sequence import Sequence as TokenSequence
from engine.ops.device import DeviceOperations


class VocabularySize(Protocol):
    """The part of a model's configuration that a backend uses."""

    @property
    def n_vocab(self) -> int:
        """The number of tokens in the vocabulary."""


class Drafter(Protocol[A]):
    """A network that drafts tokens from the outputs of a model: a layer after its trunk, or an assistant."""

    @property
    def ops(self) -> DeviceOperations:
        """The backend that computes the drafts.  It is of the same kind as the backend of the model."""

    @property
    def inputs(self) -> Batch[A] | None:
        """Memory for the inputs of the drafter's passes (``Operations.inputs``)."""

    @property
    def hidden(self) -> A:
        """Outputs of the trunk, float32 [sequences, length, n].  The output for the token at position p of a sequence is in
        row p % length."""

    @property
    def n_bytes(self) -> int:
        """The size in bytes of the weights that one draft reads."""

    def follow(self, batch: Batch[A], hidden: A) -> None:
        """Store the outputs ``hidden`` [rows, n] of the trunk for the tokens of a pass."""

    def compute(self, batch: Batch[A], n_logits: int) -> A:
        """The operations of a draft pass: logits after one token, float32 [1, n_vocab]."""

    def forward(self, token: int, position: int, sequence: TokenSequence) -> np.ndarray:
        """Run a draft pass.  Returns the logits, float32 [n_vocab], of the token that follows ``token`` at ``position``."""

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""


class AnyModel(Protocol[A]):
    """The interface of a model that a backend uses.  ``engine.models.base.Model`` implements it."""

    @property
    def ops(self) -> DeviceOperations:
        """The backend that computes the passes of the model."""

    @property
    def config(self) -> VocabularySize:
        """The configuration of the model."""

    cache: KVCache
    sequence: TokenSequence

    prompt_rows: int
    """The most rows of a pass that reads a prompt, at most ``Operations.max_rows``."""

    @property
    def drafter(self) -> Drafter[A] | None:
        """The network that drafts tokens from the outputs of the model, or None."""

    def compute(self, batch: Batch[A], n_logits: int) -> A | None:
        """The operations of a pass (``engine.ops.executor.Forward``).  Returns the logits of the last ``n_logits`` rows,
        float32 [n_logits, n_vocab], or None."""

    def step(self, parts: Sequence[tuple[TokenSequence, Sequence[int]]]) -> list[np.ndarray]:
        """Run a pass over rows of several sequences.  The caller then commits the tokens that it keeps.

        parts: for each sequence, the sequence and the tokens that follow it.

        Returns the logits of the rows of each sequence, float32 [rows, n_vocab].
        """

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""
