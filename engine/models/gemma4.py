"""Gemma 4: sliding layers and global layers with wider heads, GeGLU, four norms per layer; dense, with a mixture of experts
in addition to the dense network, or with per-layer embeddings.

Layer (llama.cpp, ``src/models/gemma4.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = a Wq, a Wk, a Wv         v = a Wk where there is no Wv
    q, k = rope(rms_norm(q)), rope(rms_norm(k)) per head;  v = rms_norm(v) per head, without weights
    y = x + rms_norm(attention(q, k, v) Wo, post_attention_norm)    queries are not scaled
    f = geglu(b Wgate, b Wup) Wdown,  b = rms_norm(y, ffn_norm)
    mixture:    f = rms_norm(f, post_ffw_norm_1) + rms_norm(experts(rms_norm(y, pre_ffw_norm_2)), post_ffw_norm_2)
                experts are chosen by rms_norm(y, ffn_gate_inp.scale / sqrt(n_embd)) Wgate_inp
    h = y + rms_norm(f, post_ffw_norm)
    per layer:  h = h + rms_norm((gelu(h Winp_gate) * e) Wproj, post_norm)
    x = h * layer_output_scale

The last layers may have no keys and values of their own: they attend to those of the last layer of their kind that has.
The per-layer inputs e of all layers come from one table and one projection of the embedding (``engine/cpu/per_layer.py``).
One row of the table is read per token, so the table stays in host memory.
"""

from dataclasses import dataclass, replace

import numpy as np

from engine.arrays import Array, Matrix, Pass, Value
from engine.models.base import Model
from engine.models.experts import Experts
from engine.models.feed_forward import FeedForward
from engine.models.heads import Heads
from engine.models.loader import Loader
from engine.models.weights import join_rows


@dataclass
class Mixture:
    """The experts that run in addition to the dense network, and the norms around both."""

    post_ffw_norm_1: Array
    pre_ffw_norm_2: Array
    post_ffw_norm_2: Array
    router_norm: Array
    experts: Experts[Array, Matrix]


@dataclass
class PerLayer:
    """The weights that apply a layer's own embedding of the token."""

    inp_gate: Matrix
    proj: Matrix
    post_norm: Array


@dataclass
class Layer:
    """Weights of one layer; ``attn_k`` is None if it has no keys of its own, ``attn_v`` if its keys are also its values."""

    attn_norm: Array
    attn_q: Matrix
    attn_k: Matrix | None
    attn_v: Matrix | None
    attn_output: Matrix
    heads: Heads[Array]
    post_attention_norm: Array
    ffn_norm: Array
    ffn: FeedForward
    post_ffw_norm: Array
    scale: float
    mixture: Mixture | None = None
    per_layer: PerLayer | None = None


