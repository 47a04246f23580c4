"""The common part of draft sources that are models."""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from engine.arrays import Array
from engine.cache.kv import KVCache
from engine.compile.jobs import Job
from engine.limits import MOST_DRAFTS
from engine.memory import Memory
from engine.models.base import Model
from engine.models.config import ModelConfig
from engine.models.drafter import BlockPass
from engine.ops.operations import Ops
from engine.sampling.sampler import Sampler
from engine.text.tokenizer import Tokenizer


class LoadedLLM(Protocol):
    """The interface of a loaded model that drafting and its reports use; ``engine.llm.LLM`` implements it."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    model: Model
    cache: KVCache
    n_ctx: int
    n_params: int
    n_bytes: int
    n_bytes_read: int
    cache_bytes: int
    cache_types: tuple[str, str]

    def jobs(self) -> list[Job]:
        """A compile job for every kernel of the model; any process can run it."""

    def warm_up(self) -> None:
        """Load every kernel of the model."""

    def reset(self) -> None:
        """Forget all cached tokens."""

    def close(self) -> None:
        """Free the memory of the model."""

    @property
    def memory(self) -> Memory:
        """Its memory, by what it is for."""

    def rest(self, forget: bool = False) -> None:
        """Give memory back that holds nothing while there is nothing to compute; forget: also that of texts that nobody
        holds."""

    def resume(self) -> None:
        """Prepare for passes after :meth:`rest`."""

    @property
    def n_cached(self) -> int:
        """The number of tokens in the cache."""

    def can_sample(self, sampler: Sampler) -> bool:
        """Whether the device can choose tokens by the rules of this sampler."""

    def decode(
        self, ids: Sequence[int], sampler: Sampler, count: int, *, salt: str = ""
    ) -> Generator[tuple[int, np.ndarray], None, None]:
        """Generate ``count`` tokens after ``ids`` with a salt, each with its logits, float32 [n_vocab] or empty."""

    def extend(self, ids: list[int], salt: str = "") -> np.ndarray:
        """Logits after ``ids`` with a salt: float32 [n_vocab]."""

    def read(self, ids: Sequence[int]) -> None:
        """Make the cache hold exactly ``ids``."""

    def hold(self, slot: int, ids: Sequence[int], salt: str = "") -> None:
        """Make the sequence in a slot hold exactly ``ids`` with a salt."""


class Source:
    """A model that drafts by passes of its own: ``llm``, or a part of it."""

    llm: LoadedLLM
    behind = 0
    """The number of tokens that must precede the certain one."""
    most = MOST_DRAFTS
    """The most drafts that it can make in a step."""

    @property
    def ops(self) -> Ops:
        """The backend that computes the drafts."""
        return self.llm.model.ops

    @property
    def n_ctx(self) -> int:
        """The number of positions of the context."""
        return self.llm.n_ctx

    @property
    def anchor(self) -> Array | None:
        """Memory for the position of the last sampled token of each answer in a pass, and the position before it, int32 [2,
        DECODE_ANSWERS]; None for sources that use neither."""
        return None

    @property
    def block(self) -> BlockPass | None:
        """The pass that precedes the passes of the drafts of a step; None if there is none."""
        return None

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""
        self.llm.model.reserve(length)
