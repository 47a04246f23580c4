"""The interface of models that a backend uses."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.arrays import A, Batch
from engine.cache.kv import KVCache
from engine.cache.sequence import Sequence as TokenSequence
from engine.ops.device import DeviceOperations
from engine.ops.relay import StageRelay


class VocabularySize(Protocol):
    """The part of a model's configuration that a backend uses."""

    @property
    def n_vocab(self) -> int:
        """The number of tokens in the vocabulary."""


class Recordable(Protocol[A]):
    """What a backend records: a model, or one stage of a divided model (``engine/models/stage.py``)."""

    @property
    def cache(self) -> KVCache:
        """The cache of the model."""

    prompt_rows: int
    """The maximum number of rows in a pass that reads a prompt, at most ``Operations.max_rows``."""

    @property
    def reads_together(self) -> bool:
        """Whether a pass may read prompts of several sequences, and so have ``Batch.runs`` and ``Batch.ends``."""

    @property
    def decode_answers(self) -> int:
        """The maximum number of answers in a decode batch, at most ``Operations.decode_answers``."""

    @property
    def drafted_rows(self) -> int:
        """The maximum number of rows in a decode batch with drafts, at most ``Operations.drafted_rows``."""

    def compute(self, batch: Batch[A], n_logits: int) -> A | None:
        """The operations of a pass (``engine.ops.executor.Forward``).  Returns the logits of the last ``n_logits`` rows,
        float32 [n_logits, n_vocab], or None."""

    def compute_kinds(self, batch: Batch[A], n_logits: int) -> A | None:
        """Operations of which a backend only lists the kernels: those of :meth:`compute`, of which layers may be left out if
        others have the same kernels, also next to each other.  Returns what ``compute`` does."""


class AnyModel(Recordable[A], Protocol[A]):
    """The interface of a model that a backend uses.  ``engine.models.base.Model`` implements it."""

    @property
    def ops(self) -> DeviceOperations:
        """The backend that computes the output, and the passes of the model unless it is divided."""

    @property
    def config(self) -> VocabularySize:
        """The configuration of the model."""

    @property
    def stages(self) -> Sequence[object]:
        """The stages of a divided model; empty if one backend computes all of it."""

    @property
    def relay(self) -> StageRelay[A] | None:
        """How passes go from stage to stage if each is on a GPU of its own; None if not."""

    sequence: TokenSequence

    def step(self, parts: Sequence[tuple[TokenSequence, Sequence[int]]]) -> list[np.ndarray]:
        """Run a pass over rows of several sequences.  The caller then commits the tokens that it keeps.

        parts: for each sequence, the sequence and the tokens that follow it.

        Returns the logits of the rows of each sequence, float32 [rows, n_vocab].
        """

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""
