"""EXAONE 4: norms after the branches and of each head of q and k; layers without positions.

``transformers``: Exaone4ForCausalLM.  llama.cpp: src/models/exaone4.cpp; Exaone4Model of conversion/exaone.py.

Where there is a window (the 32B model), three of four layers slide, and only these are rotated; where there is none
(1.2B), all are.  llama.cpp looks at the keys of the window in models of 64 layers only; the keys of these small models
say the same.
"""

from typing import Any

from tests.oracle.families.family import Family
from tests.oracle.families.parts import LLAMA3, attention, head_dim, keys, model, network, norms, sizes
from tests.oracle.shared import llama3_factors

_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_NAMES = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_KINDS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


def _family(name: str, config: dict[str, Any], **more: Any) -> Family:
    parts = norms(config, *_AFTER) | attention(config, norm="head") | network(config)
    weights = model(config, [parts] * config["num_hidden_layers"])
    rope = config["rope_parameters"]
    extra = {"rope_freqs.weight": llama3_factors(rope, rope["rope_theta"], head_dim(config))}
    metadata = keys(config, vocab_size=config["vocab_size"], **more)
    return Family(name, "exaone4", "Exaone4", config, weights, metadata, names=_NAMES, extra=extra)


_ROPE = LLAMA3 | {"rope_theta": 1e4}

CASES = [
    _family(
        "exaone4",
        sizes(
            5, 72, (6, 2, 0), 104, _ROPE, tie_word_embeddings=False, sliding_window=24, sliding_window_pattern=4,
            layer_types=_KINDS,
        ),
        attention__sliding_window=24,
        attention__sliding_window_pattern=[kind == "sliding_attention" for kind in _KINDS],
    ),
    _family(
        "exaone4-full",
        sizes(3, 80, (5, 1, 0), 112, _ROPE, sliding_window=None, layer_types=["full_attention"] * 3),
    ),
]  # fmt: skip
