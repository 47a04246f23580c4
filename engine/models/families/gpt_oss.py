"""gpt-oss: a mixture of experts with biases everywhere, a clamped activation, windows, and attention sinks.

Layer (llama.cpp, ``src/models/openai-moe.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = rope(a Wq + bq), rope(a Wk + bk), a Wv + bv
    x = x + attention(q, k, v) Wo + bo                  the softmax of each head has an additional term, exp(sink); layers
                                                        0, 2, 4, ... have a sliding window
    logits = b Wrouter + brouter,  b = rms_norm(x, post_attention_norm)
    x = x + the sum over the chosen experts e of softmax(their logits) * (h Wdown_e + bdown_e)
    h = g sigmoid(1.702 g) (u + 1),  g = min(b Wgate_e + bgate_e, 7),  u = clamp(b Wup_e + bup_e, -7, 7)

The rotation is scaled by YaRN, which interpolates between two bounds.  llama.cpp rounds these bounds to whole pairs.  The
metadata of a file does not say whether they must be rounded, but the published configuration does: ``truncate`` is false, and
``transformers`` follows it.  They are therefore not rounded here.  For gpt-oss 20b they are 8.1 and 17.4, while llama.cpp
uses 8 and 18.
"""

from dataclasses import replace

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig, Norms
from engine.models.metadata import MAX_CONTEXT, Metadata
from engine.ops.activation import Activation

NORMS = Norms(before_network="post_attention_norm")
ACTIVATION = Activation("swiglu_oai", (7.0, 1.702))


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope = replace(m.rope(), truncate=False)
    window = m.integer("attention.sliding_window", None, 1, MAX_CONTEXT)
    slides = m.sliding(2)

    def layer(il: int) -> LayerConfig:
        attention = m.attention(il, rope, window=window if slides[il] else 0, sinks=True)
        return LayerConfig(attention, m.experts(activation=ACTIVATION), NORMS)

    return m.model(layer)


ARCHITECTURES = (Architecture("gpt-oss", "gpt-oss 20b and 120b", read, "transformers GptOssForCausalLM"),)
