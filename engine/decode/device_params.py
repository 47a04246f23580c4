"""The parameters of a sampler as the kernels of ``engine/cuda/sample.py`` read them."""

import math
from dataclasses import fields

import numpy as np

from engine.cuda.accept import MOST_K
from engine.cuda.intrinsics import log
from engine.cuda.sample import BANNED, INFINITE, MOST_BIAS, MOST_RECENT, NAN, PARAMS
from engine.sampling import sampler as host
from engine.sampling.sampler import Sampler, SamplerParams

IMPLEMENTED = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "logit_bias"),
    *("repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty"),
)
"""The parameters that the kernels implement."""

ON_HOST = (
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_breakers"),
    *("xtc_probability", "xtc_threshold", "logits_processors"),
)
"""The parameters of what only the host does, if it is switched on. A parameter in neither list must have its default."""


def supported(params: SamplerParams) -> bool:
    """Whether the kernels implement these parameters; if not, the logits are copied to the host."""
    if any(getattr(params, f.name) != f.default for f in fields(params) if f.name not in IMPLEMENTED + ON_HOST):
        return False
    if params.penalizes_repetitions or params.excludes_top_choices or params.logits_processors:
        return False
    recent = not params.penalizes or 0 < params.repeat_last_n <= MOST_RECENT
    filters = params.greedy or (0 < params.top_k <= MOST_K and params.typical_p >= 1)
    return recent and filters and len(params.logit_bias) <= MOST_BIAS


def edits(params: SamplerParams) -> bool:
    """Whether the logits are changed before the choice, so that ``edit`` is needed."""
    return params.penalizes or bool(params.logit_bias)


def pack_params(sampler: Sampler, p_accept: float = 0.0) -> np.ndarray:
    """A sampler's parameters and seed as an array of one :data:`PARAMS`; they must be :func:`supported`.  ``p_accept``: the
    bound of acceptance by p-min.

    A greedy choice is packed as a draw of one candidate, so that answers of both kinds can share a launch of ``draw``.
    """
    p = sampler.params
    packed = np.zeros(1, PARAMS)
    words = packed[0]
    words["seed"], words["p_accept"] = sampler.seed, p_accept
    words["temperature"] = max(p.temperature, host._LEAST_TEMPERATURE)
    words["top_p"] = p.top_p if p.top_p < 1 and not p.greedy else math.inf
    words["log_min_p"] = log(np.float32(p.min_p)) if p.min_p > 0 and not p.greedy else -math.inf
    words["repeat"], words["frequency"], words["presence"] = p.repeat_penalty, p.frequency_penalty, p.presence_penalty
    words["top_k"] = 1 if p.greedy else min(max(p.top_k, 0), MOST_K)
    words["last_n"] = p.repeat_last_n if p.penalizes else 0
    words["n_bias"] = n = len(p.logit_bias)
    words["bias_ids"][:n] = list(p.logit_bias)
    words["bias"][:n] = list(p.logit_bias.values())
    return packed


def token_of(word: int, sampler: Sampler | None = None) -> int:
    """The token that was found; raises the error that ``Sampler.sample`` of this sampler raises for such logits."""
    word = int(word)
    if word < 0:
        largest = {NAN: math.nan, INFINITE: math.inf, BANNED: -math.inf}[word]
        if sampler is not None:
            sampler._check(largest)
        host._check_largest(largest)
    return word
