"""DeepSeek-V3.2, GLM-5 and 5.2: DeepSeek-V3 whose attention reads what an indexer chooses.

``transformers``: DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM.  llama.cpp: src/models/deepseek32.cpp, src/models/glm-dsa.cpp;
DeepseekV32Model of conversion/deepseek.py, GlmMoeDsaModel of conversion/glm.py.

The indexer of V3.2 rotates halves of its first elements, that of GLM-5 pairs of neighbours.  ``transformers`` leaves out the
Hadamard matrix and the FP8 of DeepSeek's own code.  Its norm of keys has an epsilon of 1e-6, whatever the configuration says.
"""

from dataclasses import replace
from typing import Any

from tests.oracle.families.deepseek2 import YARN, config_of, family
from tests.oracle.families.family import Family, Shapes

_NAMES = {
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}


def _indexer(config: dict[str, Any]) -> Shapes:
    n, d, e = config["index_n_heads"], config["index_head_dim"], config["hidden_size"]
    return {
        "self_attn.indexer.wq_b.weight": (n * d, config["q_lora_rank"]),
        "self_attn.indexer.wk.weight": (d, e),
        "self_attn.indexer.k_norm.weight": (d,),
        "self_attn.indexer.k_norm.bias": (d,),
        "self_attn.indexer.weights_proj.weight": (n, e),
    }


def _indexed(name: str, architecture: str, kind: str, config: dict[str, Any]) -> Family:
    plain = family(name, kind, config, n_mtp=1, architecture=architecture)
    weights: Shapes = {}
    n_layer = config["num_hidden_layers"]
    types = config.get("indexer_types", ["full"] * n_layer)
    for il in [*(il for il, kind in enumerate(types) if kind == "full"), n_layer]:
        weights |= {f"model.layers.{il}.{part}": shape for part, shape in _indexer(config).items()}
    metadata = {
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
    }
    if "indexer_types" in config:
        metadata["attention.indexer.types"] = [kind == "full" for kind in types]
    return replace(
        plain,
        weights={**plain.weights, **weights},
        metadata={**plain.metadata, **metadata},
        names={**plain.names, **_NAMES},
    )


CASES = [
    _indexed(
        "deepseek32", "deepseek32", "DeepseekV32",
        config_of(
            3, 80, 5, (64, 32), (32, 16, 32), rope=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
            first_k_dense_replace=1, n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=32,
            n_shared_experts=1, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
            tie_word_embeddings=False, index_n_heads=9, index_head_dim=32, index_topk=20,
        ),
    ),
    _indexed(
        "glm-dsa", "glm-dsa", "GlmMoeDsa",
        config_of(
            3, 96, 4, (64, 96), (48, 32, 40), n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=64,
            first_k_dense_replace=1, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.5,
            norm_topk_prob=True, tie_word_embeddings=False, index_n_heads=10, index_head_dim=48, index_topk=70,
        ),
    ),
    _indexed(
        "glm-dsa-shared", "glm-dsa", "GlmMoeDsa",
        config_of(
            5, 64, 3, (32, 48), (32, 16, 32), n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=32,
            first_k_dense_replace=2, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=1.5,
            norm_topk_prob=True, tie_word_embeddings=False, index_n_heads=9, index_head_dim=24, index_topk=17,
            indexer_types=["full", "shared", "full", "shared", "shared"],
        ),
    ),
]  # fmt: skip
"""V3.2 and GLM-5 with their layers that draft; the second one chooses more positions than a chunk has.  Layers of the third
one, as of GLM-5.2, share the choice of an earlier one."""
