"""GLM 4.5, 4.6 and 4.7: a mixture with a sigmoid router and a shared network, and a layer that drafts.

Layer (llama.cpp, ``src/models/glm4-moe.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = a Wq + bq, a Wk + bk, a Wv + bv
    q, k = rope(rms_norm(q)), rope(rms_norm(k))         norms per head, in the larger models; the first n_rot dimensions
    x = x + attention(q, k, v) Wo
    x = x + network(b),  b = rms_norm(x, post_attention_norm)

The first layers have a SwiGLU network.  In the others, experts are chosen by p + exp_probs_b, where p = sigmoid(b Wrouter).
They are weighted by p, normalized over the chosen ones, times expert_weights_scale.  The output of the shared network is
added.
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig, Norms
from engine.models.metadata import MAX_LAYERS, Metadata

NORMS = Norms(before_network="post_attention_norm")


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope, dense = m.rope(), m.integer("leading_dense_block_count", 0, 0, MAX_LAYERS)
    if m.has("rope.dimension_sections"):
        m.check_sections()
    # A separate file of a layer that drafts has no layer 0.
    norm = "heads" if any(f"blk.{il}.attn_q_norm.weight" in m.gguf.tensors for il in (0, m.n_layer)) else ""
    experts = m.experts("sigmoid", normalized=False, shared_gated=False)
    experts = m.with_shared(experts)

    def layer(il: int) -> LayerConfig:
        return LayerConfig(m.attention(il, rope, norm=norm), m.dense(il) if il < dense else experts, NORMS)

    return m.model(layer)


ARCHITECTURES = (Architecture("glm4moe", "GLM 4.5 Air, 4.5, 4.6, 4.7", read, "transformers Glm4MoeForCausalLM", "MTP"),)
