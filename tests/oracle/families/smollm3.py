"""SmolLM3: llama whose every fourth layer has no positions.

``transformers``: SmolLM3ForCausalLM.  llama.cpp: src/models/smollm3.cpp, which knows the four by itself; SmolLM3Model
of conversion/llama.py, a LlamaModel, so that rows of q and k are permuted.
"""

from tests.oracle.families.family import Family
from tests.oracle.families.parts import attention, head_dim, keys, model, network, norms, sizes

_CONFIG = sizes(5, 80, (5, 1, 0), 112, {"rope_theta": 2e6})

CASES = [
    Family(
        "smollm3",
        "smollm3",
        "SmolLM3",
        _CONFIG,
        model(_CONFIG, [norms(_CONFIG) | attention(_CONFIG) | network(_CONFIG)] * 5),
        keys(_CONFIG, vocab_size=_CONFIG["vocab_size"], rope__dimension_count=head_dim(_CONFIG)),
        permuted=True,
    )
]
