"""The text models of Qwen2.5-VL and Qwen3-VL: qwen2, qwen3 and qwen3moe with further keys.

``transformers``: Qwen2_5_VLTextModel, Qwen3VLTextModel, Qwen3VLMoeTextModel, with an output matrix.  llama.cpp:
src/models/qwen2vl.cpp, qwen3vl.cpp, qwen3vlmoe.cpp; conversion/qwenvl.py and qwen3vl.py.

``rope.dimension_sections`` says which coordinate (time, height, width) rotates a pair; they are equal in text.  In
``transformers``, pairs that no section counts rotate by the time, as the last ones of all published Qwen3-VL.  Images
would add to the outputs of the first ``n_deepstack_layers`` layers; text does not.
"""

from typing import Any

from tests.oracle.families.family import Family
from tests.oracle.families.parts import attention, experts, keys, model, network, norms, sizes


def _family(architecture: str, kind: str, config: dict[str, Any], **more: Any) -> Family:
    inner = network(config)
    norm = "" if architecture == "qwen2vl" else "head"
    sections = config["rope_parameters"]["mrope_section"]
    metadata = keys(config, rope__dimension_sections=[*sections, 0], **more)
    if "num_experts" in config:
        n, f = config["num_experts"], config["moe_intermediate_size"]
        inner = experts(config, n, f)
        metadata |= {
            "expert_count": n,
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": f,
        }
    layer = norms(config) | attention(config, bias=not norm, norm=norm) | inner
    weights = model(config, [layer] * config["num_hidden_layers"])
    return Family(architecture, architecture, kind, config, weights, metadata)


_MIXTURE = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True}

CASES = [
    _family("qwen2vl", "Qwen2_5_VLText", sizes(3, 80, (5, 1, 0), 112, {"rope_theta": 1e5, "mrope_section": [2, 3, 3]})),
    _family(
        "qwen3vl",
        "Qwen3VLText",
        sizes(3, 72, (6, 2, 32), 104, {"rope_theta": 1e5, "mrope_section": [8, 4, 4]}, tie_word_embeddings=False),
        n_deepstack_layers=3,
    ),
    _family(
        "qwen3vlmoe",
        "Qwen3VLMoeText",
        sizes(2, 80, (5, 1, 24), 112, {"rope_theta": 1e6, "mrope_section": [4, 4, 4]}, **_MIXTURE),
        n_deepstack_layers=3,
    ),
]
