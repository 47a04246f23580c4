"""dots.llm1: a mixture with a sigmoid router and shared experts, and normalized heads of queries and keys.

Layer (llama.cpp, ``src/models/dots1.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = a Wq, a Wk, a Wv
    q, k = rope(rms_norm(q)), rope(rms_norm(k)) per head
    x = x + attention(q, k, v) Wo
    x = x + network(b),  b = rms_norm(x, ffn_norm)

The first layers have a SwiGLU network.  In the others, experts are chosen by p + exp_probs_b, where p = sigmoid(b Wrouter).
They are weighted by p, normalized over the chosen ones, times expert_weights_scale.  The output of the shared network is
added.
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import MAX_LAYERS, Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope, dense = m.rope(), m.integer("leading_dense_block_count", 0, 0, MAX_LAYERS)
    experts = m.with_shared(m.experts("sigmoid", normalized=False, shared_gated=False))

    def layer(il: int) -> LayerConfig:
        return LayerConfig(m.attention(il, rope, norm="heads"), m.dense(il) if il < dense else experts)

    return m.model(layer)


ARCHITECTURES = (Architecture("dots1", "dots.llm1", read, "transformers Dots1ForCausalLM"),)
