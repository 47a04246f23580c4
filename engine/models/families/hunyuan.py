"""Hunyuan, dense and as a mixture: queries and keys are normalized after their rotation.

Layer (llama.cpp, ``src/models/hunyuan-moe.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = a Wq, a Wk, a Wv
    q, k = rms_norm(rope(q)), rms_norm(rope(k))         per head
    x = x + attention(q, k, v) Wo
    x = x + swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(x, ffn_norm); in mixtures, experts(b) + shared(b)
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope = m.rope()

    def layer(il: int) -> LayerConfig:
        attention = m.attention(il, rope, norm="rotated heads")
        if not m.mixture:
            return LayerConfig(attention, m.dense(il))
        n_ff = m.counts("feed_forward_length")[il]
        shared = m.integer("expert_shared_feed_forward_length", n_ff)
        return LayerConfig(attention, m.experts(n_ff=n_ff, n_ff_shared=shared, shared_gated=False))

    return m.model(layer)


ARCHITECTURES = (
    Architecture("hunyuan-dense", "Hunyuan 0.5B to 7B", read, "transformers HunYuanDenseV1ForCausalLM"),
    Architecture("hunyuan-moe", "Hunyuan A13B", read, "transformers HunYuanMoEV1ForCausalLM"),
)
