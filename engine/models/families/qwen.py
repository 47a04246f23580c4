"""Qwen 2, 2.5 and 3, dense and as a mixture, and the text of their models with vision.

Layer (llama.cpp, ``src/models/qwen2.cpp``, ``qwen2moe.cpp``, ``qwen3.cpp``, ``qwen3moe.cpp``)::

    a = rms_norm(x, attn_norm)
    q, k, v = a Wq, a Wk, a Wv                          with biases in qwen2
    q, k = rms_norm(q), rms_norm(k) per head            qwen3
    q, k = rope(q), rope(k)                             pairs (i, i + n_rot / 2)
    x = x + attention(q, k, v) Wo
    x = x + swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(x, ffn_norm); in mixtures, experts(b)

The mixtures of Qwen 2 have a shared network with a gate, and the weights of their experts are not normalized.

Models with vision rotate by several positions per token, which are equal for text.
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import Metadata


def read_qwen2(m: Metadata) -> ModelConfig:
    """The configuration of a file of Qwen 2."""
    return _read(m, "")


def read_qwen2moe(m: Metadata) -> ModelConfig:
    """The configuration of a file of a mixture of Qwen 2."""
    rope, n_ff_shared = m.rope(), m.integer("expert_shared_feed_forward_length", 0, 0)
    experts = m.experts(normalized=False, n_ff_shared=n_ff_shared or m.counts("feed_forward_length")[0])
    return m.model(lambda il: LayerConfig(m.attention(il, rope), experts))


def read_qwen3(m: Metadata) -> ModelConfig:
    """The configuration of a file of Qwen 3."""
    return _read(m, "heads")


def _read(m: Metadata, norm: str) -> ModelConfig:
    rope, mixture = m.rope(), m.architecture.endswith("moe")
    if "vl" in m.architecture:
        m.check_sections()
    return m.model(lambda il: LayerConfig(m.attention(il, rope, norm=norm), m.experts() if mixture else m.dense(il)))


ARCHITECTURES = (
    Architecture("qwen2", "Qwen 2 and 2.5", read_qwen2, "transformers Qwen2ForCausalLM"),
    Architecture("qwen2moe", "Qwen 1.5 and 2 mixtures", read_qwen2moe, "transformers Qwen2MoeForCausalLM"),
    Architecture("qwen2vl", "the text of Qwen 2 VL and 2.5 VL", read_qwen2, "transformers Qwen2ForCausalLM"),
    Architecture("qwen3", "Qwen 3", read_qwen3, "transformers Qwen3ForCausalLM"),
    Architecture("qwen3moe", "Qwen 3 30B-A3B, 235B-A22B, Coder", read_qwen3, "transformers Qwen3MoeForCausalLM"),
    Architecture("qwen3vl", "the text of Qwen 3 VL", read_qwen3, "transformers Qwen3ForCausalLM"),
    Architecture("qwen3vlmoe", "the text of Qwen 3 VL mixtures", read_qwen3, "transformers Qwen3MoeForCausalLM"),
)
