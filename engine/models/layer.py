"""One layer of a decoder, described by data (``engine/models/config.py``): a mixer of any kind, then a network of any kind.

Layer::

    x = x + rms_norm(mixer(norm(x, before_mixer)), after_mixer)
    x = x + rms_norm(network(norm(x, before_network)), after_network)

Parallel layer::

    n = norm(x, before_mixer)
    x = x + rms_norm(mixer(n), after_mixer) + rms_norm(network(n), after_network)      added from left to right

Layer without a mixer, or without a network: only the other one of the first two lines.

``norm`` is rms_norm or, if ``ModelConfig.norm`` says so, layer_norm.  Each of the four norms may be missing.  A result
without a norm after it is multiplied by ``residual_scale``.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.arrays import Array, Batch, Value
from engine.models.attention import load_attention
from engine.models.attention_config import AttentionConfig
from engine.models.compressed import load_compressed
from engine.models.compressed_config import CompressedConfig
from engine.models.delta_net_config import DeltaNetConfig
from engine.models.feed_forward import load_feed_forward, load_mixture
from engine.models.kda import load_kda
from engine.models.kda_config import KDAConfig
from engine.models.latent_attention import load_latent_attention
from engine.models.latent_config import LatentConfig
from engine.models.loader import Loader
from engine.models.mamba import load_mamba
from engine.models.mamba_config import MambaConfig
from engine.models.mixer import LayerMixer, Network
from engine.models.mixer_config import MixerConfig, NoMixer
from engine.models.network_config import DenseConfig, ExpertsConfig, NetworkConfig, NoNetwork
from engine.models.norm import Norm, load_norm
from engine.models.pair import MixerPair
from engine.models.pair_config import PairConfig
from engine.models.recurrent import load_recurrent
from engine.models.residual import Residual
from engine.models.short_conv import load_short_conv
from engine.models.short_conv_config import ShortConvConfig
from engine.ops.operations import Ops

MIXERS: dict[type[MixerConfig], Callable[[Loader, str, Any], LayerMixer | None]] = {
    NoMixer: lambda loader, blk, config: None,
    AttentionConfig: load_attention,
    LatentConfig: load_latent_attention,
    DeltaNetConfig: load_recurrent,
    ShortConvConfig: load_short_conv,
    MambaConfig: load_mamba,
    KDAConfig: load_kda,
    CompressedConfig: load_compressed,
    PairConfig: lambda loader, blk, config: _load_pair(loader, blk, config),
}
"""The function ``load(loader, blk, config)`` that loads a mixer, for each kind of configuration.  ``blk`` is the prefix of
the names of the layer's tensors."""

NETWORKS: dict[type[NetworkConfig], Callable[[Loader, str, Any], Network | None]] = {
    NoNetwork: lambda loader, blk, config: None,
    DenseConfig: load_feed_forward,
    ExpertsConfig: load_mixture,
}
"""The function ``load(loader, blk, config)`` that loads a network, for each kind of configuration.  ``blk`` is the prefix of
the names of the layer's tensors."""


@dataclass
class Layer:
    """The weights of one layer.

    mixer, network: None: the layer has only the other one.
    before_mixer, before_network: the norms of the inputs, or None.
    after_mixer, after_network: the way in which results are added to the residual stream.
    parallel: whether the network reads the input of the mixer.  :meth:`mix` then computes the whole layer.
    """

    mixer: LayerMixer | None
    network: Network | None
    before_mixer: Norm | None
    after_mixer: Residual
    before_network: Norm | None
    after_network: Residual
    parallel: bool = False

    def run(self, ops: Ops, x: Array, memory: Any, batch: Batch[Array]) -> Array:
        """Compute the layer: the residual stream after it from the residual stream x before it, float32 [rows, n_embd].

        memory: the cache of the mixer.
        """
        return self.feed(ops, self.mix(ops, x, memory, batch), batch)

    def mix(self, ops: Ops, x: Array, memory: Any, batch: Batch[Array]) -> Array:
        """Compute the mixer, or a parallel layer: the residual stream after it from the residual stream x before it, float32
        [rows, n_embd].

        memory: the cache of the mixer.
        """
        a = self.normalized(ops, x, self.before_mixer)
        if self.parallel:
            a = ops.plain(a)  # it is used twice
        assert self.mixer is not None
        x = self.mixer.add(ops, x, a, memory, batch, self.after_mixer)
        if not self.parallel:
            return x
        assert self.network is not None
        return self.network.add(ops, x, a, batch, self.after_network)

    def feed(self, ops: Ops, x: Array, batch: Batch[Array]) -> Array:
        """The residual stream x, and the result of the network added to it, float32 [rows, n_embd]; for a parallel layer,
        whose network :meth:`mix` has computed, only x."""
        if self.parallel:
            return x
        assert self.network is not None
        b = self.normalized(ops, x, self.before_network)
        return self.network.add(ops, x, b, batch, self.after_network)

    def remember(self, ops: Ops, x: Array, memory: Any, batch: Batch[Array]) -> None:
        """Store the cache entries of the rows of the residual stream x, float32 [rows, n_embd], in ``memory``, without
        computing the layer."""
        assert self.mixer is not None
        self.mixer.remember(ops, self.normalized(ops, x, self.before_mixer), memory, batch)

    def normalized(self, ops: Ops, x: Array, norm: Norm | None) -> Value:
        """The input of the mixer or of the network for the residual stream x, float32 [rows, n_embd].  norm: the norm before
        it, or None."""
        return x if norm is None else norm.apply(ops, x)


def load_layer(mixers: Loader, networks: Loader, il: int) -> Layer:
    """Load layer ``il`` of a file, which is a layer of the trunk, or the layer after the trunk, which drafts.

    mixers, networks: the loaders of the two parts of the layer.
    """
    c, blk = mixers.config, f"blk.{il}."
    config = c.all_layers[il]
    return Layer(
        MIXERS[type(config.mixer)](mixers, blk, config.mixer),
        NETWORKS[type(config.network)](networks, blk, config.network),
        _norm(mixers, blk, config.norms.before_mixer),
        _residual(mixers, blk, config.norms.after_mixer),
        _norm(networks, blk, config.norms.before_network),
        _residual(networks, blk, config.norms.after_network),
        config.parallel,
    )


def _load_pair(loader: Loader, blk: str, config: PairConfig) -> MixerPair:
    first, second = (MIXERS[type(mixer)](loader, blk, mixer) for mixer in (config.first, config.second))
    assert first is not None and second is not None
    return MixerPair(first, second)


def load_norms(layer: Layer, loader: Loader, il: int) -> Layer:
    """A copy of layer ``il`` with the norms of its network in the memory of another backend, that of ``loader``."""
    blk, norms = f"blk.{il}.", loader.config.all_layers[il].norms
    before, after = _norm(loader, blk, norms.before_network), _residual(loader, blk, norms.after_network)
    return replace(layer, before_network=before, after_network=after)


def _norm(loader: Loader, blk: str, name: str) -> Norm | None:
    return load_norm(loader, blk + name) if name else None


def _residual(loader: Loader, blk: str, name: str) -> Residual:
    c = loader.config
    return Residual(loader.vector(f"{blk}{name}.weight", c.n_embd) if name else None, c.norm_eps, c.residual_scale)
