"""Seed-OSS: biases of q, k and v, heads that do not add up to the width, and a norm before the network by another name.

``transformers``: SeedOssForCausalLM.  llama.cpp: src/models/seed-oss.cpp; SeedOssModel of conversion/olmo.py.
``post_attention_norm`` is the norm before the network.
"""

from tests.oracle.families.family import Family
from tests.oracle.families.parts import attention, keys, model, network, norms, sizes

_CONFIG = sizes(
    3,
    72,
    (6, 2, 20),
    104,
    {"rope_theta": 1e5},
    tie_word_embeddings=False,
    attention_bias=True,
    attention_out_bias=False,
)

CASES = [
    Family(
        "seed_oss",
        "seed_oss",
        "SeedOss",
        _CONFIG,
        model(_CONFIG, [norms(_CONFIG) | attention(_CONFIG, bias=True) | network(_CONFIG)] * 3),
        keys(_CONFIG),
        names={"post_attention_layernorm": "post_attention_norm"},
    )
]
