"""The configuration of a network of DFlash or DSpark (``engine/models/dflash.py``)."""

from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.limits import MOST_DRAFTS
from engine.models.config import DFLASH, LayerConfig, ModelConfig, Norms
from engine.models.metadata import Metadata
from engine.ops.activation import GEGLU, SWIGLU

ACTIVATIONS = {"silu": SWIGLU, "gelu": GEGLU, "gelu_pytorch_tanh": GEGLU}
"""The activations of the networks, by the value of the key ``hidden_activation``."""

MASK = "tokenizer.ggml.mask_token_id"
"""The key of the mask token."""


@dataclass(frozen=True)
class DFlashConfig:
    """The configuration of a network.

    network: its layers and numbers.
    block: the most tokens that it drafts in one pass.
    mask: the mask token.
    shift: 1 if a row predicts the token in its own place, 0 if it predicts the next one.
    causal: whether the rows of a block see only those before them.
    """

    network: ModelConfig
    block: int
    mask: int
    shift: int
    causal: bool


def read_dflash(network: GGUF, n_vocab: int) -> DFlashConfig:
    """The configuration of the network in a file.  n_vocab: the number of tokens of its target.

    Raises ModelError for networks that are not supported, and GGUFError for invalid values.
    """
    m = Metadata(network, DFLASH)
    if m.integer("hyper_connection_count", 0, 0):
        m.unsupported("networks of DeepSeek-V4 that draft blocks are not supported; use the model's own layer.")
    if "selector_hidden.weight" in network.tensors:
        m.unsupported("networks of DFlash2, which have a selector, are not supported.")
    activation = network.get(m.key("hidden_activation"), "str", "silu")
    if activation not in ACTIVATIONS:
        m.unsupported(f"the activation {activation!r} ({m.key('hidden_activation')}) is not supported.")
    rope, windows = m.rope(), m.windows(1)
    scale, value_scale = m.number("attention.scale", 0.0), m.number("attention.value_scale", 0.0) or 1.0
    others: dict[str, Any] = {"scale": scale} if scale else {}
    layers = []
    for il in range(m.n_blocks):
        blk = f"blk.{il}."
        alike = blk + "attn_v.weight" not in network.tensors
        mixer = m.attention(
            *(il, rope),
            window=windows[il],
            norm="heads",
            keys_are_values=alike,
            normed_values=alike,
            sinks=blk + "attn_sinks.weight" in network.tensors,
            value_scale=value_scale,
            **others,
        )
        after = [
            name if f"{blk}{name}.weight" in network.tensors else ""
            for name in ("post_attention_norm", "post_ffw_norm")
        ]
        norms = Norms(after_mixer=after[0], after_network=after[1])
        layers.append(LayerConfig(mixer, m.dense(il, ACTIVATIONS[activation]), norms))
    # Only networks with a Markov head may predict from the last sampled token itself.
    first = "markov_w1.weight" in network.tensors and m.flag("sample_from_anchor", True)
    size = m.integer("block_size", 16, 1 if first else 2)
    return DFlashConfig(
        ModelConfig(
            DFLASH,
            network.path.stem,
            m.n_embd,
            n_vocab,
            m.n_ctx_train,
            m.number("attention.layer_norm_rms_epsilon", None, 0.0, 1.0),
            tuple(layers),
            embedding_scale=m.number("embedding_scale", 0.0) or 1.0,
            logit_scale=m.number("logit_scale", 0.0) or 1.0,
            final_softcap=m.number("final_logit_softcapping", 0.0),
        ),
        min(size if first else size - 1, MOST_DRAFTS),
        network.require(MASK, "int", 0, n_vocab - 1),
        0 if first else 1,
        m.flag("attention.causal", False),
    )


def with_dflash(config: ModelConfig, gguf: GGUF, network: GGUF) -> ModelConfig:
    """A copy of the configuration of the model ``gguf`` with the network that drafts for it.

    Raises ModelError if the network belongs to another model, and GGUFError for invalid values.
    """
    own, wanted = read_dflash(network, config.n_vocab), f"{network.path} drafts for models"
    if config.streams is not None:
        raise ModelError(f"{wanted} with a single residual stream, and {gguf.path} has {config.streams.count}.")
    if own.network.n_embd != config.n_embd:
        raise ModelError(f"{wanted} with embeddings of {own.network.n_embd}, and {gguf.path} has {config.n_embd}.")
    taps = Metadata(network, DFLASH).taps(config.n_layer, str(gguf.path))
    return replace(config, mtp=own.network.layers, mtp_apart=True, mtp_problem="", taps=taps, block=own.block)
