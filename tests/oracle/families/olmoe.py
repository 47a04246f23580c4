"""OLMoE: norms of q and k over all heads together, and a mixture in every layer, whose weights are not normalized.

``transformers``: OlmoeForCausalLM.  llama.cpp: src/models/olmoe.cpp; OlmoeModel of conversion/olmo.py, which writes the width
of an expert as ``feed_forward_length``.
"""

from tests.oracle.families.family import Family
from tests.oracle.families.parts import attention, experts, keys, model, norms, sizes

_CONFIG = sizes(
    3, 80, (5, 5, 0), 40, {"rope_theta": 1e4}, tie_word_embeddings=False, num_experts=7, num_experts_per_tok=3,
    norm_topk_prob=False, clip_qkv=None,
)  # fmt: skip
_LAYER = norms(_CONFIG) | attention(_CONFIG, norm="all") | experts(_CONFIG, 7, 40)

CASES = [
    Family(
        "olmoe",
        "olmoe",
        "Olmoe",
        _CONFIG,
        model(_CONFIG, [_LAYER] * 3),
        keys(_CONFIG, expert_count=7, expert_used_count=3),
    )
]
