"""The immutable description of a model: its layers, each a mixer and a network with their own sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from engine.ops.activation import SWIGLU, Activation
from engine.ops.delta_net import DeltaNetSizes

ASSISTANT = "gemma4-assistant"
"""The architecture of models that draft for a gemma4 model and cannot run alone."""


@dataclass(frozen=True)
class RopeConfig:
    """The rotation of queries and keys: the number of dimensions ``n_rot``, the frequency base, and the linear scale (1 /
    factor).

    neox: pairs are (i, i + n_rot / 2), else (2i, 2i + 1).
    factors: the tensor that holds a divisor of each frequency; "" for none.
    magnitude: the factor of cosines and sines.
    yarn_ctx: the original context of YaRN's frequency correction (Peng et al. 2023); 0: no correction.
    beta_fast, beta_slow: YaRN keeps frequencies that make at least beta_fast turns over the original context, and
        interpolates those that make at most beta_slow.
    truncate: whether the pairs at which this happens are rounded to integers.
    long_factors: the tensor that takes the place of ``factors`` in contexts of more than long_beyond positions; "" for none.
    """

    n_rot: int
    base: float
    scale: float = 1.0
    neox: bool = True
    factors: str = ""
    magnitude: float = 1.0
    yarn_ctx: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    long_factors: str = ""
    long_beyond: int = 0


@dataclass(frozen=True)
class AttentionConfig:
    """A mixer: causal attention of n_head heads of queries over n_head_kv heads of keys of d_k and values of d_v elements.

    scale: the factor of the scores.
    rope: the rotation of queries and keys; None: they are not rotated.
    window: the number of latest positions that a token sees; 0: all.
    norm: how queries and keys are normalized: "" not at all, "heads" each head by itself, "rotated heads" each head after its
        rotation, "rows" all heads of a row together.
    normed_values: whether heads of values are normalized too, without weights.
    gated: whether the result of each head is multiplied by sigmoid of gates that follow its queries.
    sinks: whether each head has a sink, an additional term of its softmax.
    temperature: (s, n): queries at position p are multiplied by 1 + s ln(1 + p // n); None: they are not.
    source: the layer whose keys and values it reads; None: its own.
    """

    n_head: int
    n_head_kv: int
    d_k: int
    d_v: int
    scale: float
    rope: RopeConfig | None
    window: int = 0
    norm: str = ""
    normed_values: bool = False
    gated: bool = False
    sinks: bool = False
    temperature: tuple[float, int] | None = None
    source: int | None = None


@dataclass(frozen=True)
class LatentConfig:
    """A mixer: causal attention whose heads share one latent vector per position (MLA).

    A position is stored as rank + n_rope elements: a latent, from which each head's key and value of the position could be
    computed, and a rotated part of the key that all heads share.

    n_nope, n_rope: elements of a head's query that are not rotated, and that are.
    rank: elements of a latent; q_rank: of a query's, from which the queries of all heads are computed; 0: there is none.
    d_v: elements of a head's value.
    scale: the factor of the scores.
    rope: the rotation of the last n_rope elements.
    temperature: as in ``AttentionConfig``.
    """

    n_head: int
    n_nope: int
    n_rope: int
    rank: int
    d_v: int
    scale: float
    rope: RopeConfig
    q_rank: int = 0
    temperature: tuple[float, int] | None = None

    @property
    def width(self) -> int:
        """Elements that are stored per position."""
        return self.rank + self.n_rope


@dataclass(frozen=True)
class DeltaNetConfig(DeltaNetSizes):
    """A mixer: a gated delta net of these sizes."""


@dataclass(frozen=True)
class IndexerConfig:
    """What chooses ``top_k`` compressed rows for each token: n_head heads of queries of d elements over keys of its own."""

    n_head: int
    d: int
    top_k: int


@dataclass(frozen=True)
class CompressedConfig:
    """A mixer: attention of n_head heads over latents of d elements, each of which is key and value of all heads.  A token
    sees the latest ``window`` latents, and rows that compress ``ratio`` positions each; ratio 0: none.

    scale: the factor of the scores.
    rope: the rotation of the last elements of queries and latents, in pairs of neighbours.
    n_q: the width from which queries are made.
    n_group, n_out: the heads of each of n_group groups together become n_out elements, and those of all groups the output.
    indexer: what chooses among the compressed rows; None: a token sees all of them.
    rounded: whether everything that is stored, and queries of the indexer, are rounded to 8 and 4 bits as in ds4.
    """

    n_head: int
    d: int
    scale: float
    rope: RopeConfig
    window: int
    n_q: int
    n_group: int
    n_out: int
    ratio: int = 0
    indexer: IndexerConfig | None = None
    rounded: bool = False

    @property
    def overlap(self) -> int:
        """The number of consecutive blocks that a compressed row is made of."""
        return 2 if self.indexer is not None else 1


@dataclass(frozen=True)
class DenseConfig:
    """A network of width n_ff that every row uses."""

    n_ff: int
    activation: Activation = SWIGLU


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture: each row uses n_used of n_expert networks of width n_ff, and one shared network of width n_ff_shared unless
    that is 0.

    shared_gated: whether the router decides how much of the shared network is added.
    gating: the probability of an expert is "softmax", "sigmoid" or "sqrt_softplus" of its logit.
    normalized: whether the weights of the chosen experts are divided by their sum; then they are multiplied by weight_scale.
    n_group, n_group_used: experts are chosen from the n_group_used best of n_group groups.
    group_best: the number of best experts of a group, 1 or 2, whose scores add up to that of the group.
    beside: a dense network whose result is added to that of the experts; None: there is none.
    tabled: whether a table gives the experts of each token.
    """

    n_expert: int
    n_used: int
    n_ff: int
    n_ff_shared: int = 0
    activation: Activation = SWIGLU
    shared_gated: bool = True
    gating: str = "softmax"
    normalized: bool = True
    weight_scale: float = 1.0
    n_group: int = 1
    n_group_used: int = 1
    group_best: int = 2
    beside: DenseConfig | None = None
    tabled: bool = False


class Norms(NamedTuple):
    """The names of a layer's norms in the file: before and after the mixer, before and after the network; "" for none."""

    before_mixer: str = "attn_norm"
    after_mixer: str = ""
    before_network: str = "ffn_norm"
    after_network: str = ""


@dataclass(frozen=True)
class LayerConfig:
    """One layer: x = x + mixer(x), then x = x + network(x), with norms before or after each."""

    mixer: AttentionConfig | LatentConfig | DeltaNetConfig | CompressedConfig
    network: DenseConfig | ExpertsConfig
    norms: Norms = Norms()


@dataclass(frozen=True)
class StreamsConfig:
    """Hyper-connections: the residual stream consists of ``count`` streams, which are mixed around each mixer and network.

    rounds: how often the matrix that mixes them is normalized; epsilon: what is added to its elements and sums.
    """

    count: int
    rounds: int
    epsilon: float


@dataclass(frozen=True)
class ModelConfig:
    """The parameters of the forward pass.  Sizes are counts of elements.

    layers: the layers of the trunk.
    mtp: the layer after the trunk that drafts tokens (multi-token prediction), or None.
    mtp_apart: whether that layer has a file of its own.
    n_mtp_in_file: the number of such layers in the file of the trunk.
    mtp_problem: why they cannot be used; "": they can, or there are none.
    embedding_scale, residual_scale, logit_scale: the factors of the embedding, of what a mixer or a network adds to the
        residual stream, and of the logits.
    final_softcap: the bound c of logits, c tanh(x / c); 0: none.
    n_per_layer: the width of per-layer embeddings; 0: none.
    n_embd_out: for an assistant, the width of the model that it drafts for.
    streams: hyper-connections, or None.
    """

    architecture: str
    name: str
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    mtp: LayerConfig | None = None
    mtp_apart: bool = False
    n_mtp_in_file: int = 0
    mtp_problem: str = ""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float = 0.0
    n_per_layer: int = 0
    n_embd_out: int = 0
    streams: StreamsConfig | None = None

    @property
    def n_layer(self) -> int:
        """The number of layers of the trunk."""
        return len(self.layers)

    @property
    def all_layers(self) -> tuple[LayerConfig, ...]:
        """The layers of the trunk, and the layer that drafts if there is one."""
        return self.layers if self.mtp is None else (*self.layers, self.mtp)

    @property
    def drafting(self) -> tuple[str, ...]:
        """What the names of tensors of layers that draft begin with, in the file of the trunk."""
        return tuple(f"blk.{il}." for il in range(self.n_layer, self.n_layer + self.n_mtp_in_file))

    @property
    def attentions(self) -> Iterator[AttentionConfig]:
        """The mixers that are attention, in the order of their layers."""
        return (layer.mixer for layer in self.all_layers if isinstance(layer.mixer, AttentionConfig))

    @property
    def latents(self) -> Iterator[LatentConfig]:
        """The mixers that are latent attention, in the order of their layers."""
        return (layer.mixer for layer in self.all_layers if isinstance(layer.mixer, LatentConfig))

    @property
    def compressed(self) -> Iterator[CompressedConfig]:
        """The mixers that are attention over compressed rows, in the order of their layers."""
        return (layer.mixer for layer in self.all_layers if isinstance(layer.mixer, CompressedConfig))

    @property
    def has_latents(self) -> bool:
        """Whether there are layers whose memory is latents, each of which is a key and a value at once."""
        return any(isinstance(layer.mixer, LatentConfig | CompressedConfig) for layer in self.all_layers)

    @property
    def owners(self) -> tuple[int, ...]:
        """The layers that have a memory of their own, in rising order; the index of the layer that drafts is n_layer."""
        mixers = enumerate(layer.mixer for layer in self.all_layers)
        return tuple(il for il, mixer in mixers if not isinstance(mixer, AttentionConfig) or mixer.source is None)

    @property
    def ropes(self) -> frozenset[RopeConfig]:
        """The rotations of all layers."""
        attentions = {mixer.rope for mixer in self.attentions if mixer.rope is not None}
        return frozenset(attentions.union((m.rope for m in self.latents), (m.rope for m in self.compressed)))

    def memory(self, il: int) -> int:
        """The index in ``owners`` of the layer whose memory layer il reads: itself, or the source of its keys and values."""
        mixer = self.all_layers[il].mixer
        source = mixer.source if isinstance(mixer, AttentionConfig) else None
        return self.owners.index(il if source is None else source)
