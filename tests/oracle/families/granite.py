"""Granite 3 and 4 (dense, mixture, mixture with a shared network): llama with four factors.

``transformers``: GraniteForCausalLM, GraniteMoeForCausalLM, GraniteMoeSharedForCausalLM.  llama.cpp:
src/models/granite.cpp; GraniteModel and GraniteMoeModel of conversion/granite.py, LlamaModels, so that rows of q and k
are permuted.

Embeddings and the outputs of both branches are multiplied, attention has a scale of its own, and logits are divided by
``logit_scale``.  The experts' weights are a softmax over the chosen ones; the shared network has no gate.
"""

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
}


def _split(part: str, weight: np.ndarray) -> Weights:
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
    if "num_local_experts" in config:
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
]
