"""BERT (Devlin et al. 2019), an encoder: MiniLM, BGE, GTE, E5 and many others, for embeddings and as rerankers, also where
they are RoBERTa or XLM-RoBERTa (BGE M3), whose files have a unigram vocabulary; and Nomic's BERT, which rotates queries and
keys.

Layer (llama.cpp, ``src/models/bert.cpp``)::

    x = layer_norm(embed(tokens) + position_embd + token_types[0])      before the first layer
    q, k, v = x Wq + bq, x Wk + bk, x Wv + bv
    x = layer_norm(x + attention(q, k, v) Wo + bo, attn_output_norm)    over the whole text
    x = layer_norm(x + gelu(x Wup + bup) Wdown + bdown, layer_output_norm)      gelu by the error function

There is no norm after the last layer.  Nomic's BERT (``src/models/nomic-bert.cpp``) has no position_embd, but pairs (i, i +
n_rot / 2) are rotated, and swiglu(x Wgate, x Wup) in place of GELU, without biases.

A reranker has a classifier for the output of the first token: tanh(x cls + bias) cls.output + bias, or its second half
alone.
"""

from dataclasses import replace

from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig, Norms
from engine.models.encoder import Encoder
from engine.models.metadata import Metadata
from engine.models.rope_config import RopeConfig
from engine.ops.activation import GELU_ERF, SWIGLU, Activation

NORMS = Norms("", "attn_output_norm", "", "layer_output_norm")


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file of BERT."""
    return _read(m, None, GELU_ERF, n_positions=m.n_ctx_train)


def read_nomic(m: Metadata) -> ModelConfig:
    """The configuration of a file of Nomic's BERT."""
    return _read(m, m.rope(), SWIGLU)


def _read(m: Metadata, rope: RopeConfig | None, activation: Activation, n_positions: int = 0) -> ModelConfig:
    if m.flag("attention.causal", False):
        m.refuse("attention.causal", "is true, and BERT looks ahead: convert the model again")
    types = m.gguf.tensors.get("token_types.weight")
    config = m.model(
        lambda il: LayerConfig(m.attention(il, rope), m.dense(il, activation), NORMS),
        norm="layer",
        n_positions=n_positions,
        causal=False,
        n_token_types=0 if types is None else types.shape[0],
    )
    # The converter says nothing about the pooling of a model that has a classifier.
    ranks = not config.pooling and "cls.output.weight" in m.gguf.tensors
    return replace(config, pooling="rank") if ranks else config


ARCHITECTURES = (
    Architecture(
        "bert",
        "BERT, MiniLM, BGE, BGE M3, GTE, E5",
        read,
        "transformers BertModel and XLMRobertaModel",
        model=Encoder,
    ),
    Architecture("nomic-bert", "Nomic Embed 1 and 1.5", read_nomic, "transformers NomicBertModel", model=Encoder),
)
