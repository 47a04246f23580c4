"""GLM 4.5 to 4.7: a dense layer, then mixtures with a sigmoid router and a shared network; rotation of a part of each
head.

``transformers``: Glm4MoeForCausalLM.  llama.cpp: src/models/glm4-moe.cpp; Glm4MoeModel of conversion/glm.py (the
configuration calls ``num_nextn_predict_layers`` what ``transformers`` 5 calls ``num_mtp_layers``).
``post_attention_norm`` is the norm before the network.

The experts are chosen by sigmoid(logit) + ``exp_probs_b``; their weights are the sigmoids, divided by their sum and
multiplied by ``expert_weights_scale``.  (``transformers`` adds 1e-20 to the sum, llama.cpp takes it to be 6.1e-5 at
least; the sums here are larger.)  The shared network is expert_shared_count times as wide as an expert and has no
gate.  Norms of q and k are those of the large models; GLM-4.5-Air has none.

The MTP layer is a mixture behind the trunk: eh_proj [enorm(embedding), hnorm(hidden)], the layer, shared_head.norm;
``transformers`` drops its weights.  It may have an embedding and an output matrix of its own.
"""

from typing import Any

from tests.oracle.families.family import Family, Shapes
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
from tests.oracle.shared import N_VOCAB

_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    **SHARED_EXPERTS,
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}


def _mtp(config: dict[str, Any], own_head: bool) -> Shapes:
    e = config["hidden_size"]
    parts = norms(config, "enorm", "hnorm", "shared_head.norm") | {"eh_proj.weight": (e, 2 * e)}
    if own_head:
        parts |= {"embed_tokens.weight": (N_VOCAB, e), "shared_head.head.weight": (N_VOCAB, e)}
    return parts


def _family(name: str, config: dict[str, Any], *, own_head: bool) -> Family:
    n, f = config["n_routed_experts"], config["moe_intermediate_size"]
    common = norms(config) | attention(config, bias=True, norm="head" if config["use_qk_norm"] else "")
    mixture = experts(config, n, f) | {"mlp.gate.e_score_correction_bias": (n,)}
    mixture |= network(config, f * config["n_shared_experts"], "mlp.shared_experts")
    n_layer, n_dense = config["num_hidden_layers"], config["first_k_dense_replace"]
    layers = [common | (network(config) if il < n_dense else mixture) for il in range(n_layer)]
    layers.append(common | mixture | _mtp(config, own_head))
    metadata = keys(
        config,
        block_count=n_layer + 1,
        rope__dimension_count=int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
        expert_count=n,
        expert_used_count=config["num_experts_per_tok"],
        expert_group_count=1,
        expert_group_used_count=1,
        expert_feed_forward_length=f,
        expert_shared_count=config["n_shared_experts"],
        leading_dense_block_count=n_dense,
        expert_gating_func=2,
        expert_weights_scale=config["routed_scaling_factor"],
        expert_weights_norm=config["norm_topk_prob"],
        nextn_predict_layers=1,
    )
    return Family(
        name,
        "glm4moe",
        "Glm4Moe",
        config,
        model(config, layers),
        metadata,
        _NAMES,
        convert=with_bias_of_router,
        n_mtp=1,
    )


def _config(n_layer: int, n_embd: int, heads: tuple[int, int, int], partial: float, **more: Any) -> dict[str, Any]:
    rope = {"rope_theta": 1e5, "partial_rotary_factor": partial}
    return sizes(n_layer, n_embd, heads, 112, rope, attention_bias=True, n_group=1, topk_group=1, **more)


CASES = [
    _family(
        "glm4moe",
        _config(
            3, 72, (6, 2, 16), 0.5, tie_word_embeddings=False, use_qk_norm=False, first_k_dense_replace=1,
            n_routed_experts=7, num_experts_per_tok=3, moe_intermediate_size=40, n_shared_experts=1,
            routed_scaling_factor=1.0, norm_topk_prob=True,
        ),
        own_head=False,
    ),
    _family(
        "glm4moe-norms",
        _config(
            3, 80, (5, 1, 32), 0.25, tie_word_embeddings=True, use_qk_norm=True, first_k_dense_replace=2,
            n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=2,
            routed_scaling_factor=2.5, norm_topk_prob=False,
        ),
        own_head=True,
    ),
]  # fmt: skip
