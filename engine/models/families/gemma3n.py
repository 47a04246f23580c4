"""Gemma 3n E2B and E4B, text only: four residual streams with alternating updates (AltUp), a low-rank residual (LAuReL),
sparse gates in the first layers, per-layer embeddings.

Layer (llama.cpp, ``src/models/gemma3n.cpp``), for the streams x_0 .. x_3::

    p = predict(x, router(x_0))                                  router(z) = rms_norm(z, altup_router_norm) Wrouter / n_embd
    a = rms_norm(p_0, attn_norm)
    y = p_0 + rms_norm(attention(a) Wo, post_attention_norm)     as in engine/models/families/gemma4.py
    y = (y + a + rms_norm(a Wl Wr, laurel_post_norm)) / sqrt(2)
    f = y + rms_norm(geglu(sparse(b Wgate), b Wup) Wdown, post_ffw_norm),  b = rms_norm(y, ffn_norm)
    x = correct(p, f, router(f))
    g = rms_norm((gelu((x_0 * altup_correct_scale) Winp_gate) * e) Wproj, post_norm)      x_d = x_d + g for d > 0

``engine/cpu/altup.py`` describes predict and correct, and ``engine/cpu/sparsify.py`` sparse gates.  The first stream begins
as the embedding, and the others as its projections, scaled to its length.  At the end, the others are projected and scaled
likewise, and the logits are computed from the mean of the four.  The per-layer inputs e are those of Gemma 4.

Between the parts of a layer, the predictions and y are passed on: five vectors of n_embd elements.
"""

from dataclasses import dataclass, replace

import numpy as np

from engine.arrays import Array, Batch
from engine.limits import STREAMS
from engine.models.architecture import Architecture
from engine.models.config import LayerConfig, ModelConfig, StreamsConfig
from engine.models.families.gemma4 import Gemma4Loader, Gemma4Mixer, GemmaModel, PerLayer
from engine.models.families.gemma4_config import NORMS, SOFTCAP, sources_of
from engine.models.feed_forward import FeedForward, load_feed_forward
from engine.models.linear import Linear
from engine.models.loader import Loader
from engine.models.metadata import MAX_CONTEXT, Metadata
from engine.models.network_config import DenseConfig
from engine.models.rope_config import RopeConfig
from engine.models.weights import missing
from engine.ops.activation import GEGLU
from engine.ops.operations import Ops

ROOT_HALF = float(np.float32(0.5**0.5))

SPARSE_LAYERS, SPARSITY = 10, 1.6448533535003662
"""The first layers, whose gates are sparse, and the number of standard deviations, if the file does not specify them."""


def read(m: Metadata) -> ModelConfig:
    """The configuration of a file."""
    for name, value in (("altup.num_inputs", STREAMS), ("altup.active_idx", 0)):
        found = m.integer(name, value, 0)
        if found != value:
            m.refuse(name, f"is {found}, and {value} is supported")
    # Without the key, the weights of keys that the last layers do not have, zeros in published models, would be used.
    m.integer("attention.shared_kv_layers", None, 0, m.n_layer)
    slides, rope = m.sliding(5), m.rope()
    window = m.integer("attention.sliding_window", most=MAX_CONTEXT)
    near = RopeConfig(rope.n_rot, m.number("rope.freq_base_swa", 10000.0, 1.0, 1e12), factors=rope.factors)
    sources, sparsity = sources_of(m, slides), _sparsity(m)

    def layer(il: int) -> LayerConfig:
        own = {"rope": near, "window": window} if slides[il] else {"rope": rope}
        mixer = m.attention(il, scale=1.0, norm="heads", normed_values=True, source=sources[il], **own)
        return LayerConfig(mixer, replace(m.dense(il, GEGLU), sparsity=sparsity[il]), NORMS)

    return m.model(
        layer,
        embedding_scale=float(np.sqrt(np.float32(m.n_embd))),
        final_softcap=m.number("final_logit_softcapping", SOFTCAP),
        n_per_layer=m.integer("embedding_length_per_layer_input"),
        streams=StreamsConfig(STREAMS + 1),
    )


def _sparsity(m: Metadata) -> list[float | None]:
    """For each layer, the number of standard deviations; None: its gates are not sparse, which is -inf in the file."""
    name = "activation_sparsity_scale"
    if not m.has(name):
        return [SPARSITY if il < SPARSE_LAYERS else None for il in range(m.n_layer)]
    values = [float(value) for value in m.gguf.require(m.key(name), "f32[]", -np.inf, 100.0)]
    if len(values) < m.n_layer:
        m.refuse(name, f"has {len(values)} elements for {m.n_layer} layers: convert the model again")
    return [value if np.isfinite(value) else None for value in values]


