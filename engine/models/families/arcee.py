"""Arcee: Llama whose network has no gate (So et al. 2021).

Layer (llama.cpp, ``src/models/arcee.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = rope(a Wq), rope(a Wk), a Wv
    x = x + attention(q, k, v) Wo
    x = x + max(b Wup, 0)^2 Wdown,  b = rms_norm(x, ffn_norm)
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import Metadata
from engine.ops.activation import Activation


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope = m.rope(neox=False)
    return m.model(lambda il: LayerConfig(m.attention(il, rope), m.dense(il, Activation("relu2"))))


ARCHITECTURES = (Architecture("arcee", "AFM 4.5B", read, "transformers ArceeForCausalLM"),)
