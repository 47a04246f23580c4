"""Hunyuan, dense and mixtures: norms of each head of q and k after their rotation.

``transformers``: HunYuanDenseV1ForCausalLM, HunYuanMoEV1ForCausalLM.  llama.cpp: src/models/hunyuan-dense.cpp (a
hunyuan-vl.cpp) and hunyuan-moe.cpp; conversion/hunyuan.py.

The base of the rotation is theta alpha^(d / (d - 2)), already so in the file, with ``rope.scaling.type`` "none".  (The
conversion then writes a context of 262144 tokens, too; these files say 512.)  The experts' weights are a softmax over
the chosen ones; the shared network has no gate.  In ``transformers`` experts are as wide as the shared network.
"""

from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.families.parts import attention, experts, head_dim, keys, model, network, norms, sizes

_NAMES = {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
}


def _convert(part: str, weight: np.ndarray) -> Weights:
    return {part.replace("mlp.gate.wg.", "mlp.gate."): weight}


def _attention(config: dict[str, Any]) -> Shapes:
    heads = {f"self_attn.{name}_layernorm.weight": (head_dim(config),) for name in ("query", "key")}
    return norms(config) | attention(config) | heads


def _dense(name: str, config: dict[str, Any]) -> Family:
    rope, d = config["rope_parameters"], head_dim(config)
    metadata = keys(config)
    if "alpha" in rope:
        metadata["rope.freq_base"] = rope["rope_theta"] * rope["alpha"] ** (d / (d - 2))
        metadata |= {"rope.scaling.type": "none", "rope.scaling.factor": 1.0}
        metadata["rope.scaling.original_context_length"] = 262144
    weights = model(config, [_attention(config) | network(config)] * config["num_hidden_layers"])
    return Family(name, "hunyuan-dense", "HunYuanDenseV1", config, weights, metadata, names=_NAMES)


def _mixture(config: dict[str, Any]) -> Family:
    n, f = config["num_experts"], config["intermediate_size"]
    mixture = experts(config, n, f) | network(config, f, "mlp.shared_mlp")
    mixture["mlp.gate.wg.weight"] = mixture.pop("mlp.gate.weight")
    metadata = keys(
        config,
        expert_count=n,
        expert_used_count=config["moe_topk"][0],
        expert_shared_feed_forward_length=f,
        expert_feed_forward_length=config["moe_intermediate_size"][0],
        expert_shared_count=config["num_shared_expert"][0],
    )
    weights = model(config, [_attention(config) | mixture] * config["num_hidden_layers"])
    return Family("hunyuan-moe", "hunyuan-moe", "HunYuanMoEV1", config, weights, metadata, _NAMES, convert=_convert)


_ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
_LAYERS = 3

CASES = [
    _dense("hunyuan-dense", sizes(3, 80, (5, 1, 20), 112, _ALPHA)),
    _dense("hunyuan-dense-plain", sizes(2, 72, (6, 2, 16), 104, {"rope_theta": 1e4}, tie_word_embeddings=False)),
    _mixture(
        sizes(
            _LAYERS, 72, (6, 2, 16), 40, {"rope_theta": 1e4}, num_experts=7, moe_topk=[3] * _LAYERS,
            moe_intermediate_size=[40] * _LAYERS, num_shared_expert=[1] * _LAYERS,
        )
    ),
]  # fmt: skip
