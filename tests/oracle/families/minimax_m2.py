"""MiniMax-M2: mixtures in every layer, chosen by a sigmoid; norms of q and k over all heads; rotation of a part of each
head.

``transformers``: MiniMaxM2ForCausalLM.  llama.cpp: src/models/minimax-m2.cpp; MiniMaxM2Model of conversion/minimax.py
(published configurations say ``scoring_func`` and ``rotary_dim``).

The experts are chosen by sigmoid(logit) + ``exp_probs_b``; their weights are the sigmoids divided by their sum.  There
is no shared network.
"""

import numpy as np

from tests.oracle.families.family import Family, Weights
from tests.oracle.families.parts import attention, experts, keys, model, norms, sizes

_CONFIG = sizes(
    3,
    72,
    (6, 2, 16),
    40,
    {"rope_theta": 1e5, "partial_rotary_factor": 0.5},
    tie_word_embeddings=False,
    num_local_experts=7,
    num_experts_per_tok=3,
    rotary_dim=8,
    scoring_func="sigmoid",
)
_BIAS = "mlp.e_score_correction_bias"


def _convert(part: str, weight: np.ndarray) -> Weights:
    return {"mlp.correction.bias" if part == _BIAS else part: weight}


CASES = [
    Family(
        "minimax-m2",
        "minimax-m2",
        "MiniMaxM2",
        _CONFIG,
        model(_CONFIG, [norms(_CONFIG) | attention(_CONFIG, norm="all") | experts(_CONFIG, 7, 40) | {_BIAS: (7,)}] * 3),
        keys(
            _CONFIG,
            expert_count=7,
            expert_used_count=3,
            expert_gating_func=2,
            expert_feed_forward_length=40,
            rope__dimension_count=8,
        ),
        names={"mlp.correction": "exp_probs_b"},
        convert=_convert,
    )
]
