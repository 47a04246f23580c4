"""Ministral 3, Devstral 2 and Mistral Small 3: Llama with YaRN, and with a factor of queries that grows with the position.

Layer (llama.cpp, ``src/models/mistral3.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = rope(a Wq), rope(a Wk), a Wv
    q = q * (1 + s ln(1 + position // n))               s = attention.temperature_scale, n = the original context
    x = x + attention(q, k, v) Wo
    x = x + swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(x, ffn_norm)
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import MAX_CONTEXT, Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope, s = m.rope(neox=False), m.number("attention.temperature_scale", 0.0, 0.0, 1e3)
    original = m.integer("rope.scaling.original_context_length", m.n_ctx_train, 1, MAX_CONTEXT)
    temperature = (s, original, 0) if s else None
    return m.model(lambda il: LayerConfig(m.attention(il, rope, temperature=temperature), m.dense(il)))


ARCHITECTURES = (Architecture("mistral3", "Ministral 3, Devstral 2", read, "transformers Ministral3ForCausalLM"),)
