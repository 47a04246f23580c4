"""Mistral 3 (Ministral 3, Devstral 2): llama whose queries grow with the position.

``transformers``: Ministral3ForCausalLM.  llama.cpp: src/models/mistral3.cpp; Mistral3Model of conversion/mistral3.py,
in effect a LlamaModel, so that rows of q and k are permuted.

A query at position p is multiplied, after its rotation, by 1 + s ln(1 + floor(p / n)); s is
``attention.temperature_scale`` and n the original context of YaRN.  YaRN's corners are in the file (``yarn_beta_fast``,
``yarn_beta_slow``), and its magnitude is m(1) / m(M) with m(x) = 1 + 0.1 x ln(factor) and M = ``yarn_log_multiplier``:
1 in published models.  llama.cpp takes the numerator to be m(1); ``transformers`` has ``mscale`` in its place, which is
1 here, too.
"""

from typing import Any

from tests.oracle.families.family import Family
from tests.oracle.families.parts import attention, keys, model, network, norms, sizes


def _rope(**more: Any) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
        **more,
    }


def _family(name: str, config: dict[str, Any]) -> Family:
    rope = config["rope_parameters"]
    metadata = keys(
        config,
        vocab_size=config["vocab_size"],
        rope__dimension_count=config["head_dim"],
        rope__scaling__yarn_log_multiplier=rope["mscale_all_dim"],
        attention__temperature_scale=rope["llama_4_scaling_beta"],
    )
    weights = model(config, [norms(config) | attention(config) | network(config)] * config["num_hidden_layers"])
    return Family(name, "mistral3", "Ministral3", config, weights, metadata, permuted=True)


CASES = [
    _family("mistral3", sizes(3, 80, (5, 1, 32), 112, _rope(), tie_word_embeddings=False)),
    # Other corners and another magnitude, and queries that grow twice as fast.
    _family(
        "mistral3-corners",
        sizes(
            2, 72, (6, 2, 20), 104, _rope(beta_fast=8.0, beta_slow=2.0, mscale_all_dim=0.5, llama_4_scaling_beta=0.2)
        ),
    ),
]
