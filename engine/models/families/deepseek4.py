"""DeepSeek-V4: hyper-connections, attention over a window and compressed rows, experts chosen by the token id or by a router.

The residual stream H consists of four streams, which all start as the embedding.  Layer (llama.cpp,
``src/models/deepseek4.cpp``)::

    u, b, C = mix(H);  y = attention(rms_norm(u, attn_norm));      H_d = b_d y + sum_s C_sd H_s
    u, b, C = mix(H);  y = experts(rms_norm(u, ffn_norm)) + shared network;  H likewise

The logits are computed from rms_norm(u, output_norm), where u is a weighted sum of the streams.  ``engine/cpu/hyper.py``
describes the weights of streams, and ``engine/models/compressed.py`` describes attention.

Each layer has a ratio.  With ratio 0, a token sees only the latest ``window`` tokens.  With ratio 4, it also sees the best
compressed rows of four tokens each, which an indexer selects.  With any other ratio, which is 128 in all published models, it
also sees all compressed rows of that many tokens each.  Layers with compressed rows have separate rotation frequencies,
extended by YaRN with a magnitude of 1.

The probability of an expert is sqrt(softplus(logit)).  A bias is added for the selection, except in the first layers, where a
table gives the experts of each token.
"""

from dataclasses import dataclass, replace
from typing import Any

from engine.arrays import Array, Batch, Matrix
from engine.cache.types import F32, Types
from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.limits import STREAMS
from engine.models.architecture import Architecture
from engine.models.base import Model
from engine.models.compressed import Compressed, load_compressed
from engine.models.compressed_config import CompressedConfig
from engine.models.config import HyperConfig, LayerConfig, ModelConfig
from engine.models.feed_forward import load_experts
from engine.models.hyper import HyperConnection, load_hyper_connection
from engine.models.indexer_config import IndexerConfig
from engine.models.loader import Loader
from engine.models.metadata import MAX_CONTEXT, Metadata
from engine.models.network_config import ExpertsConfig
from engine.models.rope_config import RopeConfig
from engine.models.weights import missing
from engine.ops.activation import SWIGLU, Activation
from engine.ops.experts import Experts
from engine.ops.operations import Ops

CHOSEN = 4
"""The ratio of layers with an indexer."""


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    if m.n_mtp and not any(name.startswith(f"blk.{m.n_layer}.nextn.") for name in m.gguf.tensors):
        # The number in the metadata includes a layer that is in another file.
        m.n_layer, m.n_mtp, m.mtp_problem = m.n_blocks, 0, ""
    elif m.n_mtp:
        m.mtp_problem = (
            "a layer that drafts for a deepseek4 model must have a file of its own, given as the draft model"
        )
    d, n_head = m.width("attention.key_length", 0), m.counts("attention.head_count")[0]
    if m.counts("attention.head_count_kv")[0] != 1 or m.width("attention.value_length", d) != d:
        m.unsupported("deepseek4 models have one head of keys, which are also the values; convert the model again.")
    n_group = m.integer("attention.output_group_count", most=4096)
    if n_head % n_group:
        m.refuse("attention.output_group_count", f"is {n_group}, which does not divide the {n_head} heads")
    streams = HyperConfig(
        m.integer("hyper_connection.count", most=64),
        m.integer("hyper_connection.sinkhorn_iterations", most=1000),
        m.number("hyper_connection.epsilon", None, 0.0, 1.0),
    )
    if streams.count != STREAMS:
        m.refuse("hyper_connection.count", f"is {streams.count}, and {STREAMS} streams are supported")
    ratios, limits = _ratios(m), _limits(m)
    n_hash = m.integer("hash_layer_count", 0, 0, m.n_layer)

    def layer(il: int) -> LayerConfig:
        return _layer(m, ratios[il], limits[il], il < n_hash)

    return m.model(layer, streams=streams)


def drafting_layer(m: Metadata) -> LayerConfig:
    """The configuration of the layer in another file that drafts for this model.  It has a window, no compressed rows, and a
    router."""
    return _layer(m, 0, _limits(m)[-1], False)


