"""Gemma 4: sliding layers and global layers with wider heads, GeGLU, four norms per layer; dense, with a mixture of experts
in addition to the dense network, or with per-layer embeddings.

Layer (llama.cpp, ``src/models/gemma4.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = a Wq, a Wk, a Wv         v = a Wk if there is no Wv
    q, k = rope(rms_norm(q)), rope(rms_norm(k)) per head;  v = rms_norm(v) per head, without weights
    y = x + rms_norm(attention(q, k, v) Wo, post_attention_norm)    queries are not scaled
    f = geglu(b Wgate, b Wup) Wdown,  b = rms_norm(y, ffn_norm)
    mixture:    f = rms_norm(f, post_ffw_norm_1) + rms_norm(experts(rms_norm(y, pre_ffw_norm_2)), post_ffw_norm_2)
                experts are chosen by rms_norm(y, ffn_gate_inp.scale / sqrt(n_embd)) Wgate_inp
    h = y + rms_norm(f, post_ffw_norm)
    per layer:  h = h + rms_norm((gelu(h Winp_gate) * e) Wproj, post_norm)
    x = h * layer_output_scale

The last layers may have no keys and values.  They attend to those of the last layer of the same kind that has them.  The
per-layer inputs e of all layers are computed from one table and one projection of the embedding
(``engine/cpu/per_layer.py``).  The table stays in host memory, because a token reads only one row.
"""

from dataclasses import dataclass, replace

import numpy as np

from engine.arrays import Array, Batch, Matrix, Value
from engine.models.architecture import Architecture
from engine.models.attention_config import AttentionConfig
from engine.models.base import Model
from engine.models.families.gemma4_config import read
from engine.models.feed_forward import FeedForward, gate_up_experts, load_feed_forward
from engine.models.linear import Linear, products
from engine.models.loader import Loader
from engine.models.network_config import DenseConfig, ExpertsConfig
from engine.models.weights import join_rows
from engine.ops.activation import GEGLU
from engine.ops.experts import Experts
from engine.ops.heads import Heads
from engine.ops.operations import Ops
from engine.shares import UNDIVIDED, HeadRows


@dataclass
class AddedExperts:
    """The experts, which run in addition to the dense network, and the norms around both."""

    post_ffw_norm_1: Array
    pre_ffw_norm_2: Array
    post_ffw_norm_2: Array
    router_norm: Array
    experts: Experts[Array, Matrix]


@dataclass
class PerLayer:
    """The weights that apply the per-layer embedding of a token."""

    inp_gate: Linear
    proj: Linear
    post_norm: Array


@dataclass
class Gemma4Mixer:
    """The weights of the attention of one layer.

    attn_k: None if the layer has no keys and values.
    attn_v: None if the layer has no keys and values, or if its keys are also its values.
    """

    attn_norm: Array
    attn_q: Linear
    attn_k: Linear | None
    attn_v: Linear | None
    attn_output: Linear
    heads: Heads[Array]
    table: Array
    window: int
    post_attention_norm: Array


@dataclass
class Gemma4Network:
    """What follows the attention of a layer."""

    ffn_norm: Array
    ffn: FeedForward
    post_ffw_norm: Array
    scale: float
    mixture: AddedExperts | None = None
    per_layer: PerLayer | None = None


@dataclass
class Gemma4Layer:
    """The two parts of one layer."""

    mixer: Gemma4Mixer
    network: Gemma4Network


