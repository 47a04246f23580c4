"""GPT-2: the decoder that later ones vary.  It has layer norms with biases, learned positions instead of a rotation, and a
network without a gate.

Before the first layer, each token gets the embedding of its position, of which there are as many as the context is long.
Layer (llama.cpp, ``src/models/gpt2.cpp``)::

    x = embed(tokens) + position_embd[positions]
    a = layer_norm(x, attn_norm);  [q, k, v] = a Wqkv + bqkv
    x = x + attention(q, k, v) Wo + bo                  no rotation
    x = x + gelu(b Wup + bup) Wdown + bdown,  b = layer_norm(x, ffn_norm)
    logits = layer_norm(x, output_norm) Whead           after the last layer; Whead is the embedding

``gelu`` is the form with tanh, which ``transformers`` calls ``gelu_new``.
"""

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig
from engine.models.metadata import Metadata
from engine.ops.activation import Activation


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    gelu = Activation("gelu")
    return m.model(
        lambda il: LayerConfig(m.attention(il, None), m.dense(il, gelu)), norm="layer", n_positions=m.n_ctx_train
    )


ARCHITECTURES = (Architecture("gpt2", "GPT-2, small to XL", read, "transformers GPT2LMHeadModel"),)
