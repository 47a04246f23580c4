"""The proposal of a draft source."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from engine.cache.kv import KVCache
from engine.decode.sampler import Sampler

Distribution = tuple[np.ndarray, np.ndarray]
"""Token ids, int32 [n], and their probabilities, float32 [n]."""


class DeviceDraft(Protocol):
    """A source of drafts whose passes can run on the target's own device, as part of a step."""

    n_vocab: int
    """Tokens that it can propose."""

    script: np.ndarray | None
    """int32 [n_ctx]: what is proposed for a position in place of its own token, unless negative; None: nothing."""

    @property
    def ops(self) -> Any:
        """The backend that computes its passes, of any kind: ``engine.ops.Operations``."""

    @property
    def n_ctx(self) -> int:
        """Positions of its context."""

    @property
    def reads(self) -> int:
        """Tokens that the first of its passes in a step reads."""

    @property
    def cache(self) -> KVCache | None:
        """A cache of its own; None where it reads the target's."""

    @property
    def anchor(self) -> Any:
        """An array int32 [2] of ``ops`` for the position of the certain token and the one before; None where it has no use
        for them."""

    @property
    def compute(self) -> Callable[..., Any]:
        """A pass (``engine.ops.Forward``)."""

    def sampler(self, sampler: Sampler) -> Sampler:
        """What draws its tokens where ``sampler`` draws the target's."""

    def reserve(self, length: int) -> None:
        """Have the angles of positions [0, length) ready."""

    def catch_up(self, known: Sequence[int], owner: object) -> None:
        """Read what it must know to go on after ``known``; ``owner`` starts its passes from now on."""

    def keep(self, known: Sequence[int], count: int, tokens: Sequence[int]) -> None:
        """``tokens`` followed ``known`` in a step with ``count`` drafts."""


@dataclass
class Proposal:
    """Drafts for the positions after the certain token.

    tokens: the drafts.
    distributions: the distribution each was drawn from; None for drafts that are simply proposed.
    device_draft: a draft model on the target's own device, which makes ``count`` drafts when the step starts.
    """

    tokens: list[int] = field(default_factory=list)
    distributions: list[Distribution] | None = None
    device_draft: DeviceDraft | None = None
    count: int = 0

    def __len__(self) -> int:
        return self.count or len(self.tokens)
