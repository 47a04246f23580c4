"""LFM2 of Liquid AI, dense and as a mixture: short convolutions, with attention in some layers.

Layer (llama.cpp, ``src/models/lfm2.cpp``)::

    a = rms_norm(x, attn_norm)
    convolution:  b, c, x' = a Win                       layers without heads of keys (attention.head_count_kv)
                  y = x + (c * conv(b * x')) Wout        over the latest shortconv.l_cache tokens, for each channel
    attention:    q, k, v = rope(rms_norm(a Wq)), rope(rms_norm(a Wk)), a Wv            norms per head
                  y = x + attention(q, k, v) Wo
    x = y + network(rms_norm(y, ffn_norm))               SwiGLU; in lfm2moe, experts after the leading dense layers

The norm before the logits is called token_embd_norm.  Experts are chosen by p + exp_probs_b, where p is the sigmoid of the
router's logits.  They are weighted by p, normalized over the chosen ones.
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import MAX_CONTEXT, MAX_LAYERS, Metadata
from engine.models.short_conv_config import ShortConvConfig


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope, n_head_kv = m.rope(), m.counts("attention.head_count_kv", None, 0)
    window = m.integer("attention.sliding_window", 0, 0, MAX_CONTEXT)
    convolution = ShortConvConfig(m.n_embd, m.integer("shortconv.l_cache", None, 2, 8))
    dense = m.integer("leading_dense_block_count", 0, 0, MAX_LAYERS) if m.mixture else m.n_layer

    def layer(il: int) -> LayerConfig:
        network = m.dense(il) if il < dense else m.experts("sigmoid")
        if not n_head_kv[il]:
            return LayerConfig(convolution, network)
        return LayerConfig(m.attention(il, rope, norm="heads", window=window), network)

    return m.model(layer, output_norm="token_embd_norm")


ARCHITECTURES = (
    Architecture("lfm2", "LFM2 and LFM2.5, dense", read, "transformers Lfm2ForCausalLM"),
    Architecture("lfm2moe", "LFM2 and LFM2.5 mixtures", read, "transformers Lfm2MoeForCausalLM"),
)
