"""OLMo 2 and 3: norms after attention and network instead of before them, and a norm over all heads of queries and keys.

Layer (llama.cpp, ``src/models/olmo2.cpp``)::

    q, k, v = rms_norm(x Wq), rms_norm(x Wk), x Wv      over whole rows
    q, k = rope(q), rope(k)
    x = x + rms_norm(attention(q, k, v) Wo, post_attention_norm)
    x = x + rms_norm(swiglu(x Wgate, x Wup) Wdown, post_ffw_norm)

In OLMo 3, three of four layers have a sliding window.  Only the other layers scale their rotation to extend the context.
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


ARCHITECTURES = (Architecture("olmo2", "OLMo 2 and 3", read, "transformers Olmo2ForCausalLM and Olmo3ForCausalLM"),)
