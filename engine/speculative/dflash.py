"""A network of DFlash or DSpark as a source of drafts (``engine/models/dflash.py``)."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from engine.cache.sequence import Sequence as TokenSequence
from engine.models.dflash import DFlash
from engine.models.drafter import BlockPass
from engine.speculative.draft_model import Judge, by_logits
from engine.speculative.mtp import MTPDraft


class DFlashDraft(MTPDraft):
    """A block of drafts, made by one pass of a network that reads layers of the target.

    If the network has a confidence head, ``draft_p_min`` is compared with what it predicts.
    """

    name = "dflash"

    @property
    def _network(self) -> DFlash:
        return cast(DFlash, self.llm.model.drafter)

    @property
    def most(self) -> int:  # type: ignore[override]
        """The most drafts that it can make in a step."""
        return self._network.config.block

    @property
    def block(self) -> BlockPass:
        """The pass that precedes the passes of the drafts of a step."""
        return self._network.block

    def _judge(self, known: Sequence[int], sequence: TokenSequence) -> Judge:
        network, n_known = self._network, len(known)
        if network.confidence_head is None:
            return by_logits

        def judge(history: list[int], logits: np.ndarray, token: int) -> float:
            return network.confidence(history[-1], len(history) - 1, sequence, len(history) - n_known)

        return judge
