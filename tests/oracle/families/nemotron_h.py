"""Nemotron-H and Nemotron 3: blocks that are Mamba-2 with several groups, attention, or a network alone; dense, and with
mixtures of experts, which may read and compute latents.

``transformers``: NemotronHForCausalLM.  llama.cpp: src/models/nemotron-h.cpp; NemotronHModel of conversion/nemotron.py, a
GraniteHybridModel, whose rows of q and k are permuted: without a rotation, this changes nothing but the order of sums.

Blocks with a mixer have no width of the network in the file, and those without attention no heads of keys.  The conversion
writes -exp(A_log) for ``A_log``, a dimension of 1 behind it and ``D``, and the norm of a mixer as a matrix with a row for
each group.  ``transformers`` bounds steps from below by ``time_step_min``; llama.cpp does not, so here it is tiny.
"""

from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.shared import N_CTX, N_VOCAB

_NAMES = {
    "model.embeddings": "token_embd",
    "model.norm_f": "output_norm",
    "norm": "attn_norm",
    "mixer.in_proj": "ssm_in",
    "mixer.conv1d": "ssm_conv1d",
    "mixer.dt": "ssm_dt",
    "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.choice": "exp_probs_b",
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
}
_SPREADS = {"mixer.A_log": (0.8, 0.0), "mixer.D": (0.5, 1.0), "mixer.dt_bias": (1.0, -2.0)}
_WORDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""The kinds of blocks, by their letters in published configurations."""


def _mamba(c: dict[str, Any]) -> Shapes:
    e, n_head, inner = c["hidden_size"], c["mamba_num_heads"], c["mamba_num_heads"] * c["mamba_head_dim"]
    channels = inner + 2 * c["n_groups"] * c["ssm_state_size"]
    return {
        "mixer.in_proj.weight": (inner + channels + n_head, e),
        "mixer.conv1d.weight": (channels, 1, c["conv_kernel"]),
        "mixer.conv1d.bias": (channels,),
        **{f"mixer.{name}": (n_head,) for name in ("dt_bias", "A_log", "D")},
        "mixer.norm.weight": (inner,),
        "mixer.out_proj.weight": (e, inner),
    }


def _attention(c: dict[str, Any]) -> Shapes:
    e, d = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    rows = {f"mixer.{name}_proj.weight": (n, e) for name, n in (("q", q), ("k", kv), ("v", kv))}
    return {**rows, "mixer.o_proj.weight": (e, q)}


def _network(c: dict[str, Any], n_ff: int, name: str = "mixer") -> Shapes:
    return {f"{name}.up_proj.weight": (n_ff, c["hidden_size"]), f"{name}.down_proj.weight": (c["hidden_size"], n_ff)}


def _mixture(c: dict[str, Any]) -> Shapes:
    e, n, f = c["hidden_size"], c["n_routed_experts"], c["moe_intermediate_size"]
    latent = c["moe_latent_size"]
    d = latent or e
    parts: Shapes = {"mixer.experts.up_proj": (n, f, d), "mixer.experts.down_proj": (n, d, f)}
    parts |= {"mixer.gate.weight": (n, e), "mixer.gate.e_score_correction_bias": (n,)}
    parts |= _network(c, c["moe_shared_expert_intermediate_size"], "mixer.shared_experts")
    if latent:
        parts |= {"mixer.fc1_latent_proj.weight": (latent, e), "mixer.fc2_latent_proj.weight": (e, latent)}
    return parts


def _family(name: str, pattern: str, n_groups: int, config: dict[str, Any]) -> Family:
    """pattern: the letters of the kinds of blocks."""
    c: dict[str, Any] = {
        "layers_block_type": [_WORDS[letter] for letter in pattern],
        "vocab_size": N_VOCAB,
        "max_position_embeddings": N_CTX,
        "layer_norm_epsilon": 1e-5,
        "time_step_min": 1e-30,
        "n_groups": n_groups,
        "tie_word_embeddings": False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        **config,
    }
    e, mixture = c["hidden_size"], "n_routed_experts" in c
    kinds = {"M": _mamba(c), "*": _attention(c)}
    kinds |= {"E": _mixture(c)} if mixture else {"-": _network(c, c["intermediate_size"])}
    weights: Shapes = {
        "model.embeddings.weight": (N_VOCAB, e),
        "model.norm_f.weight": (e,),
        "lm_head.weight": (N_VOCAB, e),
    }
    for il, letter in enumerate(pattern):
        parts = {"norm.weight": (e,), **kinds[letter]}
        weights |= {f"model.layers.{il}.{part}": shape for part, shape in parts.items()}
    n_ff = c["moe_intermediate_size" if mixture else "intermediate_size"]
    metadata = {
        "block_count": len(pattern),
        "context_length": 1 << 20,
        "embedding_length": e,
        "feed_forward_length": [n_ff if letter in "-E" else 0 for letter in pattern],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": [c["num_key_value_heads"] if letter == "*" else 0 for letter in pattern],
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "attention.layer_norm_epsilon": c["layer_norm_epsilon"],
        "vocab_size": N_VOCAB,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": c["conv_kernel"],
        "ssm.state_size": c["ssm_state_size"],
        "ssm.group_count": n_groups,
        "ssm.inner_size": c["mamba_num_heads"] * c["mamba_head_dim"],
        "ssm.time_step_rank": c["mamba_num_heads"],
    }
    if mixture:
        metadata |= {
            "expert_count": c["n_routed_experts"],
            "expert_used_count": c["num_experts_per_tok"],
            "expert_feed_forward_length": n_ff,
            "expert_shared_feed_forward_length": c["moe_shared_expert_intermediate_size"],
            "expert_shared_count": 1,
            "expert_weights_norm": c["norm_topk_prob"],
            "expert_weights_scale": c["routed_scaling_factor"],
            "expert_group_count": 1,
        }
    if c.get("moe_latent_size"):
        metadata["moe_latent_size"] = c["moe_latent_size"]

    def convert(part: str, weight: np.ndarray) -> Weights:
        match part:
            case "mixer.A_log":
                return {"ssm_a": -np.exp(weight)[:, None]}
            case "mixer.D":
                return {"ssm_d": weight[:, None]}
            case "mixer.dt_bias":
                return {"mixer.dt.bias": weight}
            case "mixer.conv1d.weight":
                return {part: weight[:, 0]}
            case "mixer.norm.weight":
                return {part: weight.reshape(n_groups, -1)}
            case "mixer.gate.e_score_correction_bias":
                return {"mixer.choice.bias": weight}
        return {part: weight}

    architecture = "nemotron_h_moe" if mixture else "nemotron_h"
    return Family(
        name, architecture, "NemotronH", c, weights, metadata, _NAMES, convert=convert, spreads=_SPREADS
    )  # fmt: skip


def _sizes(n_embd: int, heads: tuple[int, int, int], mamba: tuple[int, int, int, int], **more: Any) -> dict[str, Any]:
    """heads: of queries, of keys, and their size; mamba: heads, their size, the size of the state, taps."""
    names = "num_attention_heads", "num_key_value_heads", "head_dim"
    own = "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel"
    return {"hidden_size": n_embd, **dict(zip(names, heads, strict=True)), **dict(zip(own, mamba, strict=True)), **more}


_EXPERTS = {"n_routed_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5}

CASES = [
    # Two mixers follow each other, and so do two networks; groups of heads; the first block is a network.
    _family("nemotron_h", "-MM*-M--", 4, _sizes(96, (6, 2, 20), (8, 48, 64, 3), intermediate_size=112)),
    _family(
        "nemotron_h_moe",
        "MEM*E",
        3,
        _sizes(
            80, (5, 1, 16), (12, 16, 32, 4), moe_intermediate_size=40, moe_shared_expert_intermediate_size=56,
            moe_latent_size=None, **_EXPERTS,
        ),
    ),
    # Experts with latents; the trunk ends with Mamba-2, one group.
    _family(
        "nemotron_h_moe-latent",
        "E*EM",
        1,
        _sizes(
            80, (4, 4, 24), (4, 32, 32, 4), moe_intermediate_size=40, moe_shared_expert_intermediate_size=56,
            moe_latent_size=48, **_EXPERTS,
        ),
    ),
]  # fmt: skip
