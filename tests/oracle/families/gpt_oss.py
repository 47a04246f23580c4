"""gpt-oss: sinks, windows in even layers, biases everywhere, clamped experts.

``transformers``: GptOssForCausalLM.  llama.cpp: src/models/openai-moe.cpp; GptOssModel of conversion/gpt_oss.py, which
takes rows of gate and up apart (they alternate) and transposes experts that are not MXFP4.  ``post_attention_norm`` is
the norm before the network.

The limit 7 and the factor 1.702 of the experts are in no key; gates here are large enough to be clamped.  The router's
softmax is over the chosen logits, which include its bias.

YaRN: ``transformers`` leaves the corners of its ramp as they are (``truncate`` is false in the published
configuration), llama.cpp rounds them to whole dimensions, and no key of a file says which.  In "gpt-oss" both corners are
outside of a head, where both give the same; in "gpt-oss-untruncated" they are inside, and only the published form gives
these logits.
"""

import math
from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Weights
from tests.oracle.families.parts import attention, keys, model, norms, sizes

_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.router": "ffn_gate_inp",
}


def _convert(part: str, weight: np.ndarray) -> Weights:
    if part.startswith("mlp.experts."):
        kind = "bias" if part.endswith("_bias") else "weight"
        rows = weight if kind == "bias" else weight.swapaxes(1, 2)
        if "down_proj" in part:
            return {f"mlp.experts.down_proj.{kind}": rows}
        return {f"mlp.experts.gate_proj.{kind}": rows[:, ::2], f"mlp.experts.up_proj.{kind}": rows[:, 1::2]}
    return {part: weight}


def _family(name: str, config: dict[str, Any]) -> Family:
    e, f, n = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    layer = norms(config) | attention(config, bias=True, out_bias=True)
    layer |= {
        "self_attn.sinks": (config["num_attention_heads"],),
        "mlp.router.weight": (n, e),
        "mlp.router.bias": (n,),
        "mlp.experts.gate_up_proj": (n, e, 2 * f),
        "mlp.experts.gate_up_proj_bias": (n, 2 * f),
        "mlp.experts.down_proj": (n, f, e),
        "mlp.experts.down_proj_bias": (n, e),
    }
    metadata = keys(
        config,
        expert_count=n,
        expert_used_count=config["num_experts_per_tok"],
        attention__sliding_window=config["sliding_window"],
        expert_feed_forward_length=f,
    )
    spreads = {
        "sinks": (1.0, 1.0),
        "experts.gate_up_proj": (4 / math.sqrt(e), 0.0),
        "experts.down_proj": (0.25 / math.sqrt(f), 0.0),
    }
    weights = model(config, [layer] * config["num_hidden_layers"])
    return Family(name, "gpt-oss", "GptOss", config, weights, metadata, names=_NAMES, convert=_convert, spreads=spreads)


def _config(n_layer: int, rope_theta: float, original: int) -> dict[str, Any]:
    rope = {
        "rope_type": "yarn",
        "rope_theta": rope_theta,
        "factor": 4.0,
        "original_max_position_embeddings": original,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
    return sizes(n_layer, 96, (6, 2, 32), 64, rope, tie_word_embeddings=False, sliding_window=24, **experts)


CASES = [_family("gpt-oss", _config(4, 5.0, 200)), _family("gpt-oss-untruncated", _config(2, 1e4, 256))]
