"""A checkpoint of Ling 2.0 in its published words, from that of the class of ``transformers`` that computes the same."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_WORDS = {
    "model.embed_tokens": "model.word_embeddings",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "self_attn.o_proj": "attention.dense",
    "gate.e_score_correction_bias": "gate.expert_bias",
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


def config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of Glm4MoeForCausalLM of a published one."""
    words = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
    rope = {"rope_type": "default", **{key: config[key] for key in ("rope_theta", "partial_rotary_factor")}}
    left_out = ("architectures", "rope_theta", "partial_rotary_factor", "use_qkv_bias", "score_function")
    own = {words.get(key, key): value for key, value in config.items() if key not in left_out}
    return {**own, "model_type": "glm4_moe", "attention_bias": False, "rope_parameters": rope}
