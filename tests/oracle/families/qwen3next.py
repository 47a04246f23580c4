"""Qwen3-Next: three gated delta nets for each gated attention, a mixture with a gated shared network in every layer.

``transformers``: Qwen3NextForCausalLM.  llama.cpp: src/models/qwen3next.cpp; Qwen3NextModel of conversion/qwen.py.

In contrast to qwen35moe the value heads of a key head stay neighbours (value head h uses key head h / (n_v / n_k)), and
``ssm_ba`` has the rows of beta, then those of alpha, of one key head after another.  The checkpoint has q, k, v and z
of one key head after another; the conversion makes ``attn_qkv`` and ``attn_gate`` of them.  Norms but for that in a
delta net store what is added to 1; the file has the sum.  The gate of the shared network is one row, not a vector.

The MTP layer is a gated attention and a mixture behind the trunk: eh_proj [enorm(embedding), hnorm(hidden)], the layer,
shared_head.norm.  (Published checkpoints call these ``mtp.*``; ``transformers`` drops their weights.)  The case without
it is what ``--no-mtp`` makes.
"""

import math
from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.families.parts import attention, experts, keys, model, network, norms, sizes

_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.qkv": "attn_qkv",
    "linear_attn.z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt": "ssm_dt",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}
_SPREADS = {
    "linear_attn.norm.weight": (0.3, 1.0),
    "norm.weight": (0.3, 0.0),
    "A_log": (1.26, math.log(0.9)),  # exp(A_log) from 0.1 to 8
    "dt_bias": (1.0, -3.0),
}


def _delta_net(config: dict[str, Any]) -> Shapes:
    e, d = config["hidden_size"], config["linear_key_head_dim"]
    k, v = config["linear_num_key_heads"], config["linear_num_value_heads"]
    parts = {
        "in_proj_qkvz.weight": ((2 * k + 2 * v) * d, e),
        "in_proj_ba.weight": (2 * v, e),
        "conv1d.weight": ((2 * k + v) * d, 1, config["linear_conv_kernel_dim"]),
        "A_log": (v,),
        "dt_bias": (v,),
        "norm.weight": (d,),
        "out_proj.weight": (e, v * d),
    }
    return {f"linear_attn.{name}": shape for name, shape in parts.items()}


def _gated(config: dict[str, Any]) -> Shapes:
    parts = attention(config, norm="head")
    rows, e = parts["self_attn.q_proj.weight"]
    return {**parts, "self_attn.q_proj.weight": (2 * rows, e)}


def _mtp(config: dict[str, Any]) -> Shapes:
    e = config["hidden_size"]
    return norms(config, "enorm", "hnorm", "shared_head.norm") | {"eh_proj.weight": (e, 2 * e)}


def _family(name: str, n_mtp: int, config: dict[str, Any]) -> Family:
    d = config["linear_key_head_dim"]
    k, v = config["linear_num_key_heads"], config["linear_num_value_heads"]
    n, f, shared = config["num_experts"], config["moe_intermediate_size"], config["shared_expert_intermediate_size"]

    def convert(part: str, weight: np.ndarray) -> Weights:
        match part:
            case "linear_attn.in_proj_qkvz.weight":
                heads = np.split(weight.reshape(k, -1, weight.shape[1]), np.cumsum([d, d, v // k * d]), axis=1)
                q, keys_, values, z = (rows.reshape(-1, weight.shape[1]) for rows in heads)
                return {"linear_attn.qkv.weight": np.concatenate([q, keys_, values]), "linear_attn.z.weight": z}
            case "linear_attn.conv1d.weight":
                return {part: weight[:, 0]}
            case "linear_attn.A_log":
                return {"ssm_a": -np.exp(weight.astype(np.float64)).astype(np.float32)}
            case "linear_attn.dt_bias":
                return {"linear_attn.dt.bias": weight}
            case "linear_attn.norm.weight":
                return {part: weight}
        return {part: weight + np.float32(1) if part.endswith("norm.weight") else weight}

    mixture = experts(config, n, f) | network(config, shared, "mlp.shared_expert")
    mixture["mlp.shared_expert_gate.weight"] = (1, config["hidden_size"])
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    layers = [norms(config) | (_delta_net(config) if net else _gated(config)) | mixture for net in recurrent]
    layers += [norms(config) | _gated(config) | mixture | _mtp(config)] * n_mtp
    metadata = keys(
        config,
        block_count=len(layers),
        expert_count=n,
        expert_used_count=config["num_experts_per_tok"],
        expert_feed_forward_length=f,
        expert_shared_feed_forward_length=shared,
        ssm__conv_kernel=config["linear_conv_kernel_dim"],
        ssm__state_size=d,
        ssm__group_count=k,
        ssm__time_step_rank=v,
        ssm__inner_size=d * v,
        attention__recurrent_layers=recurrent + [False] * n_mtp,
        full_attention_interval=4,
        rope__dimension_count=int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
    )
    if n_mtp:
        metadata["nextn_predict_layers"] = n_mtp
    weights = model(config, layers)
    return Family(
        name,
        "qwen3next",
        "Qwen3Next",
        config,
        weights,
        metadata,
        _NAMES,
        convert=convert,
        spreads=_SPREADS,
        n_mtp=n_mtp,
    )


def _config(kinds: str, n_embd: int, heads: tuple[int, int, int], n_rot: int, **more: Any) -> dict[str, Any]:
    names = {"d": "linear_attention", "a": "full_attention"}
    rope = {"rope_theta": 1e5, "partial_rotary_factor": n_rot / heads[2]}
    layer_types = [names[kind] for kind in kinds]
    return sizes(len(kinds), n_embd, heads, 112, rope, layer_types=layer_types, **{"rms_norm_eps": 1e-6} | more)


CASES = [
    # Three value heads for each key head; the trunk ends with a delta net.
    _family(
        "qwen3next",
        1,
        _config(
            "dddad", 72, (6, 2, 32), 8, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=40,
            shared_expert_intermediate_size=56, norm_topk_prob=True, linear_num_key_heads=2, linear_num_value_heads=6,
            linear_key_head_dim=32, linear_value_head_dim=32, linear_conv_kernel_dim=4, tie_word_embeddings=False,
        ),
    ),
    _family(
        "qwen3next-trunk",
        0,
        _config(
            "dada", 80, (5, 1, 48), 12, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=48,
            shared_expert_intermediate_size=40, norm_topk_prob=True, linear_num_key_heads=3, linear_num_value_heads=6,
            linear_key_head_dim=64, linear_value_head_dim=64, linear_conv_kernel_dim=3,
        ),
    ),
]  # fmt: skip
