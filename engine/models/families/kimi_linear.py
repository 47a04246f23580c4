"""Kimi Linear: three layers of Kimi delta attention for each layer of latent attention, which does not rotate.

Layer (llama.cpp, ``src/models/kimi-linear.cpp``)::

    a = rms_norm(x, attn_norm)
    delta:   q, k, v, b = a Wq, a Wk, a Wv, a Wbeta;  f, z = (a Wf_a) Wf_b, (a Wg_a) Wg_b
             o = kda(q, k, v, f, b)                                engine/cpu/kda.py
             y = x + (rms_norm(o, ssm_norm) * sigmoid(z)) Wo       the norm over each head
    latent:  c, k' = a Wkv_a;  q, q' = a Wq                        layers with heads of keys (attention.head_count_kv)
             y = x + latent_attention(q, q', rms_norm(c), k') Wo
    x = y + network(rms_norm(y, ffn_norm))

The first layers have a SwiGLU network.  In the others, experts are chosen by p + exp_probs_b, where p is the sigmoid of the
router's logits.  They are weighted by p, normalized over the chosen ones, times expert_weights_scale.  The output of the
shared network is added.
"""

from dataclasses import replace

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.families.deepseek2 import latent_of
from engine.models.kda_config import read_kda
from engine.models.metadata import MAX_LAYERS, Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    delta, n_head_kv = read_kda(m), m.counts("attention.head_count_kv", None, 0)
    latent = replace(latent_of(m), rope=None, q_rank=m.integer("attention.q_lora_rank", 0, 0))
    dense, experts = m.n_layer, None
    if m.mixture:
        dense = m.integer("leading_dense_block_count", 0, 0, MAX_LAYERS)
        experts = m.with_shared(m.experts("sigmoid", shared_gated=False))

    def layer(il: int) -> LayerConfig:
        network = m.dense(il) if experts is None or il < dense else experts
        return LayerConfig(latent if n_head_kv[il] else delta, network)

    return m.model(layer)


ARCHITECTURES = (Architecture("kimi-linear", "Kimi Linear 48B-A3B", read, "transformers KimiLinearForCausalLM"),)
