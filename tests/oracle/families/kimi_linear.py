"""Kimi Linear: Kimi delta attention, with latent attention that does not rotate in some layers, and mixtures behind a dense
layer.

``transformers``: KimiLinearForCausalLM.  llama.cpp: src/models/kimi-linear.cpp; KimiLinearModel of
conversion/kimi_linear.py.

Published checkpoints have a convolution for each of queries, keys and values, as files have, where ``transformers`` has one;
files have them with dimensions of 1, and -exp(A_log) for ``A_log``.  Layers of Kimi delta attention have no heads of keys in
the file.

The epsilon of the norm of latents and that of the lengths of queries and keys are 1e-6 in ``transformers``, whatever the
configuration says.  llama.cpp has that of the configuration for both, this engine for the first, as for DeepSeek; here it
is 1e-6 everywhere.
"""

from typing import Any

import numpy as np

from tests.oracle.families.deepseek2 import _NAMES as _LATENT
from tests.oracle.families.deepseek2 import _attention, _converter
from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.families.parts import experts, keys, model, network, norms, sizes

_NAMES = _LATENT | {
    "self_attn.conv1d_q": "ssm_conv1d_q",
    "self_attn.conv1d_k": "ssm_conv1d_k",
    "self_attn.conv1d_v": "ssm_conv1d_v",
    "self_attn.forget_gate.f_a_proj": "ssm_f_a",
    "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.forget_gate.dt": "ssm_dt",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.o_norm": "ssm_norm",
}
_SPREADS = {"A_log": (1.0, -1.0), "dt_bias": (1.0, -2.0)}


def _delta(config: dict[str, Any]) -> Shapes:
    e, n_head, d = config["hidden_size"], config["linear_num_heads"], config["linear_head_dim"]
    inner = n_head * d
    parts: Shapes = {f"{part}_proj.weight": (inner, e) for part in "qkv"}
    parts |= {"conv1d.weight": (3 * inner, 1, config["linear_conv_kernel_dim"]), "b_proj.weight": (n_head, e)}
    for gate in ("forget_gate.f", "g"):
        parts |= {f"{gate}_a_proj.weight": (d, e), f"{gate}_b_proj.weight": (inner, d)}
    parts |= {"forget_gate.A_log": (1, 1, n_head, 1), "forget_gate.dt_bias": (inner,), "o_norm.weight": (d,)}
    parts["o_proj.weight"] = (e, inner)
    return {f"self_attn.{name}": shape for name, shape in parts.items()}


def _family(name: str, kinds: str, config: dict[str, Any]) -> Family:
    """kinds: for each layer, "d" if it is Kimi delta attention, "a" if it has latent attention."""
    words = ["linear_attention" if kind == "d" else "full_attention" for kind in kinds]
    n, f, dense = config["num_local_experts"], config["moe_intermediate_size"], config["first_k_dense_replace"]
    r, nope, rope = (config[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
    split = _converter(config, split=True)

    def convert(part: str, weight: np.ndarray) -> Weights:
        match part.removeprefix("self_attn."):
            case "conv1d.weight":
                parts = zip("qkv", np.split(weight, 3), strict=True)
                return {f"self_attn.conv1d_{each}.weight": rows[:, 0][None, :, None] for each, rows in parts}
            case "forget_gate.A_log":
                return {"ssm_a": -np.exp(weight)}
            case "forget_gate.dt_bias":
                return {"self_attn.forget_gate.dt.bias": weight}
        return split(part, weight)

    mixture = experts(config, n, f) | network(config, f * config["n_shared_experts"], "mlp.shared_experts")
    mixture["mlp.gate.e_score_correction_bias"] = (n,)
    mixers = {"d": _delta(config), "a": _attention(config)}
    layers = [
        norms(config) | mixers[kind] | (network(config) if il < dense else mixture) for il, kind in enumerate(kinds)
    ]
    metadata = keys(
        config,
        attention__head_count_kv=[int(kind == "a") for kind in kinds],
        attention__kv_lora_rank=r,
        attention__key_length=r + rope,
        attention__key_length_mla=nope + rope,
        attention__value_length_mla=config["v_head_dim"],
        rope__dimension_count=rope,
        ssm__conv_kernel=config["linear_conv_kernel_dim"],
        kda__head_dim=config["linear_head_dim"],
        expert_count=n,
        expert_used_count=config["num_experts_per_tok"],
        expert_feed_forward_length=f,
        expert_shared_count=config["n_shared_experts"],
        expert_weights_scale=config["routed_scaling_factor"],
        expert_gating_func=2,
        leading_dense_block_count=dense,
    )
    config = {key: value for key, value in config.items() if key != "rope_parameters"} | {"layer_types": words}
    return Family(
        *(name, "kimi-linear", "KimiLinear", config, model(config, layers), metadata, _NAMES),
        convert=convert,
        spreads=_SPREADS,
    )


CASES = [
    # Latent attention in the middle and at the end of the trunk; the first layer is dense.
    _family(
        "kimi-linear",
        "ddada",
        sizes(
            5, 88, (4, 4, 0), 112, {"rope_theta": 1e4}, linear_num_heads=4, linear_head_dim=64, linear_conv_kernel_dim=4,
            kv_lora_rank=64, q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24, rms_norm_eps=1e-6,
            first_k_dense_replace=1, num_local_experts=7, num_experts_per_tok=3, moe_intermediate_size=40,
            n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.446, norm_topk_prob=True,
            tie_word_embeddings=False, attention_bias=False,
        ),
    ),
]  # fmt: skip