def _layer(m: Metadata, ratio: int, activation: Activation, tabled: bool) -> LayerConfig:
    d, n_head = m.width("attention.key_length", 0), m.counts("attention.head_count")[0]
    near, far = _ropes(m, d)
    mixer = CompressedConfig(
        n_head,
        d,
        1.0 / d**0.5,
        far if ratio else near,
        m.integer("attention.sliding_window", None, 1, MAX_CONTEXT),
        m.integer("attention.q_lora_rank"),
        m.integer("attention.output_group_count", most=4096),
        m.integer("attention.output_lora_rank"),
        ratio,
        _indexer(m, far) if ratio == CHOSEN else None,
    )
    experts = replace(m.with_shared(m.experts("sqrt_softplus")), shared_gated=False)
    return LayerConfig(mixer, replace(experts, activation=activation, tabled=tabled))


def _ropes(m: Metadata, d: int) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of layers without compressed rows and of layers with compressed rows."""
    rope = m.rope(d, neox=False)
    base = m.number("attention.compress_rope_freq_base", None, 1.0, 1e12)
    return RopeConfig(rope.n_rot, rope.base, neox=False), replace(rope, base=base, magnitude=1.0)


def _indexer(m: Metadata, rope: RopeConfig) -> IndexerConfig:
    own = IndexerConfig(
        m.integer("attention.indexer.head_count", most=4096),
        m.width("attention.indexer.key_length", 0),
        m.integer("attention.indexer.top_k"),
    )
    if own.d < rope.n_rot:
        m.refuse("attention.indexer.key_length", f"is {own.d}, fewer than the {rope.n_rot} dimensions that are rotated")
    return own


def _ratios(m: Metadata) -> list[int]:
    """The ratio of each layer of the trunk."""
    ratios = m.counts("attention.compress_ratios", None, 0)
    for ratio in ratios:
        if 0 < ratio < CHOSEN or ratio > 4096:
            m.refuse("attention.compress_ratios", f"has {ratio}; 0, {CHOSEN} and larger ones up to 4096 are supported")
    return ratios


def _limits(m: Metadata) -> list[Activation]:
    """The activation of each layer of the trunk."""
    every: list[list[float]] = []
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        if not m.has(name):
            every.append(every[0] if every else [0.0] * m.n_layer)
            continue
        every.append(m.numbers(name)[: m.n_layer])
    if every[0] != every[1]:
        m.refuse("swiglu_clamp_shexp", "differs from swiglu_clamp_exp, which is not supported")
    return [Activation("swiglu_clamped", (limit,)) if limit else SWIGLU for limit in every[0]]


def with_rounding(config: ModelConfig, types: Types, gguf: GGUF) -> ModelConfig:
    """A copy of the configuration of a deepseek4 model that rounds stored rows as ds4 does.

    Raises ModelError if this rounding is not defined for the model or for the element types of its cache.
    """
    option = "ds4's rounding (ds4_rounding=True)"
    if config.architecture != "deepseek4":
        raise ModelError(
            f"{gguf.path}: {option} is defined for deepseek4 models only, and this is {config.architecture}."
        )
    if types != F32:
        raise ModelError(
            f"{gguf.path}: {option} needs the cache type f32, because compressed rows are rounded where they are stored; "
            'use cache_type="f32".'
        )

    def rounded(layer: LayerConfig) -> LayerConfig:
        mixer = layer.mixer
        assert isinstance(mixer, CompressedConfig)
        if mixer.indexer is not None and mixer.indexer.d & (mixer.indexer.d - 1):
            raise ModelError(
                f"{gguf.path}: {option} needs an indexer whose keys have a power of two of elements, not {mixer.indexer.d}."
            )
        return replace(layer, mixer=replace(mixer, rounded=True))

    return replace(config, layers=tuple(map(rounded, config.layers)), mtp=tuple(map(rounded, config.mtp)))


@dataclass
class DeepSeek4Layer:
    """The weights of one layer."""

    mixer_streams: HyperConnection
    mixer_norm: Array
    mixer: Compressed
    network_streams: HyperConnection
    network_norm: Array
    network: Experts[Array, Matrix]
    norm_eps: float

    def run(self, ops: Ops, x: Array, memory: Any, batch: Batch[Array]) -> Array:
        """Compute the layer: the streams after it from the streams x before it, float32 [rows, 4 n_embd]."""
        return self.feed(ops, self.mix(ops, x, memory, batch), batch)

    def mix(self, ops: Ops, x: Array, memory: Any, batch: Batch[Array]) -> Array:
        """Compute the mixer: the streams after it from the streams x before it, float32 [rows, 4 n_embd]."""
        weights = self.mixer_streams.weights(ops, x)
        n = ops.rms_norm(ops.collapse(x, weights), self.mixer_norm, self.norm_eps)
        y = self.mixer.output.apply(ops, self.mixer.mix(ops, n, memory, batch))
        return ops.expand(x, y, weights)

    def feed(self, ops: Ops, x: Array, batch: Batch[Array]) -> Array:
        """The streams x after the network, float32 [rows, 4 n_embd]."""
        weights = self.network_streams.weights(ops, x)
        n = ops.rms_norm(ops.collapse(x, weights), self.network_norm, self.norm_eps)
        return ops.expand(x, ops.experts(self.network, None, n, None, batch.tokens), weights)

    def remember(self, ops: Ops, x: Array, memory: Any, batch: Batch[Array]) -> None:
        """Store the latents of the streams x, float32 [rows, 4 n_embd], in ``memory``."""
        weights = self.mixer_streams.weights(ops, x)
        n = ops.rms_norm(ops.collapse(x, weights), self.mixer_norm, self.norm_eps)
        self.mixer.remember(ops, n, memory, batch)


def load_layer(mixers: Loader, networks: Loader, blk: str, config: LayerConfig) -> DeepSeek4Layer:
    """Load the weights of a layer.  mixers, networks: the loaders of its two parts; blk: the prefix of tensor names."""
    c, mixer, network = mixers.config, config.mixer, config.network
    assert isinstance(mixer, CompressedConfig) and isinstance(network, ExpertsConfig)
    chooser = blk + ("ffn_gate_tid2eid.weight" if network.tabled else "exp_probs_b.bias")
    if not networks.has(chooser):
        raise missing(networks.gguf, chooser)
    return DeepSeek4Layer(
        load_hyper_connection(mixers, blk + "hc_attn"),
        mixers.vector(blk + "attn_norm.weight", c.n_embd),
        load_compressed(mixers, blk, mixer),
        load_hyper_connection(networks, blk + "hc_ffn"),
        networks.vector(blk + "ffn_norm.weight", c.n_embd),
        load_experts(networks, blk, network),
        c.norm_eps,
    )


class DeepSeek4(Model):
    """A model with the architecture deepseek4, for text only."""

    layers: list[DeepSeek4Layer]

    def load_layer(self, il: int) -> DeepSeek4Layer:
        """Load the weights of layer ``il``."""
        # This is a bias for the tokens of images.
        self.ignore(f"blk.{il}.exp_probs_b_vl.bias")
        mixers, networks = self.loader(self.placement.mixers[il]), self.loader(self.placement.networks[il])
        return load_layer(mixers, networks, f"blk.{il}.", self.config.layers[il])

    def load_rest(self) -> None:
        """Load the weights that join the streams before the output."""
        self.output_streams = load_hyper_connection(self, "output_hc", last=True)

    def enter(self, ops: Ops, x: Array) -> Array:
        """The streams of the embeddings x [rows, n_embd]: float32 [rows, 4 n_embd]."""
        return ops.repeat(x, STREAMS)

    def leave(self, ops: Ops, x: Array) -> Array:
        """The weighted sum of the streams x [rows, 4 n_embd] before the output: float32 [rows, n_embd]."""
        return ops.collapse(x, self.output_streams.weights(ops, x))

    def mix(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute the mixer of layer ``il``: the streams after it from x before it, float32 [rows, 4 n_embd]."""
        return self.layer(ops, il, False).mix(ops, x, self.memory(il, ops), batch)

    def feed(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute the network of layer ``il``: the streams after it from x before it, float32 [rows, 4 n_embd]."""
        return self.layer(ops, il, True).feed(ops, x, batch)


ARCHITECTURES = (
    Architecture(
        "deepseek4",
        "DeepSeek V4 Flash and Pro",
        read,
        "transformers DeepseekV4ForCausalLM",
        "a layer in another file",
        DeepSeek4,
    ),
)
