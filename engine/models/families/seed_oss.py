"""Seed OSS: Qwen 2 with another name for the norm before the network.

Layer (llama.cpp, ``src/models/seed-oss.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = rope(a Wq + bq), rope(a Wk + bk), a Wv + bv
    x = x + attention(q, k, v) Wo
    x = x + swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(x, post_attention_norm)
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig, Norms
from engine.models.metadata import Metadata

NORMS = Norms(before_network="post_attention_norm")


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope = m.rope()
    return m.model(lambda il: LayerConfig(m.attention(il, rope), m.dense(il), NORMS))


ARCHITECTURES = (Architecture("seed_oss", "Seed OSS 36B", read, "transformers SeedOssForCausalLM"),)
