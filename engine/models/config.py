"""The immutable description of a model: its layers, each a mixer and a network with their own sizes."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.models.mixer_config import MixerConfig
from engine.models.network_config import NetworkConfig
from engine.models.rope_config import RopeConfig

ASSISTANT = "gemma4-assistant"
"""The architecture of models that draft for a gemma4 model and cannot run alone."""


class Norms(NamedTuple):
    """The names of a layer's norms in the file: before and after the mixer, before and after the network; "" for none."""

    before_mixer: str = "attn_norm"
    after_mixer: str = ""
    before_network: str = "ffn_norm"
    after_network: str = ""


@dataclass(frozen=True)
class LayerConfig:
    """One layer: x = x + mixer(x), then x = x + network(x), with norms before or after each."""

    mixer: MixerConfig
    network: NetworkConfig
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
    def owners(self) -> tuple[int, ...]:
        """The layers that have a memory of their own, in rising order; the index of the layer that drafts is n_layer."""
        mixers = enumerate(layer.mixer for layer in self.all_layers)
        return tuple(il for il, mixer in mixers if mixer.memory_source is None)

    @property
    def ropes(self) -> frozenset[RopeConfig]:
        """The rotations of all layers."""
        return frozenset(rope for layer in self.all_layers for rope in layer.mixer.rotations)

    @property
    def rounding(self) -> str:
        """The name of the rule by which layers round what they store; "" for none."""
        return next((layer.mixer.rounding for layer in self.all_layers if layer.mixer.rounding), "")

    def memory(self, il: int) -> int:
        """The index in ``owners`` of the layer whose memory layer il reads: itself, or the source of its keys and values."""
        source = self.all_layers[il].mixer.memory_source
        return self.owners.index(il if source is None else source)
