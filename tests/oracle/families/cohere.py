"""Command R and Command R7B: parallel layers, layer norms without biases, a factor of the logits; in cohere2, windows, and
in cohere2moe, mixtures.

``transformers``: CohereForCausalLM, Cohere2ForCausalLM, Cohere2MoeForCausalLM.  llama.cpp: src/models/command-r.cpp,
src/models/cohere2.cpp, src/models/cohere2moe.cpp; CommandR2Model, Cohere2Model and Cohere2MoeModel of
conversion/command_r.py.

Rotations are of pairs in both layouts, so rows of q and k are not permuted.  Command R+ has layer norms of heads of q and k,
each with weights of its own.  In cohere2, only layers with a window rotate, in cohere2moe dense ones, too.
"""

from typing import Any

from tests.oracle.families.family import Family
from tests.oracle.families.parts import (
    SHARED_EXPERTS,
    attention,
    experts,
    head_dim,
    keys,
    model,
    network,
    norms,
    sizes,
)


def _family(name: str, architecture: str, kind: str, config: dict[str, Any], **more: Any) -> Family:
    parts = norms(config, "input_layernorm") | attention(config) | network(config)
    if config.get("use_qk_norm"):
        heads = {"q_norm": config["num_attention_heads"], "k_norm": config["num_key_value_heads"]}
        parts |= {f"self_attn.{part}.weight": (n, head_dim(config)) for part, n in heads.items()}
    weights = model(config, [parts] * config["num_hidden_layers"])
    metadata = keys(config, logit_scale=config["logit_scale"], rope__scaling__type="none", **more)
    epsilon = metadata["attention.layer_norm_epsilon"] = metadata.pop("attention.layer_norm_rms_epsilon")
    own = {word: value for word, value in config.items() if word != "rms_norm_eps"} | {"layer_norm_eps": epsilon}
    return Family(name, architecture, kind, own, weights, metadata)


_R7B = sizes(5, 72, (6, 2, 0), 104, {"rope_theta": 5e4}, sliding_window=24, sliding_window_pattern=4, logit_scale=0.25)


def _mixture(name: str, config: dict[str, Any], **more: Any) -> Family:
    n, f, shared = config["num_experts"], config["intermediate_size"], config["num_shared_experts"]
    n_ff = config["prefix_dense_intermediate_size"]
    common = norms(config, "input_layernorm") | attention(config)
    mixture = experts(config, n, f) | (network(config, f * shared, "mlp.shared_experts") if shared else {})
    layers = [common | (network(config, n_ff) if kind == "dense" else mixture) for kind in config["mlp_layer_types"]]
    metadata = keys(
        config,
        feed_forward_length=n_ff,
        attention__sliding_window=config["sliding_window"],
        attention__sliding_window_pattern=[kind == "sliding_attention" for kind in config["layer_types"]],
        attention__layer_norm_epsilon=config["layer_norm_eps"],
        leading_dense_block_count=config["mlp_layer_types"].count("dense"),
        expert_count=n,
        expert_used_count=config["num_experts_per_tok"],
        expert_feed_forward_length=f,
        expert_weights_norm=config["norm_topk_prob"],
        logit_scale=config["logit_scale"],
        rope__dimension_count=config["head_dim"],
        rope__scaling__type="none",
        vocab_size=config["vocab_size"],
        **more,
    )
    if config["rms_norm_eps"] is None:
        del metadata["attention.layer_norm_rms_epsilon"]
    return Family(name, "cohere2moe", "Cohere2Moe", config, model(config, layers), metadata, SHARED_EXPERTS)


def _kinds(kinds: str, n_dense: int) -> dict[str, list[str]]:
    types = ["sliding_attention" if kind == "s" else "full_attention" for kind in kinds]
    return {"layer_types": types, "mlp_layer_types": ["dense"] * n_dense + ["sparse"] * (len(kinds) - n_dense)}


_PLUS = sizes(2, 96, (6, 2, 0), 72, {"rope_theta": 1e5}, logit_scale=0.8, use_qk_norm=True)

CASES = [
    _family("command-r", "command-r", "Cohere", sizes(3, 80, (5, 1, 0), 112, {"rope_theta": 1e4}, logit_scale=0.0625)),
    _family("command-r-plus", "command-r", "Cohere", _PLUS),
    _family(
        "cohere2", "cohere2", "Cohere2", _R7B,
        attention__sliding_window=24, rope__dimension_count=head_dim(_R7B), vocab_size=_R7B["vocab_size"],
    ),
    # As published: RMS norms, a dense layer, no shared network.
    _mixture(
        "cohere2moe",
        sizes(
            5, 72, (6, 2, 16), 40, {"rope_theta": 5e4}, **_kinds("fssfs", 1), sliding_window=24, logit_scale=1.0,
            prefix_dense_intermediate_size=104, num_experts=7, num_experts_per_tok=3, num_shared_experts=0,
            expert_selection_fn="sigmoid", norm_topk_prob=False, layer_norm_eps=1e-5,
        ),
        expert_gating_func=2,
    ),
    _mixture(
        "cohere2moe-shared",
        sizes(
            3, 80, (5, 1, 32), 48, {"rope_theta": 1e4}, **_kinds("sfs", 0), sliding_window=40, logit_scale=0.5,
            prefix_dense_intermediate_size=104, num_experts=5, num_experts_per_tok=2, num_shared_experts=2,
            expert_selection_fn="softmax", norm_topk_prob=True, layer_norm_eps=1e-4,
        ) | {"rms_norm_eps": None},
        expert_gating_func=1, expert_shared_count=2, expert_shared_feed_forward_length=96,
    ),
]  # fmt: skip
