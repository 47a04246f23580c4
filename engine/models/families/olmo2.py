"""OLMo 2 and 3: norms after attention and network instead of before them, and a norm over all heads of queries and keys; and
OLMoE, a mixture with this norm of queries and keys, but norms before its parts.

Layer of OLMo 2 (llama.cpp, ``src/models/olmo2.cpp``)::

    q, k, v = rms_norm(x Wq), rms_norm(x Wk), x Wv      over whole rows
    q, k = rope(q), rope(k)
    x = x + rms_norm(attention(q, k, v) Wo, post_attention_norm)
    x = x + rms_norm(swiglu(x Wgate, x Wup) Wdown, post_ffw_norm)

In OLMo 3, three of four layers have a sliding window.  Only the other layers scale their rotation to extend the context.

Layer of OLMoE (llama.cpp, ``src/models/olmoe.cpp``)::

    a = rms_norm(x, attn_norm)
    q, k, v = rms_norm(a Wq), rms_norm(a Wk), a Wv;  q, k = rope(q), rope(k)
    x = x + attention(q, k, v) Wo
    x = x + experts(rms_norm(x, ffn_norm))              weights: softmax over all experts, not normalized
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig, Norms
from engine.models.metadata import Metadata
from engine.models.rope_config import RopeConfig

NORMS = Norms("", "post_attention_norm", "", "post_ffw_norm")


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope, windows = m.rope(), m.windows(4)
    near = RopeConfig(rope.n_rot, m.number("rope.freq_base_swa", rope.base, 1.0, 1e12))

    def layer(il: int) -> LayerConfig:
        own = m.attention(il, near if windows[il] else rope, window=windows[il], norm="rows")
        return LayerConfig(own, m.dense(il), NORMS)

    return m.model(layer)


def read_olmoe(m: Metadata) -> ModelConfig:
    """The configuration of a file of OLMoE."""
    if m.number("attention.clamp_kqv", 0.0):
        m.unsupported("limits of queries, keys and values (olmoe.attention.clamp_kqv) are not supported.")
    # The width of an expert has the name of that of a network.
    rope, experts = m.rope(), m.experts(normalized=False, n_ff=m.counts("feed_forward_length")[0])
    return m.model(lambda il: LayerConfig(m.attention(il, rope, norm="rows"), experts))


ARCHITECTURES = (
    Architecture("olmo2", "OLMo 2 and 3", read, "transformers Olmo2ForCausalLM and Olmo3ForCausalLM"),
    Architecture("olmoe", "OLMoE 1B-7B", read_olmoe, "transformers OlmoeForCausalLM"),
)
