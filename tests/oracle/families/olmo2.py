"""OLMo 2 and 3: norms after the branches, and of q and k over all heads together.

``transformers``: Olmo2ForCausalLM, Olmo3ForCausalLM.  llama.cpp: src/models/olmo2.cpp for both; Olmo2Model of
conversion/olmo.py.

There is no norm before attention or the network; ``post_attention_norm`` and ``post_ffw_norm`` are of what is added.
OLMo 3 slides in three of four layers; these are rotated without YaRN, the others with it.  The file has YaRN's
magnitude as ``yarn_attn_factor``, which llama.cpp does not read for this architecture: it is 1 + 0.1 ln(factor), the
default.
"""

import math
from typing import Any

from tests.oracle.families.family import Family
from tests.oracle.families.parts import attention, keys, model, network, norms, sizes

_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_NAMES = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_ROPE = {
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 1 + 0.1 * math.log(4),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _family(name: str, kind: str, config: dict[str, Any], **more: Any) -> Family:
    parts = norms(config, *_AFTER) | attention(config, norm="all") | network(config)
    weights = model(config, [parts] * config["num_hidden_layers"])
    return Family(name, "olmo2", kind, config, weights, keys(config, **more), names=_NAMES)


CASES = [
    _family("olmo2", "Olmo2", sizes(3, 80, (5, 1, 0), 112, {"rope_theta": 5e5}, tie_word_embeddings=False)),
    _family(
        "olmo3",
        "Olmo3",
        sizes(5, 72, (6, 2, 0), 104, _ROPE, tie_word_embeddings=False, sliding_window=24, layer_types=_KINDS),
        attention__sliding_window=24,
        attention__sliding_window_pattern=[kind == "sliding_attention" for kind in _KINDS],
    ),
]
