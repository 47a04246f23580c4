"""MiniMax M2: a mixture with a sigmoid router, and a norm over all heads of queries and keys.

Layer (llama.cpp, ``src/models/minimax-m2.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = rms_norm(a Wq), rms_norm(a Wk), a Wv      over whole rows
    q, k = rope(q), rope(k)                             per head, the first n_rot dimensions
    x = x + attention(q, k, v) Wo
    x = x + experts(rms_norm(x, ffn_norm))

Experts are chosen by p + exp_probs_b, where p is the sigmoid of the router's logits.  They are weighted by p, normalized over
the chosen ones.
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope, experts = m.rope(), m.experts("sigmoid")
    return m.model(lambda il: LayerConfig(m.attention(il, rope, norm="rows"), experts))


ARCHITECTURES = (Architecture("minimax-m2", "MiniMax M2 and M2.1", read, "transformers MiniMaxM2ForCausalLM"),)