class Gemma4Loader(Loader):
    """Loads the layers of gemma4 models and of their assistants."""

    def load_mixer(self, il: int) -> Gemma4Mixer:
        """Load the attention of layer ``il``."""
        c, blk, mixer = self.config, f"blk.{il}.", self.config.layers[il].mixer
        assert isinstance(mixer, AttentionConfig) and mixer.rope is not None
        d, rows, kv_rows = mixer.d_k, mixer.n_head * mixer.d_k, mixer.n_head_kv * mixer.d_k
        own = mixer.source is None and not c.n_embd_out
        if not own:
            # Some files contain these tensors although no layer reads them.
            self.ignore(*(blk + name for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")))
        q_norm = self.vector(blk + "attn_q_norm.weight", d)
        k_norm = self.vector(blk + "attn_k_norm.weight", d) if own else None
        heads = Heads(mixer.n_head, mixer.n_head_kv, d, d, True, mixer.scale, c.norm_eps, q_norm, k_norm)
        q, k, v = self._inputs(blk, rows, kv_rows, mixer.n_head_kv, own)
        return Gemma4Mixer(
            attn_norm=self.vector(blk + "attn_norm.weight", c.n_embd),
            attn_q=q,
            attn_k=k,
            attn_v=v,
            attn_output=self.linear(blk + "attn_output", c.n_embd, rows),
            heads=replace(heads, v_normed=mixer.normed_values),
            table=self.rotary(mixer.rope).table,
            window=mixer.window,
            post_attention_norm=self.vector(blk + "post_attention_norm.weight", c.n_embd),
        )

    def load_network(self, il: int) -> Gemma4Network:
        """What follows the attention of layer ``il``."""
        c, blk, network = self.config, f"blk.{il}.", self.config.layers[il].network
        experts = network if isinstance(network, ExpertsConfig) else None
        dense = experts.beside if experts is not None else network
        assert isinstance(dense, DenseConfig)
        layer = Gemma4Network(
            ffn_norm=self.vector(blk + "ffn_norm.weight", c.n_embd),
            ffn=load_feed_forward(self, blk, dense),
            post_ffw_norm=self.vector(blk + "post_ffw_norm.weight", c.n_embd),
            scale=self.scalar(blk + "layer_output_scale.weight"),
        )
        if experts is not None:
            layer.mixture = self._mixture(blk, experts)
        if c.n_per_layer:
            layer.per_layer = PerLayer(
                self.product(blk + "inp_gate.weight", c.n_per_layer, c.n_embd),
                self.product(blk + "proj.weight", c.n_embd, c.n_per_layer),
                self.vector(blk + "post_norm.weight", c.n_embd),
            )
        return layer

    def _inputs(
        self, blk: str, rows: int, kv_rows: int, n_head_kv: int, own: bool
    ) -> tuple[Linear, Linear | None, Linear | None]:
        """Load the linear layers of queries, keys and values.  Some files have all three in one tensor.

        n_head_kv: the number of heads of keys and values, to which the rows of all three belong.
        own: whether the layer has its own keys and values.  If it has no linear layer of values, None is returned for it, and
            the keys are also the values.
        """
        n_embd, names = self.config.n_embd, ("attn_q", "attn_k", "attn_v")
        if self.has(blk + "attn_qkv.weight"):
            fused = self.linears(blk, names, "attn_qkv", (rows, kv_rows, kv_rows), n_embd, n_head_kv)
            return fused[0], fused[1] if own else None, fused[2] if own else None
        of_q, of_kv = HeadRows(n_head_kv, (rows,)), HeadRows(n_head_kv, (kv_rows,))
        k = self.linear(blk + "attn_k", kv_rows, n_embd, of_kv) if own else None
        has_v = own and self.has(blk + "attn_v.weight")
        v = self.linear(blk + "attn_v", kv_rows, n_embd, of_kv) if has_v else None
        return self.linear(blk + "attn_q", rows, n_embd, of_q), k, v

    def _mixture(self, blk: str, e: ExpertsConfig) -> AddedExperts:
        c = self.config
        norm = self.array(blk + "ffn_gate_inp.scale", c.n_embd) * np.float32(1.0 / np.sqrt(c.n_embd))
        router = join_rows(blk + "ffn_gate_inp", self.array(blk + "ffn_gate_inp.weight", e.n_expert, c.n_embd))
        gate, up = gate_up_experts(self, blk, e)
        experts = Experts(
            e.n_expert,
            e.n_used,
            self.ops.weight(replace(router, heads=UNDIVIDED)),
            gate,
            up,
            self.matrix(blk + "ffn_down_exps.weight", c.n_embd, e.n_ff, e.n_expert),
            activation=e.activation,
            scales=self.optional(blk + "ffn_down_exps.scale", e.n_expert),
        )
        return AddedExperts(
            self.vector(blk + "post_ffw_norm_1.weight", c.n_embd),
            self.vector(blk + "pre_ffw_norm_2.weight", c.n_embd),
            self.vector(blk + "post_ffw_norm_2.weight", c.n_embd),
            self.ops.upload(norm),
            experts,
        )

    def add_attention(self, ops: Ops, layer: Gemma4Mixer, x: Array, o: Value) -> Array:
        """Add the output of attention to the residual stream.

        x: the residual stream, float32 [rows, n_embd].
        o: the result of attention, float32 [rows, n_head * d_v].

        Returns the residual stream after the mixer, float32 [rows, n_embd].
        """
        o = layer.attn_output.apply(ops, o)
        return ops.rms_norm_add(x, o, layer.post_attention_norm, self.config.norm_eps)

    def add_network(self, ops: Ops, layer: Gemma4Network, y: Array, per_layer: Array | None) -> Array:
        """Compute the rest of a layer after attention.

        y: the residual stream, float32 [rows, n_embd].
        per_layer: the per-layer embeddings of the tokens, float32 [rows, n_per_layer], or None.

        Returns the residual stream after the layer, float32 [rows, n_embd].
        """
        eps = self.config.norm_eps
        hidden = layer.ffn.hidden(ops, ops.rms_norm(y, layer.ffn_norm, eps))
        f = layer.ffn.down.apply(ops, hidden)
        m = layer.mixture
        if m is not None:
            f = ops.plain(ops.rms_norm(f, m.post_ffw_norm_1, eps))
            router_x = ops.rms_norm(y, m.router_norm, eps)
            e = ops.experts(m.experts, None, ops.rms_norm(y, m.pre_ffw_norm_2, eps), router_x)
            f = ops.rms_norm_add(f, e, m.post_ffw_norm_2, eps)
        p = layer.per_layer
        if p is None:
            return ops.rms_norm_add(y, f, layer.post_ffw_norm, eps, layer.scale)
        h = ops.rms_norm_add(y, f, layer.post_ffw_norm, eps)
        gate = p.inp_gate.apply(ops, h)
        assert per_layer is not None
        own = p.proj.apply(ops, ops.activate(GEGLU, gate, per_layer))
        return ops.rms_norm_add(h, own, p.post_norm, eps, layer.scale)


class GemmaModel(Gemma4Loader, Model):
    """What models with the architectures gemma3n and gemma4 share: attention, and per-layer embeddings."""

    loader_type = Gemma4Loader

    def load_rest(self) -> None:
        """Load the weights of per-layer embeddings."""
        c, first = self.config, self.loader(self.placement.first)
        if c.n_per_layer:
            width = c.n_layer * c.n_per_layer
            table = first.weight("per_layer_token_embd.weight", c.n_vocab, width)
            self.per_layer_token_embd = first.ops.weight(table, host=True)
            self.per_layer_model_proj = first.product("per_layer_model_proj.weight", width, c.n_embd)
            self.per_layer_proj_norm = first.vector("per_layer_proj_norm.weight", c.n_per_layer)

    def begin(self, batch: Batch[Array], x: Array) -> Batch[Array]:
        """The batch, extended by the per-layer embeddings of its tokens if the model has them.

        x: the embeddings of the tokens, float32 [rows, n_embd].
        """
        c, ops = self.config, self.placement.first
        if not c.n_per_layer:
            return batch
        e = ops.embed(self.per_layer_token_embd, batch.tokens, float(np.sqrt(np.float32(c.n_per_layer))))
        m = self.per_layer_model_proj.apply(ops, x)
        scale = float(np.float32(1.0 / np.sqrt(c.n_embd)))
        return replace(batch, per_layer=ops.per_layer_inputs(m, e, self.per_layer_proj_norm, scale, c.norm_eps))

    def attend(self, ops: Ops, il: int, layer: Gemma4Mixer, a: Value, batch: Batch[Array]) -> Value:
        """Compute the attention of layer ``il`` for its normalized input a, float32 [rows, n_embd].

        layer: its weights.

        Returns float32 [rows, n_head * d_v], before the output projection.
        """
        memory, table = self.memory(il, ops), layer.table
        if layer.attn_k is None:
            q = layer.attn_q.apply(ops, a)
            return ops.attend_past(layer.heads, q, memory, batch, memory.places(batch), table, memory.window)
        given = [layer.attn_q, layer.attn_k, *([layer.attn_v] if layer.attn_v is not None else [])]
        q, k, *v = products(ops, a, given)
        return ops.attention(layer.heads, q, k, v[0] if v else k, memory, batch, table)


class Gemma4(GemmaModel):
    """A model with the architecture gemma4, for text only."""

    can_be_shared = True
    layers: list[Gemma4Layer]

    def load_layer(self, il: int) -> Gemma4Layer:
        """The weights of layer ``il``."""
        mixers, networks = self.loader(self.placement.mixers[il]), self.loader(self.placement.networks[il])
        assert isinstance(mixers, Gemma4Loader) and isinstance(networks, Gemma4Loader)
        return Gemma4Layer(mixers.load_mixer(il), networks.load_network(il))

    def mix(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute the attention of layer ``il``: the residual stream after it from x before it, float32 [rows, n_embd]."""
        layer = self.layer(ops, il, False).mixer
        a = ops.rms_norm(x, layer.attn_norm, self.config.norm_eps)
        return self.add_attention(ops, layer, x, self.attend(ops, il, layer, a, batch))

    def feed(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """What follows the attention of a layer: residual stream in, residual stream out, float32 [rows, n_embd]."""
        told = batch.per_layer
        if told is not None:
            told = told[il : il + 1].reshape(batch.rows, self.config.n_per_layer)
        return self.add_network(ops, self.layer(ops, il, True).network, x, told)


ARCHITECTURES = (Architecture("gemma4", "Gemma 4", read, "transformers Gemma4ForCausalLM", "an assistant", Gemma4),)
