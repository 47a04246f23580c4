"""Llama and the many models that share its architecture.

Layer (llama.cpp, ``src/models/llama.cpp``)::

    a = rms_norm(x, attn_norm)
    q, k, v = rope(a Wq), rope(a Wk), a Wv              pairs (2i, 2i + 1); optionally with biases
    x = x + attention(q, k, v) Wo
    x = x + swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(x, ffn_norm); in mixtures, experts(b)
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope = m.rope(neox=False)

    def layer(il: int) -> LayerConfig:
        # The width of an expert has the name of that of a network.
        network = m.experts(n_ff=m.counts("feed_forward_length")[il]) if m.mixture else m.dense(il)
        return LayerConfig(m.attention(il, rope), network)

    return m.model(layer)


ARCHITECTURES = (
    Architecture(
        "llama",
        "Llama 2 and 3, SmolLM2, Mistral 7B, Mixtral, TinyLlama",
        read,
        "transformers LlamaForCausalLM and MixtralForCausalLM",
    ),
)
