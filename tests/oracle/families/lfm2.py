"""LFM2: gated short convolutions, with attention in some layers; dense, and with mixtures after the first layers.

``transformers``: Lfm2ForCausalLM, Lfm2MoeForCausalLM.  llama.cpp: src/models/lfm2.cpp, lfm2moe.cpp; LFM2Model and
LFM2MoeModel of conversion/lfm2.py.

Layers without attention have no heads of keys in the file, and the norm before the output is called token_embd_norm there.
The conversion takes the middle dimension, 1, from the weights of the convolution.  Names of matrices are not those of
other families.
"""

from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.families.parts import keys, sizes
from tests.oracle.shared import N_VOCAB

_NAMES = {
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert": "exp_probs_b",
    "feed_forward.experts.gate_proj": "ffn_gate_exps",
    "feed_forward.experts.up_proj": "ffn_up_exps",
    "feed_forward.experts.down_proj": "ffn_down_exps",
}
_BIAS = "feed_forward.expert_bias"


def _convert(part: str, weight: np.ndarray) -> Weights:
    if part == "conv.conv.weight":
        return {part: weight[:, 0]}
    return {"feed_forward.expert.bias" if part == _BIAS else part: weight}


def _layer(config: dict[str, Any], convolves: bool, mixture: bool) -> Shapes:
    e, n_head, n_kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    d = e // n_head
    parts: Shapes = {"operator_norm.weight": (e,), "ffn_norm.weight": (e,)}
    if convolves:
        parts |= {"conv.in_proj.weight": (3 * e, e), "conv.conv.weight": (e, 1, config["conv_L_cache"])}
        parts["conv.out_proj.weight"] = (e, e)
    else:
        rows = {"q_proj": e, "k_proj": n_kv * d, "v_proj": n_kv * d, "out_proj": e}
        parts |= {f"self_attn.{name}.weight": (n, e) for name, n in rows.items()}
        parts |= {f"self_attn.{name}_layernorm.weight": (d,) for name in "qk"}
    if mixture:
        n, f = config["num_experts"], config["moe_intermediate_size"]
        parts |= {"feed_forward.gate.weight": (n, e), _BIAS: (n,)}
        parts |= {"feed_forward.experts.gate_up_proj": (n, 2 * f, e), "feed_forward.experts.down_proj": (n, e, f)}
    else:
        f = config["intermediate_size"]
        parts |= {f"feed_forward.w{i}.weight": shape for i, shape in ((1, (f, e)), (2, (e, f)), (3, (f, e)))}
    return parts


def _family(name: str, model: str, config: dict[str, Any], **more: Any) -> Family:
    kinds, n_kv = config["layer_types"], config["num_key_value_heads"]
    dense = config.get("num_dense_layers", len(kinds))
    weights: Shapes = {
        "model.embed_tokens.weight": (N_VOCAB, config["hidden_size"]),
        "model.embedding_norm.weight": (config["hidden_size"],),
    }
    for il, kind in enumerate(kinds):
        parts = _layer(config, kind == "conv", il >= dense)
        weights |= {f"model.layers.{il}.{part}": shape for part, shape in parts.items()}
    metadata = keys({"rms_norm_eps": config["norm_eps"], **config}, shortconv__l_cache=config["conv_L_cache"], **more)
    metadata["attention.head_count_kv"] = [0 if kind == "conv" else n_kv for kind in kinds]
    return Family(name, name, model, config, weights, metadata, _NAMES, convert=_convert)


def _config(kinds: str, n_embd: int, heads: tuple[int, int], n_ff: int, **more: Any) -> dict[str, Any]:
    layer_types = [{"c": "conv", "a": "full_attention"}[kind] for kind in kinds]
    config = sizes(len(kinds), n_embd, (*heads, 0), n_ff, {"rope_theta": 1e5}, layer_types=layer_types, norm_eps=1e-5)
    del config["rms_norm_eps"]
    return config | more


CASES = [
    # The first and the last layer are convolutions, of which two follow each other.
    _family(
        "lfm2",
        "Lfm2",
        _config("ccacac", 96, (6, 2), 112, conv_L_cache=3, block_auto_adjust_ff_dim=False),
    ),
    # The trunk ends with attention; four taps; a dense convolution before the mixtures.
    _family(
        "lfm2moe",
        "Lfm2Moe",
        _config(
            "cacca", 80, (5, 1), 112, conv_L_cache=4, num_dense_layers=1, num_experts=7, num_experts_per_tok=3,
            moe_intermediate_size=40,
        ),
        leading_dense_block_count=1,
        expert_count=7,
        expert_used_count=3,
        expert_feed_forward_length=40,
        expert_gating_func=2,
    ),
]  # fmt: skip