@dataclass
class Router:
    """The weights of the router, which computes the coefficients of predictions and of corrections from a stream.

    norm: altup_router_norm / n_embd, float32 [n_embd].
    matrix: [4, n_embd].
    """

    norm: Array
    matrix: Linear
    norm_eps: float

    def apply(self, ops: Ops, x: Array) -> Array:
        """The coefficients of x [rows, n_embd] before tanh: float32 [rows, 4]."""
        return self.matrix.apply(ops, ops.rms_norm(x, self.norm, self.norm_eps))


@dataclass
class Gemma3nMixer:
    """What a layer computes up to its attention.

    coef: [16, 4], for predictions.
    laurel_l, laurel_r: [rank, n_embd] and [n_embd, rank].
    """

    router: Router
    coef: Array
    attention: Gemma4Mixer
    laurel_l: Linear
    laurel_r: Linear
    laurel_post_norm: Array


@dataclass
class Gemma3nNetwork:
    """What follows the attention of a layer.

    coef: [4, 4], for corrections.
    scale: [n_embd].
    """

    router: Router
    coef: Array
    scale: Array
    ffn_norm: Array
    ffn: FeedForward
    post_ffw_norm: Array
    per_layer: PerLayer


@dataclass
class Gemma3nLayer:
    """The two parts of one layer."""

    mixer: Gemma3nMixer
    network: Gemma3nNetwork


def load_router(loader: Loader, blk: str) -> Router:
    """Load the router of a layer."""
    c = loader.config
    norm = loader.array(blk + "altup_router_norm.weight", c.n_embd) * np.float32(1.0 / c.n_embd)
    matrix = loader.product(blk + "altup_router.weight", STREAMS, c.n_embd)
    return Router(loader.ops.upload(norm), matrix, c.norm_eps)


def load_mixer(loader: Gemma4Loader, il: int, router: Router) -> Gemma3nMixer:
    """Load what layer ``il`` computes up to its attention."""
    c, blk = loader.config, f"blk.{il}."
    name = blk + "laurel_l.weight"
    if not loader.has(name):
        raise missing(loader.gguf, name)
    rank = loader.gguf.tensors[name].shape[0]
    return Gemma3nMixer(
        router,
        loader.vector(blk + "altup_predict_coef.weight", STREAMS * STREAMS, STREAMS),
        loader.load_mixer(il),
        loader.product(name, rank, c.n_embd),
        loader.product(blk + "laurel_r.weight", c.n_embd, rank),
        loader.vector(blk + "laurel_post_norm.weight", c.n_embd),
    )


def load_network(loader: Loader, il: int, router: Router) -> Gemma3nNetwork:
    """Load what follows the attention of layer ``il``."""
    c, blk, network = loader.config, f"blk.{il}.", loader.config.layers[il].network
    assert isinstance(network, DenseConfig)
    return Gemma3nNetwork(
        router,
        loader.vector(blk + "altup_correct_coef.weight", STREAMS, STREAMS),
        loader.vector(blk + "altup_correct_scale.weight", c.n_embd),
        loader.vector(blk + "ffn_norm.weight", c.n_embd),
        load_feed_forward(loader, blk, network),
        loader.vector(blk + "post_ffw_norm.weight", c.n_embd),
        PerLayer(
            loader.product(blk + "inp_gate.weight", c.n_per_layer, c.n_embd),
            loader.product(blk + "proj.weight", c.n_embd, c.n_per_layer),
            loader.vector(blk + "post_norm.weight", c.n_embd),
        ),
    )


