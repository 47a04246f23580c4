"""Nemotron-H and Nemotron 3 of NVIDIA, dense and as mixtures: blocks of Mamba-2, of attention, or of a network alone.

Block (llama.cpp, ``src/models/nemotron-h.cpp``)::

    a = rms_norm(x, attn_norm)
    x = x + mamba(a)                               blocks without heads of keys and without a width of the network
    x = x + attention(a Wq, a Wk, a Wv) Wo         blocks with heads of keys; there is no rotation
    x = x + max(a Wup, 0)^2 Wdown                  blocks with a width of the network
    x = x + experts(a) + max(a Wup, 0)^2 Wdown     the latter in nemotron_h_moe, with a shared network

Experts have no gate, as the networks.  They are chosen by p + exp_probs_b, where p is the sigmoid of the router's logits, and
weighted by p, normalized over the chosen ones and scaled.  Their width and the number of those that are chosen may differ
from block to block.  If the file has latents, experts read a Wdown' and their sum is multiplied by Wup'.

The formula of Mamba-2 is in ``engine/models/mamba.py``.
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig, Norms
from engine.models.mamba_config import read_mamba
from engine.models.metadata import Metadata
from engine.models.mixer_config import NoMixer
from engine.models.network_config import DenseConfig, NetworkConfig, NoNetwork
from engine.ops.activation import Activation

RELU2 = Activation("relu2")

MIXING = Norms(before_network="")
"""The norms of a block with a mixer."""

FEEDING = Norms(before_mixer="", before_network="attn_norm")
"""The norms of a block with a network."""


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    n_head_kv, widths = m.counts("attention.head_count_kv", None, 0), m.counts("feed_forward_length", None, 0)

    def network(il: int) -> NetworkConfig:
        if not m.mixture:
            return DenseConfig(widths[il], RELU2)
        shared, latent = m.integer("expert_shared_feed_forward_length", 0, 0), m.integer("moe_latent_size", 0, 0)
        n_used = m.counts("expert_used_count", None, 0)[il]
        n_ff = m.counts("expert_feed_forward_length", 0, 0)[il] or widths[il] // max(n_used, 1)
        others = {"n_ff": n_ff, "n_used": n_used, "n_ff_shared": shared, "n_latent": latent}
        return m.experts("sigmoid", normalized=False, activation=RELU2, shared_gated=False, **others)

    def layer(il: int) -> LayerConfig:
        if widths[il]:
            return LayerConfig(NoMixer(), network(il), FEEDING)
        mixer = m.attention(il, None) if n_head_kv[il] else read_mamba(m)
        return LayerConfig(mixer, NoNetwork(), MIXING)

    # Most files have only the epsilon that others have for layer norms.
    rms, other = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    return m.model(layer, eps=m.number(rms if m.has(rms) else other, None, 0.0, 1.0))


ARCHITECTURES = (
    Architecture("nemotron_h", "Nemotron-H, Nemotron Nano 2", read, "transformers NemotronHForCausalLM"),
    Architecture("nemotron_h_moe", "Nemotron 3 mixtures", read, "transformers NemotronHForCausalLM"),
)
