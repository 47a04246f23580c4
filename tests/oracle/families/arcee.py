"""AFM (Arcee): llama with a network without a gate, down(relu(up)^2), and YaRN.

``transformers``: ArceeForCausalLM.  llama.cpp: src/models/arcee.cpp; ArceeModel of conversion/llama.py, a LlamaModel,
so that rows of q and k are permuted.
"""

from tests.oracle.families.family import Family
from tests.oracle.families.parts import attention, keys, model, network, norms, sizes

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_CONFIG = sizes(3, 80, (5, 1, 16), 136, _YARN, tie_word_embeddings=False)

CASES = [
    Family(
        "arcee",
        "arcee",
        "Arcee",
        _CONFIG,
        model(_CONFIG, [norms(_CONFIG) | attention(_CONFIG) | network(_CONFIG, gate=False)] * 3),
        keys(_CONFIG, vocab_size=_CONFIG["vocab_size"], rope__dimension_count=16),
        permuted=True,
    )
]
