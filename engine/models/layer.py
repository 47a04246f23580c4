"""One layer of a decoder, described by data (``engine/models/config.py``): any mixer, then any network.

Layer::

    x = x + rms_norm(mixer(rms_norm(x, before_mixer)), after_mixer)
    x = x + rms_norm(network(rms_norm(x, before_network)), after_network)

Each of the four norms may be missing.  Without a norm after it, what is added is multiplied by ``residual_scale``.
"""

from dataclasses import dataclass
from typing import Any

from engine.arrays import Array, Batch, Matrix, Value
from engine.models.attention import Attention, load_attention
from engine.models.attention_config import AttentionConfig
from engine.models.compressed_config import CompressedConfig
from engine.models.delta_net_config import DeltaNetConfig
from engine.models.feed_forward import FeedForward, load_experts, load_feed_forward
from engine.models.latent_attention import LatentAttention, load_latent_attention
from engine.models.linear import Linear
from engine.models.loader import Loader
from engine.models.network_config import DenseConfig
from engine.models.recurrent import Recurrent, load_recurrent
from engine.ops.experts import Experts
from engine.ops.operations import Ops


@dataclass
class Layer:
    """Weights of one layer.  The four norms: float32 [n_embd] or None."""

    mixer: Attention | LatentAttention | Recurrent
    network: FeedForward | Experts[Array, Matrix]
    before_mixer: Array | None
    after_mixer: Array | None
    before_network: Array | None
    after_network: Array | None
    norm_eps: float
    residual_scale: float

    def run(self, ops: Ops, x: Array, memory: Any, batch: Batch[Array]) -> Array:
        """Residual stream in, residual stream out, float32 [rows, n_embd].  memory: that of the mixer's earlier tokens."""
        o = self.mixer.mix(ops, self._normalized(ops, x, self.before_mixer), memory, batch)
        x = self._added(ops, x, o, self.mixer.output, self.after_mixer)
        b = self._normalized(ops, x, self.before_network)
        if isinstance(self.network, FeedForward):
            return self._added(ops, x, self.network.hidden(ops, b), self.network.down, self.after_network)
        if self.after_network is None and self.residual_scale == 1.0:
            return ops.experts(self.network, x, b, None, batch.tokens)
        return self._joined(ops, x, ops.experts(self.network, None, b, None, batch.tokens), self.after_network)

    def remember(self, ops: Ops, x: Array, memory: Any, batch: Batch[Array]) -> None:
        """Store the keys and values of the rows of the residual stream x, float32 [rows, n_embd], in ``memory``; the mixer
        must be attention."""
        assert not isinstance(self.mixer, Recurrent)
        self.mixer.remember(ops, self._normalized(ops, x, self.before_mixer), memory, batch)

    def _normalized(self, ops: Ops, x: Array, norm: Array | None) -> Value:
        return x if norm is None else ops.rms_norm(x, norm, self.norm_eps)

    def _added(self, ops: Ops, x: Array, o: Value, output: Linear, norm: Array | None) -> Array:
        """x and the result o of a mixer or a network, through its output layer."""
        if norm is None and output.scale == self.residual_scale == 1.0:
            return ops.matmul_add(x, o, output.matrix, output.bias)
        (y,) = ops.matmul(o, output.matrix)
        return self._joined(ops, x, output.finish(ops, y), norm)

    def _joined(self, ops: Ops, x: Array, y: Array, norm: Array | None) -> Array:
        if norm is None:
            return ops.add(x, y, self.residual_scale)
        return ops.rms_norm_add(x, y, norm, self.norm_eps)


def load_layer(loader: Loader, il: int) -> Layer:
    """Layer ``il`` of a file: of the trunk, or the one after it, which drafts."""
    c, blk = loader.config, f"blk.{il}."
    config = c.all_layers[il]
    mixer, network = config.mixer, config.network
    assert not isinstance(mixer, CompressedConfig)  # of models with streams, whose layers have a class of their own

    def norm(name: str) -> Array | None:
        return loader.vector(f"{blk}{name}.weight", c.n_embd) if name else None

    own: Attention | LatentAttention | Recurrent
    if isinstance(mixer, AttentionConfig):
        own = load_attention(loader, blk, mixer)
    elif isinstance(mixer, DeltaNetConfig):
        own = load_recurrent(loader, blk, mixer)
    else:
        own = load_latent_attention(loader, blk, mixer)
    return Layer(
        own,
        load_feed_forward(loader, blk, network)
        if isinstance(network, DenseConfig)
        else load_experts(loader, blk, network),
        norm(config.norms.before_mixer),
        norm(config.norms.after_mixer),
        norm(config.norms.before_network),
        norm(config.norms.after_network),
        c.norm_eps,
        c.residual_scale,
    )
