"""Step 3.5 Flash and the text of Step 3.7: windows with more heads, a gate for each head, limited activations.

``transformers``: Step3p7TextModel.  llama.cpp: src/models/step35.cpp; Step35Model of conversion/step3.py, which adds 1 to
the weights of norms.

Layers without a window rotate half of what the others rotate, with factors of llama 3 and a base of their own.
``expert_weights_norm`` is what the published configuration calls norm_expert_weight; ``transformers`` always normalizes.
The limits of the shared network are those of dense networks, too.  Layers that draft have dense networks, as published.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.families.parts import (
    LLAMA3,
    SHARED_EXPERTS,
    attention,
    experts,
    keys,
    model,
    network,
    norms,
    sizes,
    with_bias_of_router,
)
from tests.oracle.shared import N_VOCAB, llama3_factors

_NAMES = {
    "self_attn.g_proj": "attn_gate",
    **SHARED_EXPERTS,
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}

_KINDS = {"f": "full_attention", "s": "sliding_attention"}


def _convert(part: str, weight: np.ndarray) -> Weights:
    if part.endswith("norm.weight"):
        return {part: weight + np.float32(1.0)}
    return with_bias_of_router(part, weight)


def _family(name: str, config: dict[str, Any], drafting: str = "") -> Family:
    """drafting: the kind of each layer that drafts, of which the last has no output matrix of its own."""
    e, d = config["hidden_size"], config["head_dim"]
    kinds = [*config["layer_types"], *(_KINDS[kind] for kind in drafting)]
    n, f = config["n_routed_experts"], config["moe_intermediate_size"]
    heads = [
        config["num_sliding_attention_heads" if kind == "sliding_attention" else "num_attention_heads"]
        for kind in kinds
    ]
    layers: list[Shapes] = []
    for n_head, network_type in zip(heads, config["mlp_layer_types"] + ["dense"] * len(drafting), strict=True):
        parts = norms(config) | attention({**config, "num_attention_heads": n_head}, norm="head")
        parts["self_attn.g_proj.weight"] = (n_head, e)
        if network_type == "sparse":
            parts |= experts(config, n, f) | {"mlp.gate.e_score_correction_bias": (n,)}
            parts |= network(config, config["share_expert_dim"], "mlp.shared_experts")
        else:
            parts |= network(config)
        layers.append(parts)
    for parts in layers[len(layers) - len(drafting) :]:
        parts |= norms(config, "enorm", "hnorm", "shared_head.norm") | {"eh_proj.weight": (e, 2 * e)}
        if parts is not layers[-1]:
            parts["shared_head.head.weight"] = (N_VOCAB, e)
    rope = config["rope_parameters"]["full_attention"]
    factors, n_half = {}, d // 2
    if rope["rope_type"] == "llama3":
        half = llama3_factors(rope, rope["rope_theta"], d // 2)
        factors = {"rope_freqs.weight": np.concatenate([half, np.ones(n_half - half.size, np.float32)])}
    metadata = keys(
        config,
        attention__head_count=heads,
        attention__head_count_kv=[config["num_key_value_heads"]] * len(heads),
        attention__sliding_window=config["sliding_window"],
        attention__sliding_window_pattern=[kind == "sliding_attention" for kind in kinds],
        expert_count=n,
        expert_used_count=config["num_experts_per_tok"],
        expert_feed_forward_length=f,
        expert_shared_feed_forward_length=config["share_expert_dim"],
        expert_weights_scale=config["moe_router_scaling_factor"],
        expert_weights_norm=True,
        leading_dense_block_count=config["mlp_layer_types"].index("sparse"),
    )
    for key, field in (("swiglu_clamp_exp", "swiglu_limits"), ("swiglu_clamp_shexp", "swiglu_limits_shared")):
        if config[field]:
            metadata[key] = [float(limit or 0) for limit in config[field]] + [0.0] * len(drafting)
    if drafting:
        metadata |= {"block_count": len(layers), "nextn_predict_layers": len(drafting)}
    return Family(
        *(name, "step35", "Step3p7Text", config, model(config, layers), metadata, _NAMES),
        convert=_convert,
        extra=factors,
        spreads={"norm.weight": (0.3, 0.0)},
        n_mtp=len(drafting),
    )


def _config(
    kinds: str, n_dense: int, n_embd: int, heads: tuple[int, int, int], rope: dict[str, Any], **more: Any
) -> dict[str, Any]:
    types: Sequence[str] = [_KINDS[kind] for kind in kinds]
    mlp = ["dense"] * n_dense + ["sparse"] * (len(kinds) - n_dense)
    nested = {
        "full_attention": {"rope_type": "default", **rope, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    own = {"layer_types": types, "mlp_layer_types": mlp, "tie_word_embeddings": False, "pad_token_id": 0}
    return sizes(len(kinds), n_embd, heads, 112, nested, **own, **more)


CASES = [
    _family(
        "step35",
        _config(
            "fsssf", 1, 72, (4, 2, 16), LLAMA3 | {"rope_theta": 1e6}, num_sliding_attention_heads=6, sliding_window=24,
            n_routed_experts=7, num_experts_per_tok=3, moe_intermediate_size=40, share_expert_dim=56,
            moe_router_scaling_factor=3.0, swiglu_limits=None, swiglu_limits_shared=None,
        ),
    ),
    _family(
        "step35-limits",
        _config(
            "sfs", 1, 80, (2, 1, 32), {"rope_theta": 5e6}, num_sliding_attention_heads=3, sliding_window=40,
            n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=48, share_expert_dim=48,
            moe_router_scaling_factor=1.0, swiglu_limits=[0.0, 0.25, None], swiglu_limits_shared=[0.5, 0.0, 0.125],
        ),
    ),
    _family(
        "step35-mtp",
        _config(
            "fs", 1, 64, (2, 1, 32), {"rope_theta": 1e5}, num_sliding_attention_heads=3, sliding_window=24,
            n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=48, share_expert_dim=48,
            moe_router_scaling_factor=2.0, swiglu_limits=[None, 7.0], swiglu_limits_shared=[None, 16.0],
        ),
        drafting="fsf",
    ),
]  # fmt: skip
