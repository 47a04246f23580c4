"""GLM-4 of 2025: norms before and after attention and network, and rotation of a part of each head.

Layer (llama.cpp, ``src/models/glm4.cpp``)::

    a = rms_norm(x, attn_norm)
    q, k, v = a Wq + bq, a Wk + bk, a Wv + bv
    q, k = rope(q), rope(k)                             the first n_rot dimensions, pairs (2i, 2i + 1)
    x = x + rms_norm(attention(q, k, v) Wo, post_attention_norm)
    [gate, up] = b Wup,  b = rms_norm(x, ffn_norm)
    x = x + rms_norm(swiglu(gate, up) Wdown, post_ffw_norm)
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig, Norms
from engine.models.metadata import Metadata

NORMS = Norms(after_mixer="post_attention_norm", after_network="post_ffw_norm")


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    if m.has("rope.dimension_sections"):
        m.unsupported("glm4 models with vision, which rotate by several positions, are not supported.")
    rope = m.rope(neox=False)
    return m.model(lambda il: LayerConfig(m.attention(il, rope), m.dense(il), NORMS))


ARCHITECTURES = (Architecture("glm4", "GLM-4 0414 9B and 32B, GLM-Z1", read, "transformers Glm4ForCausalLM"),)
