"""Phi 3 and 4: fused q, k and v, fused gate and up, rotation of a part of each head, two sets of frequencies.

``transformers``: Phi3ForCausalLM.  llama.cpp: src/models/phi3.cpp; Phi3MiniModel of conversion/phi.py.

``attn_qkv`` has the rows of q, then k, then v; ``ffn_up`` those of the gate, then those that go up.  Heads are n_embd /
n_head wide.  Frequencies are divided by ``rope_factors_long`` where the context is longer than the original one, else
by ``rope_factors_short``; both rotations are multiplied by ``rope.scaling.attn_factor``.  llama.cpp decides by the
context that was asked for, ``transformers`` by the length of the text, so the original context is 64 of 512 tokens in
one case (the prompt of one token does not depend on rotations) and all 512 in the other.  llama.cpp ignores a window,
so no case has one: its key is 0.
"""

import math
from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Shapes
from tests.oracle.families.parts import head_dim, model, norms, sizes

_NAMES = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}


def _longrope(n_rot: int, head: int, original: int, rope_theta: float) -> dict[str, Any]:
    half = range(n_rot // 2)
    return {
        "rope_type": "longrope",
        "rope_theta": rope_theta,
        "partial_rotary_factor": n_rot / head,
        "original_max_position_embeddings": original,
        "short_factor": [1.0 + 0.125 * i for i in half],
        "long_factor": [1.5 + i * i for i in half],
    }


def _layer(config: dict[str, Any]) -> Shapes:
    e, d, f = config["hidden_size"], head_dim(config), config["intermediate_size"]
    return norms(config) | {
        "self_attn.qkv_proj.weight": ((config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * d, e),
        "self_attn.o_proj.weight": (e, config["num_attention_heads"] * d),
        "mlp.gate_up_proj.weight": (2 * f, e),
        "mlp.down_proj.weight": (e, f),
    }


def _family(name: str, config: dict[str, Any]) -> Family:
    rope, n_ctx = config["rope_parameters"], config["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings", config["original_max_position_embeddings"])
    metadata = {
        "context_length": n_ctx,
        "rope.scaling.original_context_length": original,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": int(head_dim(config) * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": rope["rope_theta"],
        "attention.sliding_window": 0,
    }
    extra = {}
    if rope["rope_type"] == "longrope":
        factor = math.sqrt(1 + math.log(n_ctx / original) / math.log(original)) if n_ctx > original else 1.0
        metadata["rope.scaling.attn_factor"] = factor
        extra = {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short")
        }
    weights = model(config, [_layer(config)] * config["num_hidden_layers"])
    return Family(name, "phi3", "Phi3", config, weights, metadata, names=_NAMES, extra=extra)


CASES = [
    _family("phi3", sizes(2, 80, (5, 5, 0), 112, {"rope_theta": 1e4}, original_max_position_embeddings=512)),
    _family(
        "phi3-long",
        sizes(3, 96, (6, 2, 0), 104, _longrope(12, 16, 64, 1e4), original_max_position_embeddings=64),
    ),
    _family(
        "phi3-short",
        sizes(
            2, 80, (4, 1, 0), 96, _longrope(16, 20, 512, 1e4), original_max_position_embeddings=512,
            tie_word_embeddings=False,
        ),
    ),
]  # fmt: skip
