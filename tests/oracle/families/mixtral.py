"""Mixtral: llama with a mixture in every layer.

``transformers``: MixtralForCausalLM.  llama.cpp: src/models/llama.cpp; LlamaModel of conversion/llama.py, which permutes
rows of q and k.  The experts' weights are a softmax over the chosen ones; their width is ``feed_forward_length``.
"""

from tests.oracle.families.family import Family
from tests.oracle.families.parts import attention, experts, keys, model, norms, sizes

_CONFIG = sizes(
    3, 80, (5, 1, 16), 56, {"rope_theta": 1e5}, tie_word_embeddings=False, num_local_experts=7, num_experts_per_tok=3
)
_LAYER = norms(_CONFIG) | attention(_CONFIG) | experts(_CONFIG, 7, 56)

CASES = [
    Family(
        "mixtral",
        "llama",
        "Mixtral",
        _CONFIG,
        model(_CONFIG, [_LAYER] * 3),
        keys(_CONFIG, vocab_size=_CONFIG["vocab_size"], rope__dimension_count=16, expert_count=7, expert_used_count=3),
        permuted=True,
    )
]