class Gemma3n(GemmaModel):
    """A model with the architecture gemma3n, for text only."""

    layers: list[Gemma3nLayer]

    def load_layer(self, il: int) -> Gemma3nLayer:
        """The weights of layer ``il``."""
        mixers, networks = self.loader(self.placement.mixers[il]), self.loader(self.placement.networks[il])
        assert isinstance(mixers, Gemma4Loader)
        router = load_router(mixers, f"blk.{il}.")
        other = router if networks is mixers else load_router(networks, f"blk.{il}.")
        return Gemma3nLayer(load_mixer(mixers, il, router), load_network(networks, il, other))

    def load_rest(self) -> None:
        """Load the weights of per-layer embeddings, and those of the streams before and after the layers."""
        super().load_rest()
        c, first = self.config, self.loader(self.placement.first)
        sizes = c.n_embd, c.n_embd, STREAMS - 1
        self.altup_proj = Linear(first.ops.weight(replace(first.weight("altup_proj.weight", *sizes), stack=1)))
        self.altup_unembd_proj = self.matrix("altup_unembd_proj.weight", *sizes)

    def enter(self, ops: Ops, x: Array) -> Array:
        """The streams of the embeddings x [rows, n_embd]: float32 [rows, 5 n_embd]."""
        return ops.altup_enter(x, self.altup_proj.apply(ops, x))

    def leave(self, ops: Ops, x: Array) -> Array:
        """The mean of the streams x [rows, 5 n_embd] after their projection: float32 [rows, n_embd]."""
        n = self.config.n_embd
        others = ops.columns(x, n, (STREAMS - 1) * n)
        return ops.altup_leave(x, ops.grouped_matmul(others, self.altup_unembd_proj, STREAMS - 1))

    def begin(self, batch: Batch[Array], x: Array) -> Batch[Array]:
        """The batch, extended by the per-layer embeddings of its tokens; x: the streams, float32 [rows, 5 n_embd]."""
        return super().begin(batch, self.placement.first.columns(x, 0, self.config.n_embd))

    def block(self, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute layer ``il``: the streams after it from the streams x before it, float32 [rows, 5 n_embd]."""
        p, y = self._predicted(self.ops, il, x, batch)
        return self._corrected(self.ops, il, p, y, batch)

    def mix(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """The predictions from the streams x [rows, 5 n_embd], and the first of them after attention: float32 [rows,
        5 n_embd]."""
        p, y = self._predicted(ops, il, x, batch)
        return ops.join_columns([ops.columns(p, 0, STREAMS * self.config.n_embd), y])

    def feed(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """The streams after layer ``il`` from the result x of :meth:`mix`: float32 [rows, 5 n_embd]."""
        n = self.config.n_embd
        return self._corrected(ops, il, x, ops.columns(x, STREAMS * n, n), batch)

    def _predicted(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> tuple[Array, Array]:
        """The predictions from the streams x, float32 [rows, 5 n_embd], and the first of them after attention, float32
        [rows, n_embd]."""
        c, layer = self.config, self.layer(ops, il, False).mixer
        p = ops.altup_predict(x, layer.router.apply(ops, ops.columns(x, 0, c.n_embd)), layer.coef)
        active = ops.columns(p, 0, c.n_embd)
        a = ops.plain(ops.rms_norm(active, layer.attention.attn_norm, c.norm_eps))
        low = layer.laurel_r.apply(ops, layer.laurel_l.apply(ops, a))
        y = ops.add(active, ops.rms_norm_add(a, low, layer.laurel_post_norm, c.norm_eps))
        o = layer.attention.attn_output.apply(ops, self.attend(ops, il, layer.attention, a, batch))
        return p, ops.rms_norm_add(y, o, layer.attention.post_attention_norm, c.norm_eps, ROOT_HALF)

    def _corrected(self, ops: Ops, il: int, p: Array, y: Array, batch: Batch[Array]) -> Array:
        """The streams after layer ``il``, float32 [rows, 5 n_embd], from the results of :meth:`_predicted`."""
        c, layer = self.config, self.layer(ops, il, True).network
        hidden = layer.ffn.hidden(ops, ops.rms_norm(y, layer.ffn_norm, c.norm_eps))
        f = ops.rms_norm_add(y, layer.ffn.down.apply(ops, hidden), layer.post_ffw_norm, c.norm_eps)
        m, own = layer.router.apply(ops, f), layer.per_layer
        assert batch.per_layer is not None
        told = batch.per_layer[il : il + 1].reshape(batch.rows, c.n_per_layer)
        gate = own.inp_gate.apply(ops, ops.altup_active(p, f, m, layer.coef, layer.scale))
        first = own.proj.apply(ops, ops.activate(GEGLU, gate, told))
        first = ops.plain(ops.rms_norm(first, own.post_norm, c.norm_eps))
        return ops.altup_correct(p, f, m, layer.coef, first)


ARCHITECTURES = (
    Architecture("gemma3n", "Gemma 3n E2B and E4B", read, "transformers Gemma3nForCausalLM", model=Gemma3n),
)
