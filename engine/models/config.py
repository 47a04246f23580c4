"""The immutable configuration of a model, with a mixer and a network for each layer."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from engine.models.mixer_config import MixerConfig
from engine.models.network_config import NetworkConfig
from engine.models.rope_config import RopeConfig

ASSISTANT = "gemma4-assistant"
"""The architecture of models that draft for a gemma4 model and cannot run on their own."""

EAGLE3 = "eagle3"
"""The architecture of networks of EAGLE-3, which draft for another model."""

DFLASH = "dflash"
"""The architecture of networks of DFlash and DSpark, which draft for another model."""

POOLINGS = ("none", "mean", "cls", "last", "rank")
"""The poolings, by their number in files (``pooling_type``): none, the mean of the outputs, that of the first token, that of
the last token, and the scores that a classifier gives a query with a document."""

JOINED = ("mean", "cls", "last")
"""The poolings that give a text a vector."""


class Norms(NamedTuple):
    """The names of a layer's norms in the file, before and after the mixer and the network; "" if there is no norm."""

    before_mixer: str = "attn_norm"
    after_mixer: str = ""
    before_network: str = "ffn_norm"
    after_network: str = ""


@dataclass(frozen=True)
class LayerConfig:
    """One layer: x = x + mixer(x), then x = x + network(x), with norms before or after each.  One of both may be missing
    (``NoMixer``, ``NoNetwork``).

    parallel: whether the network reads what the mixer reads, x = x + mixer(n) + network(n) with one norm n of x.  There is no
        norm before the network then.
    """

    mixer: MixerConfig
    network: NetworkConfig
    norms: Norms = Norms()
    parallel: bool = False


@dataclass(frozen=True)
class StreamsConfig:
    """A residual stream of several vectors.

    count: the number of vectors of n_embd elements that one part of a layer passes to the next.
    """

    count: int


@dataclass(frozen=True)
class HyperConfig(StreamsConfig):
    """Hyper-connections: streams that are mixed around each mixer and network.

    rounds: the number of times that the mixing matrix is normalized.
    epsilon: a number that is added to the elements and the sums of the mixing matrix.
    """

    rounds: int
    epsilon: float


@dataclass(frozen=True)
class ModelConfig:
    """The parameters of the forward pass.  Sizes are numbers of elements.

    layers: the layers of the trunk.
    mtp: the layers after the trunk that draft tokens (multi-token prediction), in the order of their chain.
    mtp_apart: whether these layers are in a separate file.
    mtp_normed: whether they read the output of the trunk after its norm.
    taps: the layers before which they read the residual stream instead, in the order of their inputs; n_layer: the output.
    n_embd_draft: the width of what they read at a position; 0: that of the residual stream.
    block: the most tokens that they draft together, as the layers of one network (DFlash); 0: they draft one at a time.
    n_mtp_in_file: the number of layers that draft in the file of the trunk.
    mtp_problem: why these layers cannot be used; "" if they can, or if there are none.
    embedding_scale, residual_scale, logit_scale: factors of the embedding, of the results that mixers and networks add to the
        residual stream, and of the logits.
    output_norm: the name of the norm before the logits in the file.
    final_softcap: the bound c in c tanh(x / c), which is applied to the logits; 0: logits are not bounded.
    norm: the norms before mixers, networks and the output: "rms" for rms_norm, "layer" for layer_norm.
    n_positions: the number of positions that have an embedding, which is added to that of the token; 0: there are none.
    n_per_layer: the width of per-layer embeddings; 0: there are none.
    n_embd_out: for an assistant, the width of the residual stream of its target.
    streams: the streams of a residual stream that consists of several; None: it is one vector.
    pooling: how the outputs of a text become one vector or score (``engine/models/pooling.py``); "": the file does not say.
    causal: whether a token attends to earlier tokens only, so that the model can generate text.
    n_token_types: the number of vectors for types of tokens, of which the first one is used; 0: there are none.
    n_dense: the width between the two matrices that outputs are multiplied by before they become a vector; 0: there are none.
    labels: the names of the scores that a classifier computes, of which the first one says how relevant a document is.
    warnings: what is odd about the file and lets it run, a sentence each.
    """

    architecture: str
    name: str
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    layers: tuple[LayerConfig, ...]
    mtp: tuple[LayerConfig, ...] = ()
    mtp_apart: bool = False
    mtp_normed: bool = True
    taps: tuple[int, ...] = ()
    n_embd_draft: int = 0
    block: int = 0
    n_mtp_in_file: int = 0
    mtp_problem: str = ""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    output_norm: str = "output_norm"
    final_softcap: float = 0.0
    norm: str = "rms"
    n_positions: int = 0
    n_per_layer: int = 0
    n_embd_out: int = 0
    streams: StreamsConfig | None = None
    pooling: str = ""
    causal: bool = True
    n_token_types: int = 0
    n_dense: int = 0
    labels: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def n_layer(self) -> int:
        """The number of layers of the trunk."""
        return len(self.layers)

    @property
    def all_layers(self) -> tuple[LayerConfig, ...]:
        """The layers of the trunk, followed by those that draft."""
        return (*self.layers, *self.mtp)

    @property
    def drafting(self) -> tuple[str, ...]:
        """The prefixes of the tensors of layers that draft in the file of the trunk."""
        return tuple(f"blk.{il}." for il in range(self.n_layer, self.n_layer + self.n_mtp_in_file))

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The layers that have their own cache, in ascending order.  The index of the first layer that drafts is n_layer."""
        mixers = enumerate(layer.mixer for layer in self.all_layers)
        return tuple(il for il, mixer in mixers if mixer.exists and mixer.memory_source is None)

    @property
    def ropes(self) -> frozenset[RopeConfig]:
        """The rotations of all layers."""
        return frozenset(rope for layer in self.all_layers for rope in layer.mixer.rotations)

    @property
    def n_shared(self) -> int:
        """The most elements of 4 bytes per row that mixers of the trunk take from earlier ones; 0: they take none."""
        return max(layer.mixer.n_shared for layer in self.layers)

    @property
    def rounding(self) -> str:
        """The name of the rule by which layers round stored rows; "" if they are not rounded."""
        return next((layer.mixer.rounding for layer in self.all_layers if layer.mixer.rounding), "")

    def memory(self, il: int) -> int:
        """The index in ``owners`` of the layer whose cache layer il, which has a mixer, reads: layer il, or the source of its
        keys and values."""
        source = self.all_layers[il].mixer.memory_source
        return self.owners.index(il if source is None else source)
