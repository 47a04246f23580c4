"""dots.llm1: a dense layer, then mixtures with a sigmoid router and two shared experts; normalized heads.

``transformers``: Dots1ForCausalLM.  llama.cpp: src/models/dots1.cpp; Dots1Model of conversion/dots1.py, which does not write
the kind of the router.
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
    3, 72, (6, 2, 16), 112, {"rope_theta": 1e5}, tie_word_embeddings=False, first_k_dense_replace=1, n_routed_experts=7,
    num_experts_per_tok=3, moe_intermediate_size=40, n_shared_experts=2, routed_scaling_factor=2.5, norm_topk_prob=True,
    n_group=1, topk_group=1, sliding_window=None,
)  # fmt: skip
_COMMON = norms(_CONFIG) | attention(_CONFIG, norm="head")
_MIXTURE = _COMMON | experts(_CONFIG, 7, 40) | network(_CONFIG, 80, "mlp.shared_experts")
_MIXTURE |= {"mlp.gate.e_score_correction_bias": (7,)}


CASES = [
    Family(
        "dots1",
        "dots1",
        "Dots1",
        _CONFIG,
        model(_CONFIG, [_COMMON | network(_CONFIG), _MIXTURE, _MIXTURE]),
        keys(
            _CONFIG,
            expert_count=7,
            expert_used_count=3,
            expert_group_count=1,
            expert_group_used_count=1,
            expert_feed_forward_length=40,
            expert_shared_count=2,
            leading_dense_block_count=1,
            expert_weights_scale=2.5,
            expert_weights_norm=True,
        ),
        SHARED_EXPERTS,
        convert=with_bias_of_router,
    )
]