class Gemma4Loader(Loader):
    """Loads the layers of gemma4 models and of their assistants."""

    def load_layer(self, il: int) -> Layer:
        """The weights of layer ``il``."""
        c, blk = self.config, f"blk.{il}."
        n_head_kv, d, _ = c.heads(il)
        own = il < c.n_kv_layer and not c.n_embd_out
        if not own:
            # Some files contain these tensors although no layer reads them.
            self._taken.update(blk + name for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"))
        layer = Layer(
            attn_norm=self._vector(blk + "attn_norm.weight", c.n_embd),
            attn_q=self._matrix(blk + "attn_q.weight", c.n_head * d, c.n_embd),
            attn_k=self._matrix(blk + "attn_k.weight", n_head_kv * d, c.n_embd) if own else None,
            attn_v=None,
            attn_output=self._matrix(blk + "attn_output.weight", c.n_embd, c.n_head * d),
            heads=self._heads(blk, il, normed="qk" if own else "q", v_normed=True),
            post_attention_norm=self._vector(blk + "post_attention_norm.weight", c.n_embd),
            ffn_norm=self._vector(blk + "ffn_norm.weight", c.n_embd),
            ffn=self._dense(blk, c.n_ff if il < c.n_kv_layer else c.n_ff_tail),
            post_ffw_norm=self._vector(blk + "post_ffw_norm.weight", c.n_embd),
            scale=self._scalar(blk + "layer_output_scale.weight"),
        )
        if own and blk + "attn_v.weight" in self.gguf.tensors:
            layer.attn_v = self._matrix(blk + "attn_v.weight", n_head_kv * d, c.n_embd)
        if c.experts is not None and blk + "ffn_gate_inp.weight" in self.gguf.tensors:
            layer.mixture = self._mixture(blk)
        if c.n_per_layer:
            layer.per_layer = PerLayer(
                self._matrix(blk + "inp_gate.weight", c.n_per_layer, c.n_embd),
                self._matrix(blk + "proj.weight", c.n_embd, c.n_per_layer),
                self._vector(blk + "post_norm.weight", c.n_embd),
            )
        return layer

    def _scalar(self, name: str) -> float:
        return float(self._array(name, 1)[0]) if name in self.gguf.tensors else 1.0

    def _mixture(self, blk: str) -> Mixture:
        c, e = self.config, self.config.experts
        assert e is not None
        norm = self._array(blk + "ffn_gate_inp.scale", c.n_embd) * np.float32(1.0 / np.sqrt(c.n_embd))
        scales = None
        if blk + "ffn_down_exps.scale" in self.gguf.tensors:
            scales = self._vector(blk + "ffn_down_exps.scale", e.n_expert)
        gate, up = self._gate_up(blk)
        experts = Experts(
            e.n_expert,
            e.n_used,
            self.ops.weight(
                join_rows(blk + "ffn_gate_inp", self._array(blk + "ffn_gate_inp.weight", e.n_expert, c.n_embd))
            ),
            gate,
            up,
            self._matrix(blk + "ffn_down_exps.weight", c.n_embd, e.n_ff, e.n_expert),
            activation="geglu",
            scales=scales,
        )
        return Mixture(
            self._vector(blk + "post_ffw_norm_1.weight", c.n_embd),
            self._vector(blk + "pre_ffw_norm_2.weight", c.n_embd),
            self._vector(blk + "post_ffw_norm_2.weight", c.n_embd),
            self.ops.upload(norm),
            experts,
        )

    def _gate_up(self, blk: str) -> tuple[Matrix, Matrix]:
        """Gate and up of all experts; files store them separately, or stacked for each expert."""
        c, e = self.config, self.config.experts
        assert e is not None
        both = blk + "ffn_gate_up_exps.weight"
        if both in self.gguf.tensors:
            weight = self._weight(both, 2 * e.n_ff, c.n_embd, e.n_expert)
            gate, up = (self.ops.weight(half) for half in weight.halves(2 * e.n_ff))
            return gate, up
        gate, up = (
            self._matrix(f"{blk}ffn_{name}_exps.weight", e.n_ff, c.n_embd, e.n_expert) for name in ("gate", "up")
        )
        return gate, up

    def finish(self, layer: Layer, x: Array, o: Value, per_layer: Array | None) -> Array:
        """The rest of a layer after attention.

        x: the residual stream, float32 [rows, n_embd]; o: the result of attention; per_layer: the layer's embeddings of the
        tokens, float32 [rows, n_per_layer], or None.  Returns the new residual stream.
        """
        ops, eps = self.ops, self.config.norm_eps
        (o,) = ops.matmul(o, layer.attn_output)
        y = ops.rms_norm_add(x, o, layer.post_attention_norm, eps)
        gate, up = ops.matmul(ops.rms_norm(y, layer.ffn_norm, eps), layer.ffn.ffn_gate, layer.ffn.ffn_up)
        (f,) = ops.matmul(ops.geglu(gate, up), layer.ffn.ffn_down)
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
        (gate,) = ops.matmul(h, p.inp_gate)
        assert per_layer is not None
        (own,) = ops.matmul(ops.geglu(gate, per_layer), p.proj)
        return ops.rms_norm_add(h, own, p.post_norm, eps, layer.scale)


class Gemma4(Gemma4Loader, Model):
    """gemma4, text only."""

    layers: list[Layer]

    def load_rest(self) -> None:
        """Load the tables of rotation angles and the weights of per-layer embeddings."""
        c, n_ctx = self.config, self.cache.n_ctx
        self.rotary = self._rotary(c.rope, n_ctx)
        self.rotary_sliding = self._rotary(c.rope_sliding, n_ctx, factored=False)
        if c.n_per_layer:
            width = c.n_layer * c.n_per_layer
            table = self._weight("per_layer_token_embd.weight", c.n_vocab, width)
            self.per_layer_token_embd = self.ops.weight(table, host=True)
            self.per_layer_model_proj = self._matrix("per_layer_model_proj.weight", width, c.n_embd)
            self.per_layer_proj_norm = self._vector("per_layer_proj_norm.weight", c.n_per_layer)

    def begin(self, batch: Pass[Array], x: Array) -> Pass[Array]:
        """The pass, with the per-layer embeddings of its tokens if the model has them."""
        c, ops = self.config, self.ops
        if not c.n_per_layer:
            return batch
        e = ops.embed(self.per_layer_token_embd, batch.tokens, float(np.sqrt(np.float32(c.n_per_layer))))
        (m,) = ops.matmul(x, self.per_layer_model_proj)
        scale = float(np.float32(1.0 / np.sqrt(c.n_embd)))
        return replace(batch, per_layer=ops.per_layer_inputs(m, e, self.per_layer_proj_norm, scale, c.norm_eps))

    def block(self, il: int, x: Array, batch: Pass[Array]) -> Array:
        """One layer."""
        ops, c, layer = self.ops, self.config, self.layers[il]
        memory, rotary = self.cache.layers[c.memory(il)], self.rotary_sliding if c.sliding[il] else self.rotary
        a = ops.rms_norm(x, layer.attn_norm, c.norm_eps)
        if layer.attn_k is None:
            (q,) = ops.matmul(a, layer.attn_q)
            o = ops.attend_past(layer.heads, q, memory, batch, batch.positions, rotary.table, memory.window)
        else:
            q, k, *v = ops.matmul(a, layer.attn_q, layer.attn_k, *([layer.attn_v] if layer.attn_v is not None else []))
            o = ops.attention(layer.heads, q, k, v[0] if v else k, memory, batch, rotary.table)
        told = batch.per_layer
        if told is not None:
            told = told[il : il + 1].reshape(batch.rows, c.n_per_layer)
        return self.finish(layer, x, o, told)
