"""Granite 3 and 4 (dense, mixture, mixture with a shared network): llama with four factors; Granite 4 H, with Mamba-2.

``transformers``: GraniteForCausalLM, GraniteMoeForCausalLM, GraniteMoeSharedForCausalLM, GraniteMoeHybridForCausalLM.
llama.cpp: src/models/granite.cpp, granite-hybrid.cpp; GraniteModel, GraniteMoeModel and GraniteHybridModel of
conversion/granite.py, LlamaModels, so that rows of q and k are permuted.

Embeddings and the outputs of both branches are multiplied, attention has a scale of its own, and logits are divided by
``logit_scale``.  The experts' weights are a softmax over the chosen ones; the shared network has no gate.

Layers of Granite 4 H without attention have no heads of keys in the file, and those with attention do not rotate.  The
conversion writes -exp(A_log) for ``A_log``, and a dimension of 1 behind it and ``D``.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.families.parts import attention, head_dim, keys, model, network, norms, sizes

_FACTORS = {
    "attention_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 4.0,
}
_MOE = "block_sparse_moe"
_NAMES = {
    f"{_MOE}.router": "ffn_gate_inp",
    f"{_MOE}.experts.gate_proj": "ffn_gate_exps",
    f"{_MOE}.experts.up_proj": "ffn_up_exps",
    f"{_MOE}.experts.down_proj": "ffn_down_exps",
    "shared_mlp.gate": "ffn_gate_shexp",
    "shared_mlp.up": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.dt": "ssm_dt",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
_DENSE = {"shared_mlp.gate": "ffn_gate", "shared_mlp.up": "ffn_up", "shared_mlp.output_linear": "ffn_down"}
"""What a hybrid without experts calls the network that is shared in others."""
_SPREADS = {"mamba.A_log": (0.8, 0.0), "mamba.D": (0.5, 1.0), "mamba.dt_bias": (1.0, -2.0)}


def _split(part: str, weight: np.ndarray) -> Weights:
    match part:
        case "mamba.A_log":
            return {"ssm_a": -np.exp(weight)[:, None]}
        case "mamba.D":
            return {"ssm_d": weight[:, None]}
        case "mamba.dt_bias":
            return {"mamba.dt.bias": weight}
        case "mamba.conv1d.weight":
            return {part: weight[:, 0]}
    if part != "shared_mlp.input_linear.weight":
        return {part: weight}
    gate, up = np.split(weight, 2)
    return {"shared_mlp.gate.weight": gate, "shared_mlp.up.weight": up}


def _mixture(config: dict[str, Any]) -> Shapes:
    e, n, f = config["hidden_size"], config["num_local_experts"], config["intermediate_size"]
    parts: Shapes = {
        f"{_MOE}.router.weight": (n, e),
        f"{_MOE}.experts.gate_up_proj": (n, 2 * f, e),
        f"{_MOE}.experts.down_proj": (n, e, f),
    }
    shared = config.get("shared_intermediate_size")
    if shared:
        parts |= {"shared_mlp.input_linear.weight": (2 * shared, e), "shared_mlp.output_linear.weight": (e, shared)}
    return parts


def _mamba(config: dict[str, Any]) -> Shapes:
    e, n_head, taps = config["hidden_size"], config["mamba_n_heads"], config["mamba_d_conv"]
    inner = 2 * e
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    return {
        "mamba.in_proj.weight": (inner + channels + n_head, e),
        "mamba.conv1d.weight": (channels, 1, taps),
        "mamba.conv1d.bias": (channels,),
        **{f"mamba.{name}": (n_head,) for name in ("dt_bias", "A_log", "D")},
        "mamba.norm.weight": (inner,),
        "mamba.out_proj.weight": (e, inner),
    }


def _hybrid(name: str, kinds: str, config: dict[str, Any]) -> Family:
    """kinds: for each layer, "m" if it is Mamba-2, "a" if it has attention."""
    words = ["linear_attention" if kind == "m" else "full_attention" for kind in kinds]
    config = {"mamba_n_groups": 1, **config, "layer_types": words, "mamba_expand": 2}
    own = _family(name, "granitehybrid", "GraniteMoeHybrid", {"num_local_experts": 0, **config})
    inner = {part: shape for part, shape in _mixture(dict(own.config)).items() if shape[0] or part.startswith("shared")}
    mixers = {"m": _mamba(config), "a": attention(config)}
    n_kv = config["num_key_value_heads"]
    metadata = {
        **own.metadata,
        "context_length": 1 << 20,
        "attention.head_count_kv": [n_kv if kind == "a" else 0 for kind in kinds],
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": 2 * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }
    names = _NAMES if "num_local_experts" in config else _NAMES | _DENSE

    def convert(part: str, weight: np.ndarray) -> Weights:
        if part == "mamba.norm.weight":
            return {part: weight.reshape(config["mamba_n_groups"], -1)}
        return _split(part, weight)

    weights = model(config, [norms(config) | mixers[kind] | inner for kind in kinds])
    return replace(own, weights=weights, metadata=metadata, names=names, spreads=_SPREADS, convert=convert)


def _family(name: str, architecture: str, kind: str, config: dict[str, Any]) -> Family:
    inner = _mixture(config) if "num_local_experts" in config else network(config)
    metadata = keys(
        config,
        vocab_size=config["vocab_size"],
        rope__dimension_count=head_dim(config),
        attention__scale=config["attention_multiplier"],
        embedding_scale=config["embedding_multiplier"],
        residual_scale=config["residual_multiplier"],
        logit_scale=config["logits_scaling"],
    )
    if config.get("num_local_experts"):
        metadata["expert_count"] = config["num_local_experts"]
        metadata["expert_used_count"] = config["num_experts_per_tok"]
    if "shared_intermediate_size" in config:
        metadata["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
    weights = model(config, [norms(config) | attention(config) | inner] * config["num_hidden_layers"])
    return Family(name, architecture, kind, config, weights, metadata, names=_NAMES, permuted=True, convert=_split)


_EXPERTS = {"num_local_experts": 7, "num_experts_per_tok": 3}

CASES = [
    _family("granite", "granite", "Granite", sizes(3, 60, (5, 1, 0), 112, {"rope_theta": 1e4}, **_FACTORS)),
    _family(
        "granitemoe",
        "granitemoe",
        "GraniteMoe",
        sizes(3, 72, (6, 2, 0), 40, {"rope_theta": 1e5}, tie_word_embeddings=False, **_FACTORS, **_EXPERTS),
    ),
    _family(
        "granitemoe-shared",
        "granitemoe",
        "GraniteMoeShared",
        sizes(2, 80, (5, 5, 0), 48, {"rope_theta": 1e4}, shared_intermediate_size=56, **_FACTORS, **_EXPERTS),
    ),
    # Two layers of Mamba-2 follow each other; three taps, and heads that are no power of two.
    _hybrid(
        "granitehybrid",
        "mmama",
        sizes(
            5, 96, (6, 2, 0), 112, {"rope_theta": 1e4}, shared_intermediate_size=112, mamba_n_heads=4, mamba_d_head=48,
            mamba_d_state=64, mamba_d_conv=3, **_FACTORS,
        ),
    ),
    _hybrid(
        "granitehybrid-moe",
        "mam",
        sizes(
            3, 80, (5, 1, 0), 40, {"rope_theta": 1e4}, shared_intermediate_size=56, mamba_n_heads=10, mamba_d_head=16,
            mamba_d_state=32, mamba_d_conv=4, mamba_n_groups=2, **_FACTORS, **_EXPERTS,
        ),
    ),
]  # fmt: skip
