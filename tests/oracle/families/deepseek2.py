"""DeepSeek-V2 and its relatives: latent attention, and mixtures with a shared network behind a dense layer.

``transformers``: DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeLiteForCausalLM, Mistral4ForCausalLM.
llama.cpp: src/models/deepseek2.cpp; DeepseekV2Model of conversion/deepseek.py, Glm4MoeLiteModel of conversion/glm.py.

``kv_b_proj`` has for each head nope rows of k, which become columns of ``attn_k_b``, and then those of ``attn_v_b``; older
conversions keep it as ``attn_kv_b``, with as many KV heads as heads.  ``rope.scaling.yarn_log_multiplier`` is a tenth of
mscale_all_dim.  V2 takes the best expert of a group, V3 adds the best two.

Queries of Mistral4 are multiplied by 1 + s ln(1 + floor(p / n)), s ``llama_4_scaling_beta`` and n the original context of
YaRN.

The norms of latents have an epsilon of 1e-6 in ``transformers``, whatever the configuration says, and that of the
configuration in llama.cpp and vLLM; here it is 1e-6 everywhere, as in the published models of DeepSeek.

V2 has no norm_topk_prob that its router would read, and V3's conversion drops the layers that draft; only GLM's has one: a
mixture with an MTP layer's embedding and output of its own, or without.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.oracle.families.family import Family, Shapes, Weights
from tests.oracle.families.glm4moe import _NAMES as _GLM
from tests.oracle.families.parts import experts, keys, model, network, norms, sizes
from tests.oracle.shared import N_VOCAB

_NAMES = _GLM | {
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}


def _converter(config: dict[str, Any], *, split: bool) -> Callable[[str, np.ndarray], Weights]:
    n_head, nope = config["num_attention_heads"], config["qk_nope_head_dim"]

    def convert(part: str, weight: np.ndarray) -> Weights:
        if split and part == "self_attn.kv_b_proj.weight":
            heads = weight.reshape(n_head, -1, weight.shape[1])
            k, v = heads[:, :nope].swapaxes(1, 2), heads[:, nope:]
            return {"self_attn.k_b_proj.weight": np.ascontiguousarray(k), "self_attn.v_b_proj.weight": v}
        return {part.replace("gate.e_score_correction_bias", "gate.correction.bias"): weight}

    return convert


def _attention(config: dict[str, Any]) -> Shapes:
    e, n_head, r = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, v = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    q_rank, q = config["q_lora_rank"], n_head * (nope + rope)
    parts: Shapes = {"self_attn.q_proj.weight": (q, e)}
    if q_rank:
        parts = {
            "self_attn.q_a_proj.weight": (q_rank, e),
            "self_attn.q_a_layernorm.weight": (q_rank,),
            "self_attn.q_b_proj.weight": (q, q_rank),
        }
    return parts | {
        "self_attn.kv_a_proj_with_mqa.weight": (r + rope, e),
        "self_attn.kv_a_layernorm.weight": (r,),
        "self_attn.kv_b_proj.weight": (n_head * (nope + v), r),
        "self_attn.o_proj.weight": (e, n_head * v),
    }


def _mtp(config: dict[str, Any], own_head: bool) -> Shapes:
    e = config["hidden_size"]
    parts = norms(config, "enorm", "hnorm", "shared_head.norm") | {"eh_proj.weight": (e, 2 * e)}
    if own_head:
        parts |= {"embed_tokens.weight": (N_VOCAB, e), "shared_head.head.weight": (N_VOCAB, e)}
    return parts


_SIGMOID = ("DeepseekV3", "Glm4MoeLite", "DeepseekV32", "GlmMoeDsa")


def family(
    name: str, kind: str, config: dict[str, Any], *, old: bool = False, n_mtp: int = 0, own_head: bool = False,
    architecture: str = "deepseek2",
) -> Family:  # fmt: skip
    n, f, sigmoid = config["n_routed_experts"], config["moe_intermediate_size"], kind in _SIGMOID
    common = norms(config) | _attention(config)
    mixture = experts(config, n, f) | network(config, f * config["n_shared_experts"], "mlp.shared_experts")
    if sigmoid:
        mixture |= {"mlp.gate.e_score_correction_bias": (n,)}
    n_layer, n_dense = config["num_hidden_layers"], config.get("first_k_dense_replace", 1)
    layers = [common | (network(config) if il < n_dense else mixture) for il in range(n_layer)]
    layers += [common | mixture | _mtp(config, own_head)] * n_mtp
    nope, rope, v = (config[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
    r, rotation = config["kv_lora_rank"], config["rope_parameters"]
    metadata = keys(
        {key: value for key, value in config.items() if key != "head_dim"},
        block_count=n_layer + n_mtp,
        attention__kv_lora_rank=r,
        rope__dimension_count=rope,
        expert_count=n,
        expert_used_count=config["num_experts_per_tok"],
        expert_group_count=config["n_group"],
        expert_group_used_count=config["topk_group"],
        expert_feed_forward_length=f,
        expert_shared_count=config["n_shared_experts"],
        leading_dense_block_count=n_dense,
        expert_weights_scale=config["routed_scaling_factor"],
    )
    if old:
        metadata |= {"attention.key_length": nope + rope, "attention.value_length": v}
    else:
        metadata |= {"attention.head_count_kv": 1, "attention.key_length": r + rope, "attention.value_length": r}
        metadata |= {"attention.key_length_mla": nope + rope, "attention.value_length_mla": v}
    if config["q_lora_rank"]:
        metadata["attention.q_lora_rank"] = config["q_lora_rank"]
    if config["norm_topk_prob"]:
        metadata["expert_weights_norm"] = True
    if sigmoid:
        metadata["expert_gating_func"] = 2
    if "mscale_all_dim" in rotation:
        metadata["rope.scaling.yarn_log_multiplier"] = 0.1 * rotation["mscale_all_dim"]
    if "llama_4_scaling_beta" in rotation:
        metadata["attention.temperature_scale"] = rotation["llama_4_scaling_beta"]
        metadata["attention.temperature_length"] = rotation["original_max_position_embeddings"]
    if n_mtp:
        metadata["nextn_predict_layers"] = n_mtp
    every, convert = model(config, layers), _converter(config, split=not old)
    return Family(name, architecture, kind, config, every, metadata, _NAMES, convert=convert, n_mtp=n_mtp)


def config_of(
    n_layer: int, n_embd: int, n_head: int, latent: tuple[int, int], head: tuple[int, int, int], **more: Any
) -> dict[str, Any]:
    """latent: its rank and that of the queries, 0 for none; head: nope, rope, v."""
    rope = more.pop("rope", {"rope_theta": 1e4})
    return sizes(
        n_layer, n_embd, (n_head, n_head, 0), 96, rope, kv_lora_rank=latent[0], q_lora_rank=latent[1] or None,
        qk_nope_head_dim=head[0], qk_rope_head_dim=head[1], v_head_dim=head[2], attention_bias=False, rms_norm_eps=1e-6,
        **more,
    )  # fmt: skip


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
_V2_LITE = config_of(
    3, 72, 3, (64, 0), (32, 16, 32), head_dim=16, rope=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    first_k_dense_replace=1, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=2,
    n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=False, topk_method="greedy",
    tie_word_embeddings=False,
)  # fmt: skip

CASES = [
    family("deepseek2", "DeepseekV2", _V2_LITE),
    family("deepseek2-joined", "DeepseekV2", _V2_LITE, old=True),
    family(
        "deepseek2-groups", "DeepseekV2",
        config_of(
            2, 64, 4, (32, 48), (16, 8, 24), head_dim=8, first_k_dense_replace=1, n_routed_experts=12,
            num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=1, n_group=4, topk_group=2,
            routed_scaling_factor=16.0, norm_topk_prob=False, topk_method="group_limited_greedy",
            tie_word_embeddings=True,
        ),
    ),
    family(
        "deepseek2-v3", "DeepseekV3",
        config_of(
            3, 80, 5, (64, 32), (32, 16, 32), rope=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            first_k_dense_replace=2, n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=32,
            n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
            tie_word_embeddings=False, num_mtp_layers=0,
        ),
    ),
    family(
        "deepseek2-glm", "Glm4MoeLite",
        config_of(
            2, 96, 4, (64, 96), (64, 32, 32), n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=64,
            n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=1.8, norm_topk_prob=True,
            tie_word_embeddings=False,
        ),
        n_mtp=1,
    ),
    family(
        "deepseek2-temperature", "Mistral4",
        config_of(
            3, 88, 4, (48, 40), (24, 16, 32),
            rope=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
            first_k_dense_replace=1, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
            n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=1.0, norm_topk_prob=True,
            tie_word_embeddings=False,
        ),
        architecture="mistral4",
    ),
]  # fmt: skip
"""V2-Lite, from a recent file and from an older one; V2 with groups; V3 with groups; GLM-4.7-Flash with its layer that
drafts; Mistral 4, whose queries grow with the position, as those of Mistral Large 3, a deepseek2 model, do."""
