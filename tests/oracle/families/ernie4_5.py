"""ERNIE 4.5, dense and mixtures: llama whose pairs of rotated dimensions are neighbours already.

``transformers``: Ernie4_5ForCausalLM, Ernie4_5_MoeForCausalLM, which rotate neighbours, so that no rows are permuted.
llama.cpp: src/models/ernie4-5.cpp and ernie4-5-moe.cpp; conversion/ernie.py.

A layer is a mixture from ``leading_dense_block_count`` on where (il + 1) % ``interleave_moe_layer_step`` is 0.
Probabilities are a softmax over all experts; experts are chosen by probability + ``exp_probs_b``, and their weights are
the probabilities divided by their sum.  The bias of the choice is one row, [1, n_expert].  The shared network has no
gate.  The conversion writes intermediate_size / num_key_value_heads as the shared network's width, which is right for
published models, and here.
"""

from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Weights
from tests.oracle.families.parts import attention, experts, keys, model, network, norms, sizes

_NAMES = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.moe_statics": "exp_probs_b",
}
_BIAS = "mlp.gate.moe_statics.e_score_correction_bias"


def _convert(part: str, weight: np.ndarray) -> Weights:
    return {"mlp.moe_statics.bias" if part == _BIAS else part: weight}


def _dense(config: dict[str, Any]) -> Family:
    layer = norms(config) | attention(config) | network(config)
    weights = model(config, [layer] * config["num_hidden_layers"])
    return Family("ernie4_5", "ernie4_5", "Ernie4_5", config, weights, keys(config))


def _mixture(config: dict[str, Any]) -> Family:
    n, f, n_shared = config["moe_num_experts"], config["moe_intermediate_size"], config["moe_num_shared_experts"]
    mixture = experts(config, n, f) | {_BIAS: (1, n)} | network(config, f * n_shared, "mlp.shared_experts")
    first, step = config["moe_layer_start_index"], config["moe_layer_interval"]
    layers = [
        norms(config) | attention(config) | (mixture if il >= first and (il + 1) % step == 0 else network(config))
        for il in range(config["num_hidden_layers"])
    ]
    metadata = keys(
        config,
        expert_count=n,
        expert_used_count=config["moe_k"],
        interleave_moe_layer_step=step,
        leading_dense_block_count=first,
        expert_feed_forward_length=f,
        expert_shared_count=n_shared,
        expert_shared_feed_forward_length=config["intermediate_size"] // config["num_key_value_heads"],
    )
    spreads = {_BIAS: (0.1, 0.0)}
    return Family(
        "ernie4_5-moe",
        "ernie4_5-moe",
        "Ernie4_5_Moe",
        config,
        model(config, layers),
        metadata,
        _NAMES,
        convert=_convert,
        spreads=spreads,
    )


CASES = [
    _dense(sizes(3, 72, (6, 2, 20), 104, {"rope_theta": 5e5})),
    _mixture(
        sizes(
            6, 72, (6, 2, 0), 96, {"rope_theta": 1e4}, tie_word_embeddings=False, moe_num_experts=7, moe_k=3,
            moe_intermediate_size=24, moe_num_shared_experts=2, moe_layer_start_index=2, moe_layer_interval=2,
        )
    ),
]  # fmt: skip
