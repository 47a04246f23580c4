"""ERNIE 4.5, dense and as a mixture, text only: Llama, or Llama with a mixture in some layers.

Layer (llama.cpp, ``src/models/ernie4-5.cpp``, ``ernie4-5-moe.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = rope(a Wq), rope(a Wk), a Wv
    x = x + attention(q, k, v) Wo
    x = x + network(rms_norm(x, ffn_norm))              SwiGLU, or experts and a shared network

Experts are chosen by softmax(logits) + exp_probs_b.  They are weighted by softmax(logits), normalized over the chosen ones.
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import MAX_LAYERS, Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope = m.rope(neox=False)
    first = m.integer("leading_dense_block_count", 0, 0, MAX_LAYERS)
    step = m.integer("interleave_moe_layer_step", 1, 1, MAX_LAYERS)
    n_ff_shared = m.integer("expert_shared_feed_forward_length", 0, 0)

    def layer(il: int) -> LayerConfig:
        mixed = m.mixture and il >= first and (il + 1) % step == 0
        network = m.experts(n_ff_shared=n_ff_shared, shared_gated=False) if mixed else m.dense(il)
        return LayerConfig(m.attention(il, rope), network)

    return m.model(layer)


ARCHITECTURES = (
    Architecture("ernie4_5", "ERNIE 4.5 0.3B", read, "transformers Ernie4_5ForCausalLM"),
    Architecture("ernie4_5-moe", "ERNIE 4.5 21B-A3B, 300B-A47B", read, "transformers Ernie4_5_MoeForCausalLM"),
)
