"""Ling and Ring 2.0: a dense layer, then mixtures whose sigmoid router chooses two of three groups; normalized heads, half of
which turn.

``transformers`` has no class of this name.  Its Glm4MoeForCausalLM, with norms of q and k and without biases, is the same
function of other names.  llama.cpp: src/models/bailingmoe2.cpp; BailingMoeV2Model of conversion/bailingmoe.py.
"""

from tests.oracle.families.family import Family
from tests.oracle.families.parts import (
    SHARED_EXPERTS,
    attention,
    experts,
    keys,
    model,
    network,
    norms,
    sizes,
    with_bias_of_router,
)

_CONFIG = sizes(
    3, 72, (6, 2, 16), 112, {"rope_theta": 6e5, "partial_rotary_factor": 0.5}, tie_word_embeddings=False,
    attention_bias=False, use_qk_norm=True, first_k_dense_replace=1, n_routed_experts=12, num_experts_per_tok=3,
    moe_intermediate_size=40, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True, n_group=3, topk_group=2,
)  # fmt: skip
_COMMON = norms(_CONFIG) | attention(_CONFIG, norm="head")
_MIXTURE = _COMMON | experts(_CONFIG, 12, 40) | network(_CONFIG, 40, "mlp.shared_experts")
_MIXTURE |= {"mlp.gate.e_score_correction_bias": (12,)}


CASES = [
    Family(
        "bailingmoe2",
        "bailingmoe2",
        "Glm4Moe",
        _CONFIG,
        model(_CONFIG, [_COMMON | network(_CONFIG), _MIXTURE, _MIXTURE]),
        keys(
            _CONFIG,
            expert_count=12,
            expert_used_count=3,
            expert_group_count=3,
            expert_group_used_count=2,
            expert_gating_func=2,
            expert_feed_forward_length=40,
            expert_shared_feed_forward_length=40,
            expert_shared_count=1,
            leading_dense_block_count=1,
            expert_weights_scale=2.5,
            expert_weights_norm=True,
            rope__dimension_count=8,
        ),
        SHARED_EXPERTS,
        convert=with_bias_of_router,
    )
]
