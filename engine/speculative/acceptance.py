"""Whether the target accepts a draft, where the host decides it."""

import numpy as np

from engine.cpu import accept
from engine.cpu.sample import CHUNK
from engine.sampling.sampler import Sampler
from engine.speculative.proposal import Distribution

_NONE = (np.empty(0, np.int32), np.empty(0, np.float32))


def distribution(sampler: Sampler, logits: np.ndarray, history: list[int]) -> Distribution:
    """What a sampler draws from: the tokens that its filters keep, and their probabilities at its temperature."""
    ids, values = sampler.candidates(logits, history)
    probabilities = np.empty(values.size, np.float32)
    partial = np.empty(-(-values.size // CHUNK), np.float32)
    accept.probabilities(values, values.size, sampler.temperature, probabilities, partial)
    return ids, probabilities


def by_ratio(
    target: Distribution, draft: Distribution | None, token: int, seed: int, position: int
) -> tuple[int, bool]:
    """(the token at ``position``, whether it is the draft), by Leviathan et al. 2023; draft None: simply proposed, not
    drawn."""
    q_ids, q = draft if draft is not None else _NONE
    kept, chosen = accept.accept_ratio(*target, target[0].size, q_ids, q, q_ids.size, token, np.uint64(seed), position)
    return int(chosen), bool(kept)


def by_p_min(target: Distribution, token: int, sampled: int, p_min: float) -> tuple[int, bool]:
    """(the token, whether it is the draft), where a draft is kept if its probability is at least ``p_min``; ``sampled``: the
    target's own choice."""
    kept, chosen = accept.accept_p_min(*target, target[0].size, token, sampled, np.float32(p_min))
    return int(chosen), bool(kept)
