"""SmolLM 3: Llama in which every fourth layer does not rotate queries and keys (Yang et al. 2025).

Layer (llama.cpp, ``src/models/smollm3.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = a Wq, a Wk, a Wv
    q, k = rope(q), rope(k)                             except in layers 3, 7, 11, ...
    x = x + attention(q, k, v) Wo
    x = x + swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(x, ffn_norm)
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import Metadata

INTERVAL = 4
"""The last of every INTERVAL layers has no rotation."""


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope = m.rope(neox=False)
    return m.model(lambda il: LayerConfig(m.attention(il, rope if (il + 1) % INTERVAL else None), m.dense(il)))


ARCHITECTURES = (Architecture("smollm3", "SmolLM 3", read, "transformers SmolLM3ForCausalLM"),)
