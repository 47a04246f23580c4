"""Falcon-H1: attention and Mamba-2 in every layer, on the same input; with and without a norm after Mamba-2.

``transformers``: FalconH1ForCausalLM.  llama.cpp: src/models/falcon-h1.cpp; FalconH1Model of conversion/falcon_h1.py, a
Mamba2Model, so that rows of q and k stay rotated halves.

The norm before a network is called ffn_norm in the file, without ".weight".  The conversion multiplies weights by all factors
of the configuration: those of the embedding and of the logits, of the inputs of attention and of its keys, of each part of
the inputs of Mamba-2, of the results of both, of gates and of the results of networks.  Here they are powers of two, so that
no product rounds.
"""

from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.families.parts import attention, keys, model, network, norms, sizes

_NAMES = {
    "model.final_layernorm": "output_norm",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.dt": "ssm_dt",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
_SPREADS = {"mamba.A_log": (0.8, 0.0), "mamba.D": (0.5, 1.0), "mamba.dt_bias": (1.0, -2.0)}
_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 4.0,
    "lm_head_multiplier": 0.25,
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 2.0,
    "key_multiplier": 4.0,
    "ssm_in_multiplier": 2.0,
    "ssm_multipliers": [0.5, 1.0, 0.25, 2.0, 0.125],
    "ssm_out_multiplier": 0.5,
    "mlp_multipliers": [0.5, 2.0],
}


def _mamba(c: dict[str, Any]) -> Shapes:
    e, n_head, inner = c["hidden_size"], c["mamba_n_heads"], c["mamba_d_ssm"]
    channels = inner + 2 * c["mamba_n_groups"] * c["mamba_d_state"]
    return {
        "mamba.in_proj.weight": (inner + channels + n_head, e),
        "mamba.conv1d.weight": (channels, 1, c["mamba_d_conv"]),
        "mamba.conv1d.bias": (channels,),
        **{f"mamba.{name}": (n_head,) for name in ("dt_bias", "A_log", "D")},
        **({"mamba.norm.weight": (inner,)} if c["mamba_rms_norm"] else {}),
        "mamba.out_proj.weight": (e, inner),
    }


def _family(name: str, config: dict[str, Any]) -> Family:
    c: dict[str, Any] = {**config, **_FACTORS, "tie_word_embeddings": False, "mamba_norm_before_gate": False}
    c["mamba_d_ssm"] = c["mamba_n_heads"] * c["mamba_d_head"]
    parts = norms(c, "input_layernorm", "pre_ff_layernorm") | attention(c) | network(c, name="feed_forward") | _mamba(c)
    weights = model(c, [parts] * c["num_hidden_layers"])
    weights["model.final_layernorm.weight"] = weights.pop("model.norm.weight")
    n_groups, n_state, inner = c["mamba_n_groups"], c["mamba_d_state"], c["mamba_d_ssm"]
    metadata = keys(
        c,
        vocab_size=c["vocab_size"],
        ssm__conv_kernel=c["mamba_d_conv"],
        ssm__state_size=n_state,
        ssm__group_count=n_groups,
        ssm__inner_size=inner,
        ssm__time_step_rank=c["mamba_n_heads"],
    )
    counts = (inner, inner, n_groups * n_state, n_groups * n_state, c["mamba_n_heads"])
    of_inputs = np.repeat(np.float32(c["ssm_multipliers"]), counts)[:, None] * c["ssm_in_multiplier"]
    of_attention = c["attention_in_multiplier"]
    factors = {
        "model.embed_tokens": c["embedding_multiplier"],
        "lm_head": c["lm_head_multiplier"],
        "self_attn.q_proj": of_attention,
        "self_attn.k_proj": of_attention * c["key_multiplier"],
        "self_attn.v_proj": of_attention,
        "self_attn.o_proj": c["attention_out_multiplier"],
        "mamba.in_proj": of_inputs,
        "mamba.out_proj": c["ssm_out_multiplier"],
        "feed_forward.gate_proj": c["mlp_multipliers"][0],
        "feed_forward.down_proj": c["mlp_multipliers"][1],
    }

    def convert(part: str, weight: np.ndarray) -> Weights:
        match part:
            case "mamba.A_log":
                return {"ssm_a": -np.exp(weight)[:, None]}
            case "mamba.D":
                return {"ssm_d": weight[:, None]}
            case "pre_ff_layernorm.weight":
                return {"ffn_norm": weight}
            case "mamba.dt_bias":
                return {"mamba.dt.bias": weight}
            case "mamba.conv1d.weight":
                return {part: weight[:, 0]}
            case "mamba.norm.weight":
                return {part: weight.reshape(n_groups, -1)}
        factor = factors.get(part.removesuffix(".weight"), 1.0)
        return {part: (weight * factor).astype(np.float32)}

    return Family(name, "falcon-h1", "FalconH1", c, weights, metadata, _NAMES, convert=convert, spreads=_SPREADS)


CASES = [
    _family(
        "falcon-h1",
        sizes(
            3, 96, (6, 2, 20), 112, {"rope_theta": 1e11}, mamba_n_heads=4, mamba_d_head=48, mamba_d_state=64,
            mamba_n_groups=1, mamba_d_conv=4, mamba_rms_norm=False,
        ),
    ),
    # Two groups, with a norm for each; three taps.
    _family(
        "falcon-h1-norms",
        sizes(
            2, 80, (5, 1, 16), 96, {"rope_theta": 1e5}, mamba_n_heads=10, mamba_d_head=16, mamba_d_state=32,
            mamba_n_groups=2, mamba_d_conv=3, mamba_rms_norm=True,
        ),
    ),
]  # fmt: skip
