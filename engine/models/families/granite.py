"""Granite 3 and 4, dense and as a mixture: Llama with four factors; in granitehybrid, most layers are Mamba-2.

Layer (llama.cpp, ``src/models/granite.cpp``)::

    x = embed(tokens) * embedding_scale                          before the first layer
    a = rms_norm(x, attn_norm)
    q, k, v = rope(a Wq), rope(a Wk), a Wv                       no rotation if the file says so
    x = x + residual_scale * attention(q, k, v) Wo               scores are multiplied by attention.scale
    x = x + residual_scale * mamba(a)                            layers of granitehybrid without heads of keys
    x = x + residual_scale * swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(x, ffn_norm); in granitemoe, experts(b)
    logits = rms_norm(x, output_norm) Whead / logit_scale        after the last layer

The formula of Mamba-2 is in ``engine/models/mamba.py``.
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.mamba_config import read_mamba
from engine.models.metadata import Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope = m.rope(neox=False) if m.flag("rope.scaling.finetuned", True) else None
    scale = m.number("attention.scale", 0.0) or 1.0 / m.d_k**0.5
    n_ff_shared = m.integer("expert_shared_feed_forward_length", 0, 0)

    hybrid = m.architecture == "granitehybrid"
    n_head_kv = m.counts("attention.head_count_kv", None if hybrid else 1, 0)

    def layer(il: int) -> LayerConfig:
        mixer = read_mamba(m) if hybrid and not n_head_kv[il] else m.attention(il, rope, scale=scale)
        if not m.mixture:
            return LayerConfig(mixer, m.dense(il))
        n_ff = m.counts("feed_forward_length")[il]
        return LayerConfig(mixer, m.experts(n_ff=n_ff, n_ff_shared=n_ff_shared, shared_gated=False))

    return m.model(
        layer,
        embedding_scale=m.number("embedding_scale", 0.0) or 1.0,
        residual_scale=m.number("residual_scale", 0.0) or 1.0,
        logit_scale=1.0 / (m.number("logit_scale", 0.0) or 1.0),
    )


ARCHITECTURES = (
    Architecture("granite", "Granite 3 and 4, dense", read, "transformers GraniteForCausalLM"),
    Architecture("granitemoe", "Granite 3 mixtures", read, "transformers GraniteMoeForCausalLM"),
    Architecture("granitehybrid", "Granite 4 H, dense and mixtures", read, "transformers GraniteMoeHybridForCausalLM"),
)
