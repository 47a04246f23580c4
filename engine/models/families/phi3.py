"""Phi 3, 3.5 and 4: one matrix for queries, keys and values, one for gate and up, and rotations with two sets of divisors.

Layer (llama.cpp, ``src/models/phi3.cpp``)::

    a = rms_norm(x, attn_norm);  [q, k, v] = a Wqkv
    q, k = rope(q), rope(k)                             the first n_rot dimensions; longrope: engine/models/metadata.py
    x = x + attention(q, k, v) Wo
    [gate, up] = b Wup,  b = rms_norm(x, ffn_norm);  x = x + swiglu(gate, up) Wdown

Files mention a sliding window that their models do not need; like llama.cpp, this engine ignores it.
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import Metadata


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope = m.rope()
    return m.model(lambda il: LayerConfig(m.attention(il, rope), m.dense(il)))


ARCHITECTURES = (Architecture("phi3", "Phi 3, 3.5, 4 and 4-mini", read, "transformers Phi3ForCausalLM"),)
