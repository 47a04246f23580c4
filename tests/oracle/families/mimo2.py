"""MiMo V2 Flash: windows with sinks, twice the heads of keys and a rotation of their own; short heads of values; a factor of
the results of attention; a dense layer, then mixtures with a sigmoid router.

``transformers``: MiMoV2FlashForCausalLM, which calls window what the reference attends to besides the token itself, plus one;
here, as in llama.cpp, a window counts the token itself.  llama.cpp: src/models/mimo2.cpp; MiMoV2Model of conversion/mimo.py.
"""

import numpy as np

from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.families.parts import experts, keys, model, network, norms, sizes

_KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_SLIDES = [kind == "sliding_attention" for kind in _KINDS]
_CONFIG = sizes(
    5, 80, (6, 1, 24), 104,
    {
        kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
        for kind, base in (("full_attention", 5e5), ("sliding_attention", 1e4))
    },
    tie_word_embeddings=False, n_routed_experts=7, num_experts_per_tok=3, moe_intermediate_size=24, v_head_dim=16,
    sliding_window=24, layer_types=_KINDS, attention_value_scale=0.7, mlp_layer_types=["dense"] + ["sparse"] * 4,
    routed_scaling_factor=1.0, norm_topk_prob=True, n_group=1, topk_group=1,
)  # fmt: skip


def _layer(il: int) -> Shapes:
    e, n_head, n_kv = 80, 6, 2 if _SLIDES[il] else 1
    parts = norms(_CONFIG) | {
        "self_attn.q_proj.weight": (n_head * 24, e),
        "self_attn.k_proj.weight": (n_kv * 24, e),
        "self_attn.v_proj.weight": (n_kv * 16, e),
        "self_attn.o_proj.weight": (e, n_head * 16),
    }
    if _SLIDES[il]:
        parts["self_attn.sinks"] = (n_head,)
    if il == 0:
        return parts | network(_CONFIG)
    return parts | experts(_CONFIG, 7, 24) | {"mlp.gate.e_score_correction_bias": (7,)}


def _convert(part: str, weight: np.ndarray) -> Weights:
    return {part.replace("gate.e_score_correction_bias", "gate.correction.bias"): weight}


CASES = [
    Family(
        "mimo2",
        "mimo2",
        "MiMoV2Flash",
        _CONFIG,
        model(_CONFIG, [_layer(il) for il in range(5)]),
        keys(
            _CONFIG,
            rope__dimension_count=12,
            attention__head_count_kv=[2 if slides else 1 for slides in _SLIDES],
            attention__value_length=16,
            attention__value_scale=0.7,
            attention__sliding_window=24,
            attention__sliding_window_pattern=_SLIDES,
            expert_count=7,
            expert_used_count=3,
            expert_feed_forward_length=24,
            expert_gating_func=2,
            expert_weights_norm=True,
        ),
        {"self_attn.sinks": "attn_sinks", "mlp.gate.correction": "exp_probs_b"},
        convert=_convert,
        spreads={"sinks": (1.0, 1.0), "e_score_correction_bias": (0.1, 0.0)},
    )
]
