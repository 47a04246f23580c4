"""Ling and Ring 1 and 1.5: mixtures with a softmax over the chosen experts, and a shared network as wide as two of them.

``transformers`` has no class of this name.  Its GraniteMoeSharedForCausalLM, with factors of 1 and the usual scale of scores,
is the same function of other names.  llama.cpp: src/models/bailingmoe.cpp; BailingMoeModel of conversion/bailingmoe.py, which
permutes the rows of q and k.
"""

from tests.oracle.families.family import Family
from tests.oracle.families.granite import _NAMES, _mixture, _split
from tests.oracle.families.parts import attention, keys, model, norms, sizes

_CONFIG = sizes(
    3, 72, (6, 2, 16), 40, {"rope_theta": 6e5}, rms_norm_eps=1e-6, tie_word_embeddings=False, attention_bias=False,
    attention_multiplier=0.25, embedding_multiplier=1.0, residual_multiplier=1.0, logits_scaling=1.0, num_local_experts=7,
    num_experts_per_tok=3, shared_intermediate_size=80,
)  # fmt: skip
_METADATA = keys(
    _CONFIG,
    expert_count=7,
    expert_used_count=3,
    expert_feed_forward_length=40,
    expert_shared_count=2,
    expert_weights_scale=1.0,
    expert_weights_norm=True,
    leading_dense_block_count=0,
    rope__dimension_count=16,
)
for _name in ("attention.key_length", "attention.value_length"):
    del _METADATA[_name]  # heads are as long as the rotation, whether or not a file has these


CASES = [
    # Heads that do not add up to the width, as in Ling-plus: only the rotation says how long they are.
    Family(
        "bailingmoe",
        "bailingmoe",
        "GraniteMoeShared",
        _CONFIG,
        model(_CONFIG, [norms(_CONFIG) | attention(_CONFIG) | _mixture(_CONFIG)] * 3),
        _METADATA,
        _NAMES,
        permuted=True,
        convert=_split,
    )
]
