"""GLM-4 of 2025: norms before and after attention and network, rotated neighbours in half of each head, biases, fused gate
and up.

``transformers``: Glm4ForCausalLM, which rotates neighbours, so that no rows are permuted.  llama.cpp: src/models/glm4.cpp;
Glm4Model of conversion/glm.py.
"""

from tests.oracle.families.family import Family
from tests.oracle.families.parts import attention, keys, model, norms, sizes

_CONFIG = sizes(
    3, 80, (6, 2, 20), 112, {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, tie_word_embeddings=False,
    attention_bias=True, partial_rotary_factor=0.5,
)  # fmt: skip
_NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_LAYER = norms(_CONFIG, *_NORMS) | attention(_CONFIG, bias=True) | {
    "mlp.gate_up_proj.weight": (2 * 112, 80),
    "mlp.down_proj.weight": (80, 112),
}  # fmt: skip
_NAMES = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
}

CASES = [
    Family(
        "glm4",
        "glm4",
        "Glm4",
        _CONFIG,
        model(_CONFIG, [_LAYER] * 3),
        keys(_CONFIG, rope__dimension_count=10),
        _NAMES,
    )
]
