"""Qwen 3.5 and 3.6, text only: three gated delta nets per layer of attention; dense and as a mixture of experts.

Layer (llama.cpp, ``src/models/qwen35.cpp``, ``qwen35moe.cpp``)::

    a = rms_norm(x, attn_norm)
    recurrent:  u, z = a Wqkv, a Wgate;  alpha, beta = a Walpha, a Wbeta
                o = delta_net(u, alpha, beta)                       engine/cpu/delta_net.py
                y = x + (rms_norm(o, ssm_norm) * silu(z)) Wout      the norm over each head of values
    attention:  [q, g], k, v = a Wq, a Wk, a Wv                     per head, queries then gates
                q, k = rope(rms_norm(q)), rope(rms_norm(k))         per head, the first n_rot of d_k dimensions
                y = x + (attention(q, k, v) * sigmoid(g)) Wo
    x = y + swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(y, post_attention_norm); in qwen35moe, experts(b)

A layer with attention after the trunk drafts tokens (``engine/models/mtp.py``).
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig, Norms
from engine.models.metadata import Metadata
from engine.models.network_config import ExpertsConfig
from engine.models.rope_config import RopeConfig

NORMS = Norms(before_network="post_attention_norm")


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope = m.rope()
    m.check_sections()
    return read_hybrid(m, rope, grouped=False)


def read_hybrid(m: Metadata, rope: RopeConfig, grouped: bool) -> ModelConfig:
    """The configuration of a hybrid.

    grouped: whether value head h uses key head h // (n_v / n_k); otherwise it uses key head h % n_k.
    """
    net, recurrent = m.delta_net(grouped), m.recurrent()

    def layer(il: int) -> LayerConfig:
        network = read_experts(m) if m.mixture else m.dense(il)
        if recurrent[il]:
            return LayerConfig(net, network, NORMS)
        attention = m.attention(il, rope, norm="heads", gated=True)
        if attention.d_v != attention.d_k:
            problem = f"is {attention.d_v}, but the gates of {m.architecture} are as long as its keys, {attention.d_k}"
            m.refuse("attention.value_length", problem)
        return LayerConfig(attention, network, NORMS)

    return m.model(layer)


def read_experts(m: Metadata) -> ExpertsConfig:
    """The mixture of all layers.  By default, the shared network has the width ``feed_forward_length``."""
    whole = m.integer("feed_forward_length", 0, 0) if not m.listed("feed_forward_length") else 0
    shared = m.integer("expert_shared_feed_forward_length", whole or None)
    return m.experts(n_ff_shared=shared)


ARCHITECTURES = (
    Architecture("qwen35", "Qwen 3.5 and 3.6", read, "transformers Qwen3_5ForCausalLM", "MTP"),
    Architecture("qwen35moe", "Qwen 3.5 and 3.6 mixtures", read, "transformers Qwen3_5MoeForCausalLM", "MTP"),
)
