"""What a draft source proposes."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Distribution = tuple[np.ndarray, np.ndarray]
"""Token ids, int32 [n], and their probabilities, float32 [n]."""


@dataclass
class Proposal:
    """Drafts for the places after the certain token.

    tokens: the drafts.
    distributions: what each was drawn from; None for drafts that are simply proposed.
    device_draft: a draft model on the target's own device: ``count`` drafts are made there when the step starts.
    """

    tokens: list[int] = field(default_factory=list)
    distributions: list[Distribution] | None = None
    device_draft: Any = None
    count: int = 0

    def __len__(self) -> int:
        return self.count or len(self.tokens)
