"""Llama 4: layers that see frames, layers that do not rotate, and mixtures whose experts get weighted inputs.

``transformers``: Llama4ForCausalLM.  llama.cpp: src/models/llama4.cpp; Llama4Model of conversion/llama.py, which transposes
experts and splits gate and up.  Rotations are of pairs in both layouts, so rows of q and k are not permuted.

The conversion writes no size of frames; llama.cpp takes 8192 for it and for the step of the factor of queries.  A mixture
of 128 experts has no norms of q and k.  "llama4-dense" has no mixture, no frames and rotates in all layers.
"""

from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.families.parts import LLAMA3, attention, head_dim, keys, model, network, norms, sizes
from tests.oracle.shared import llama3_factors

_NAMES = {
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.experts.gate_proj": "ffn_gate_exps",
    "feed_forward.experts.up_proj": "ffn_up_exps",
    "feed_forward.experts.down_proj": "ffn_down_exps",
    **{
        f"feed_forward.{infix}{word}_proj": f"ffn_{word}{end}"
        for word in ("gate", "up", "down")
        for infix, end in (("", ""), ("shared_expert.", "_shexp"))
    },
}


def _convert(part: str, weight: np.ndarray) -> Weights:
    if ".experts." not in part:
        return {part: weight}
    weight = weight.swapaxes(1, 2)
    if part.endswith("down_proj"):
        return {part: weight}
    gate, up = np.split(weight, 2, axis=1)
    return {part.replace("gate_up", "gate"): gate, part.replace("gate_up", "up"): up}


def _family(name: str, config: dict[str, Any], **more: Any) -> Family:
    e, f, n = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    n_ff, step, rope = config["intermediate_size_mlp"], config["interleave_moe_layer_step"], config["rope_parameters"]
    mixture: Shapes = {
        "feed_forward.router.weight": (n, e),
        "feed_forward.experts.gate_up_proj": (n, e, 2 * f),
        "feed_forward.experts.down_proj": (n, f, e),
        **network(config, f, "feed_forward.shared_expert"),
    }
    common = norms(config) | attention(config)
    layers = [
        common | (network(config, n_ff, "feed_forward") if not n or (il + 1) % step else mixture)
        for il in range(config["num_hidden_layers"])
    ]
    extra = {}
    if rope["rope_type"] == "llama3":
        extra["rope_freqs.weight"] = llama3_factors(rope, rope["rope_theta"], head_dim(config))
    metadata = keys(
        config,
        feed_forward_length=n_ff,
        vocab_size=config["vocab_size"],
        rope__dimension_count=head_dim(config),
        interleave_moe_layer_step=step,
        expert_feed_forward_length=f,
        **({"expert_count": n, "expert_used_count": config["num_experts_per_tok"]} if n else {}),
        **more,
    )
    return Family(
        name, "llama4", "Llama4Text", config, model(config, layers), metadata, _NAMES, convert=_convert, extra=extra
    )


def _config(
    n_layer: int, n_embd: int, heads: tuple[int, int, int], rope: dict[str, Any], experts: tuple[int, int], **more: Any
) -> dict[str, Any]:
    n, used = experts
    own = {"num_local_experts": n, "num_experts_per_tok": used, "intermediate_size_mlp": 104}
    return sizes(n_layer, n_embd, heads, 40, rope, tie_word_embeddings=False, **own, **more)


_SCOUT = LLAMA3 | {"rope_theta": 5e5}
_FRAMES = {"attention__sliding_window": 32, "attention__temperature_length": 40}

CASES = [
    _family(
        "llama4",
        _config(
            5, 80, (5, 1, 16), _SCOUT, (7, 1),
            attention_chunk_size=32, floor_scale=40, interleave_moe_layer_step=1, use_qk_norm=True,
        ),
        **_FRAMES,
    ),
    # More than one expert per row, a frame longer than a page, and a stronger factor that changes at positions that are kept.
    _family(
        "llama4-128",
        _config(
            4, 72, (6, 2, 32), {"rope_theta": 1e4}, (128, 3),
            attention_chunk_size=128, floor_scale=64, attn_scale=0.5, interleave_moe_layer_step=2, use_qk_norm=False,
        ),
        attention__sliding_window=128, attention__temperature_length=64, attention__temperature_scale=0.5,
    ),
    _family(
        "llama4-dense",
        _config(
            3, 64, (4, 2, 16), {"rope_theta": 1e5}, (0, 1),
            no_rope_layers=[1] * 3, layer_types=["full_attention"] * 3, moe_layers=[], interleave_moe_layer_step=1,
            use_qk_norm=True,
        ),
        attention__sliding_window=0,
    ),
]  # fmt: skip
