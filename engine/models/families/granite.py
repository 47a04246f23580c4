"""Granite 3 and 4 without recurrent layers, dense and as a mixture: Llama with four factors.

Layer (llama.cpp, ``src/models/granite.cpp``)::

    x = embed(tokens) * embedding_scale                          before the first layer
    a = rms_norm(x, attn_norm)
    q, k, v = rope(a Wq), rope(a Wk), a Wv                       no rotation if the file says so
    x = x + residual_scale * attention(q, k, v) Wo               scores are multiplied by attention.scale
    x = x + residual_scale * swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(x, ffn_norm); in granitemoe, experts(b)
    logits = rms_norm(x, output_norm) Whead / logit_scale        after the last layer
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope = m.rope(neox=False) if m.flag("rope.scaling.finetuned", True) else None
    scale = m.number("attention.scale", 0.0) or 1.0 / m.d_k**0.5
    n_ff_shared = m.integer("expert_shared_feed_forward_length", 0, 0)

    def layer(il: int) -> LayerConfig:
        attention = m.attention(il, rope, scale=scale)
        if not m.mixture:
            return LayerConfig(attention, m.dense(il))
        n_ff = m.counts("feed_forward_length")[il]
        return LayerConfig(attention, m.experts(n_ff=n_ff, n_ff_shared=n_ff_shared, shared_gated=False))

    return m.model(
        layer,
        embedding_scale=m.number("embedding_scale", 0.0) or 1.0,
        residual_scale=m.number("residual_scale", 0.0) or 1.0,
        logit_scale=1.0 / (m.number("logit_scale", 0.0) or 1.0),
    )


ARCHITECTURES = (
    Architecture("granite", "Granite 3 and 4, dense", read, "transformers GraniteForCausalLM"),
    Architecture("granitemoe", "Granite 3 mixtures", read, "transformers GraniteMoeForCausalLM"),
)
