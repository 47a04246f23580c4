"""EXAONE 4: norms after attention and network instead of before them.  The 32B model has layers with a window, and only these
layers rotate queries and keys.

Layer (llama.cpp, ``src/models/exaone4.cpp``)::

    q, k, v = rms_norm(x Wq), rms_norm(x Wk), x Wv      per head
    q, k = rope(q), rope(k)                             in models with windows, only in layers that have one
    x = x + rms_norm(attention(q, k, v) Wo, post_attention_norm)
    x = x + rms_norm(swiglu(x Wgate, x Wup) Wdown, post_ffw_norm)
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig, Norms
from engine.models.metadata import Metadata

NORMS = Norms("", "post_attention_norm", "", "post_ffw_norm")


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope, windows = m.rope(), m.windows(4)

    def layer(il: int) -> LayerConfig:
        rotates = windows[il] or not any(windows)
        own = m.attention(il, rope if rotates else None, window=windows[il], norm="heads")
        return LayerConfig(own, m.dense(il), NORMS)

    return m.model(layer)


ARCHITECTURES = (Architecture("exaone4", "EXAONE 4", read, "transformers Exaone4ForCausalLM"),)
