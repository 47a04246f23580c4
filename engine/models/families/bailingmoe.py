"""Ling and Ring 1 and 1.5: a mixture with a shared network in every layer.

Layer (llama.cpp, ``src/models/bailingmoe.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = rope(a Wq), rope(a Wk), a Wv          pairs (2i, 2i + 1)
    x = x + attention(q, k, v) Wo
    x = x + experts(b) + swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(x, ffn_norm)

Heads have ``rope.dimension_count`` elements, all of which are rotated.  Experts are weighted by the softmax of the router's
logits, normalized over the chosen ones if the file says so.  If there are leading dense layers, their network is SwiGLU.
"""

from dataclasses import replace

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import MAX_LAYERS, Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    d = m.width("rope.dimension_count", m.d_k)
    rope, dense = m.rope(d, neox=False), m.integer("leading_dense_block_count", 0, 0, MAX_LAYERS)
    experts = m.with_shared(m.experts(normalized=False, shared_gated=False))

    def layer(il: int) -> LayerConfig:
        attention = replace(m.attention(il, rope, scale=1.0 / d**0.5), d_k=d, d_v=d)
        return LayerConfig(attention, m.dense(il) if il < dense else experts)

    return m.model(layer)


ARCHITECTURES = (
    Architecture(
        "bailingmoe",
        "Ling and Ring 1 and 1.5",
        read,
        "transformers GraniteMoeSharedForCausalLM, whose layer is the same",
    ),
)
