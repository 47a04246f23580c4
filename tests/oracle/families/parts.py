"""Parts that architectures share: words of the configuration, shapes of the checkpoint, keys of the GGUF file."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tests.oracle.families.family import Shapes, Weights
from tests.oracle.shared import N_CTX, N_VOCAB

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


SHARED_EXPERTS = {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.gate.correction": "exp_probs_b",
}
"""The names in files of shared experts and of the bias of the router, whose tensor ``with_bias_of_router`` names."""


def with_bias_of_router(part: str, weight: np.ndarray) -> Weights:
    """The weight under a name that ends with "bias", as the name in files does."""
    return {part.replace("gate.e_score_correction_bias", "gate.correction.bias"): weight}


def sizes(
    n_layer: int, n_embd: int, heads: tuple[int, int, int], n_ff: int, rope: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """A configuration in the words of ``transformers``; ``heads`` are those of queries, those of keys, and their size,
    or 0 where the configuration does not say it; ``rope`` without a type is the default one."""
    n_head, n_head_kv, head_dim = heads
    nested = any(isinstance(value, dict) for value in rope.values())
    return {
        "vocab_size": N_VOCAB,
        "hidden_size": n_embd,
        "intermediate_size": n_ff,
        "num_hidden_layers": n_layer,
        "num_attention_heads": n_head,
        "num_key_value_heads": n_head_kv,
        **({"head_dim": head_dim} if head_dim else {}),
        "max_position_embeddings": N_CTX,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "rope_parameters": dict(rope) if nested else {"rope_type": "default", **rope},
        **more,
    }


def head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def model(config: Mapping[str, Any], layers: Iterable[Shapes]) -> Shapes:
    """Every weight, with the parts of each layer."""
    e = config["hidden_size"]
    every: Shapes = {"model.embed_tokens.weight": (N_VOCAB, e), "model.norm.weight": (e,)}
    if not config["tie_word_embeddings"]:
        every["lm_head.weight"] = (N_VOCAB, e)
    for il, parts in enumerate(layers):
        every |= {f"model.layers.{il}.{name}": shape for name, shape in parts.items()}
    return every


def norms(config: Mapping[str, Any], *names: str) -> Shapes:
    """Norms of the width of the model: before attention and before the network, or others."""
    every = names or ("input_layernorm", "post_attention_layernorm")
    return {f"{name}.weight": (config["hidden_size"],) for name in every}


def attention(config: Mapping[str, Any], *, bias: bool = False, out_bias: bool = False, norm: str = "") -> Shapes:
    """q, k, v and the output; ``norm`` of q and k: "" for none, "head" of each head, "all" of all heads together."""
    e, d = config["hidden_size"], head_dim(config)
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    parts: Shapes = {f"self_attn.{name}.weight": (n, e) for name, n in rows.items()}
    parts["self_attn.o_proj.weight"] = (e, q)
    if bias:
        parts |= {f"self_attn.{name}.bias": (n,) for name, n in rows.items()}
    if out_bias:
        parts["self_attn.o_proj.bias"] = (e,)
    if norm:
        widths = (d, d) if norm == "head" else (q, kv)
        parts |= {f"self_attn.{name}.weight": (n,) for name, n in zip(("q_norm", "k_norm"), widths, strict=True)}
    return parts


def network(config: Mapping[str, Any], n_ff: int = 0, name: str = "mlp", *, gate: bool = True) -> Shapes:
    """A feed-forward network of n_ff inner values, or as many as the configuration says."""
    e, f = config["hidden_size"], n_ff or config["intermediate_size"]
    parts: Shapes = {f"{name}.gate_proj.weight": (f, e)} if gate else {}
    return {**parts, f"{name}.up_proj.weight": (f, e), f"{name}.down_proj.weight": (e, f)}


def experts(config: Mapping[str, Any], n_expert: int, n_ff: int, name: str = "mlp") -> Shapes:
    """A router, and experts whose gates and rows that go up are one tensor."""
    e = config["hidden_size"]
    return {
        f"{name}.gate.weight": (n_expert, e),
        f"{name}.experts.gate_up_proj": (n_expert, 2 * n_ff, e),
        f"{name}.experts.down_proj": (n_expert, e, n_ff),
    }


def keys(config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The keys that ``TextModel.set_gguf_parameters`` (conversion/base.py) writes for every architecture, then others;
    "__" in a name stands for a dot."""
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    every = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "rope.freq_base": rope["rope_theta"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    if rope["rope_type"] == "yarn":
        every["rope.scaling.type"] = "yarn"
        every["rope.scaling.factor"] = rope["factor"]
        every["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        found = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
        every |= {f"rope.scaling.{key}": rope[word] for key, word in found.items() if word in rope}
    sliding = config["rope_parameters"].get("sliding_attention")
    if sliding:
        every["rope.freq_base_swa"] = sliding["rope_theta"]
    if "head_dim" in config:
        every |= dict.fromkeys(("attention.key_length", "attention.value_length"), config["head_dim"])
    return every | {key.replace("__", "."): value for key, value in more.items()}
