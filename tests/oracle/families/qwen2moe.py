"""Mixtures of Qwen 2: biases of q, k and v, a shared network with a gate, weights of experts that are not normalized.

``transformers``: Qwen2MoeForCausalLM.  llama.cpp: src/models/qwen2moe.cpp; Qwen2MoeModel of conversion/qwen.py.
"""

from tests.oracle.families.family import Family
from tests.oracle.families.parts import attention, experts, keys, model, network, norms, sizes

_CONFIG = sizes(
    3, 80, (5, 1, 0), 112, {"rope_theta": 1e5}, tie_word_embeddings=False, num_experts=7, num_experts_per_tok=3,
    moe_intermediate_size=24, shared_expert_intermediate_size=72, norm_topk_prob=False, decoder_sparse_step=1,
    mlp_only_layers=[], use_sliding_window=False, qkv_bias=True,
)  # fmt: skip
_LAYER = (
    norms(_CONFIG)
    | attention(_CONFIG, bias=True)
    | experts(_CONFIG, 7, 24)
    | network(_CONFIG, 72, "mlp.shared_expert")
    | {"mlp.shared_expert_gate.weight": (1, _CONFIG["hidden_size"])}
)
_NAMES = {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
}

CASES = [
    Family(
        "qwen2moe",
        "qwen2moe",
        "Qwen2Moe",
        _CONFIG,
        model(_CONFIG, [_LAYER] * 3),
        keys(
            _CONFIG,
            expert_count=7,
            expert_used_count=3,
            expert_feed_forward_length=24,
            expert_shared_feed_forward_length=72,
        ),
        _NAMES,
        convert=lambda part, weight: {part: weight[0] if part == "mlp.shared_expert_gate.weight" else weight},
    )
]
