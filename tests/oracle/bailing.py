"""Checkpoints of Ling in their published words, from those of classes of ``transformers`` that compute the same."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_WORDS = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "self_attn.o_proj": "attention.dense",
    "gate.e_score_correction_bias": "gate.expert_bias",
}

_FIRST_WORDS = {
    "model.embed_tokens.weight": "model.word_embeddings.weight",
    "self_attn.o_proj.weight": "attention.dense.weight",
    "block_sparse_moe.router.weight": "mlp.gate.weight",
    "shared_mlp.output_linear.weight": "mlp.shared_experts.down_proj.weight",
}


def published(state: Mapping[str, Any], join: Callable[[Sequence[Any]], Any]) -> dict[str, Any]:
    """The tensors of Glm4MoeForCausalLM, each expert alone, by the names of BailingMoeV2ForCausalLM.

    join: makes one tensor of the rows of three.
    """
    out = {}
    for name, value in state.items():
        for own, word in _WORDS.items():
            name = name.replace(own, word)
        block, _, part = name.partition("self_attn.")
        if part == "q_proj.weight":
            rows = [state[f"{block}self_attn.{each}_proj.weight"] for each in "qkv"]
            out[block + "attention.query_key_value.weight"] = join(rows)
        elif not part:
            out[name] = value
    return out


def first_published(state: Mapping[str, Any], join: Callable[[Sequence[Any]], Any]) -> dict[str, Any]:
    """The tensors of GraniteMoeSharedForCausalLM, each expert alone, by the names of BailingMoeForCausalLM, for Ling 1.

    join: makes one tensor of the rows of three.
    """
    out = {}
    for name, value in state.items():
        found = re.match(r"model\.layers\.\d+\.", name)
        block = found[0] if found else ""
        match name.removeprefix(block):
            case "self_attn.q_proj.weight":
                rows = [state[f"{block}self_attn.{each}_proj.weight"] for each in "qkv"]
                out[block + "attention.query_key_value.weight"] = join(rows)
            case "self_attn.k_proj.weight" | "self_attn.v_proj.weight":
                continue
            case "block_sparse_moe.experts.gate_up_proj" | "block_sparse_moe.experts.down_proj" as part:
                for number, own in enumerate(value):
                    names = ("gate_proj", "up_proj") if part.endswith("up_proj") else ("down_proj",)
                    parts = own.chunk(len(names))
                    out |= {
                        f"{block}mlp.experts.{number}.{each}.weight": rows
                        for each, rows in zip(names, parts, strict=True)
                    }
            case "shared_mlp.input_linear.weight":
                halves = zip(("gate_proj", "up_proj"), value.chunk(2), strict=True)
                out |= {f"{block}mlp.shared_experts.{each}.weight": rows for each, rows in halves}
            case part:
                out[block + _FIRST_WORDS.get(part, part)] = value
    return out


def config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of Glm4MoeForCausalLM of a published one."""
    words = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
    rope = {"rope_type": "default", **{key: config[key] for key in ("rope_theta", "partial_rotary_factor")}}
    left_out = ("architectures", "rope_theta", "partial_rotary_factor", "use_qkv_bias", "score_function")
    own = {words.get(key, key): value for key, value in config.items() if key not in left_out}
    return {**own, "model_type": "glm4_moe", "attention_bias": False, "rope_parameters": rope}


def first_config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes in the configuration of GraniteMoeSharedForCausalLM of a published one of Ling 1."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    width = config["moe_intermediate_size"]
    return {
        **{name: config[name] for name in (*names, "num_experts_per_tok", "tie_word_embeddings")},
        "num_local_experts": config["num_experts"],
        "intermediate_size": width,
        "shared_intermediate_size": config["num_shared_experts"] * width,
        "pad_token_id": None,
    }
