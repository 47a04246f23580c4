"""Falcon-H1 of TII: attention and Mamba-2 side by side in every layer.

Layer (llama.cpp, ``src/models/falcon-h1.cpp``)::

    a = rms_norm(x, attn_norm)
    q, k, v = rope(a Wq), rope(a Wk), a Wv
    x = x + attention(q, k, v) Wo + mamba(a)
    x = x + swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(x, ffn_norm)

The formula of Mamba-2 is in ``engine/models/mamba.py``; most files have no norm after it.  The published models have factors
of embeddings, of inputs and results of all parts, of keys, and of logits.  The conversion multiplies the weights by them.
"""

from dataclasses import replace

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.mamba_config import read_mamba
from engine.models.metadata import Metadata
from engine.models.pair_config import PairConfig


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    rope, mamba = m.rope(), replace(read_mamba(m), normed="blk.0.ssm_norm.weight" in m.gguf.tensors)
    return m.model(lambda il: LayerConfig(PairConfig(m.attention(il, rope), mamba), m.dense(il)))


ARCHITECTURES = (Architecture("falcon-h1", "Falcon-H1, 0.5B to 34B", read, "transformers FalconH1ForCausalLM"),)
