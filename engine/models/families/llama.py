"""Llama and the many models that share its architecture.

Layer (llama.cpp, ``src/models/llama.cpp``)::

    a = rms_norm(x, attn_norm)
    q, k, v = rope(a Wq), rope(a Wk), a Wv              pairs (2i, 2i + 1); optionally with biases
    x = x + attention(q, k, v) Wo
    x = x + swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(x, ffn_norm)
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope = m.rope(neox=False)
    return m.model(lambda il: LayerConfig(m.attention(il, rope), m.dense(il)))


ARCHITECTURES = (
    Architecture("llama", "Llama 2 and 3, SmolLM2, Mistral 7B, TinyLlama", read, "transformers LlamaForCausalLM"),
)
