"""Ling and Ring 2.0: a mixture whose sigmoid router chooses groups of experts first, and normalized queries and keys.

Layer (llama.cpp, ``src/models/bailingmoe2.cpp``)::

    a = rms_norm(x, attn_norm);  [q, k, v] = a Wqkv
    q, k = rope(rms_norm(q)), rope(rms_norm(k)) per head, the first n_rot dimensions
    x = x + attention(q, k, v) Wo
    x = x + network(b),  b = rms_norm(x, ffn_norm)

The first layers have a SwiGLU network.  In the others, experts are chosen by p + exp_probs_b, where p = sigmoid(b Wrouter),
from the groups whose two best have the largest sums.  They are weighted by p, normalized over the chosen ones, times
expert_weights_scale.  The output of the shared network is added.
"""

from dataclasses import replace

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import MAX_LAYERS, Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope, dense = m.rope(), m.integer("leading_dense_block_count", 0, 0, MAX_LAYERS)
    experts = m.experts("sigmoid", normalized=False, shared_gated=False)
    n_ff = m.integer("expert_shared_feed_forward_length", 0, 0) or experts.n_ff
    experts = replace(experts, n_ff_shared=m.integer("expert_shared_count", 0, 0) * n_ff)

    def layer(il: int) -> LayerConfig:
        return LayerConfig(m.attention(il, rope, norm="heads"), m.dense(il) if il < dense else experts)

    return m.model(layer)


ARCHITECTURES = (
    Architecture("bailingmoe2", "Ling and Ring 2.0", read, "transformers Glm4MoeForCausalLM, whose layer is the same"),
)
