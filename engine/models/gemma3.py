"""Gemma 3: sliding and global layers, four norms a layer, GeGLU, scaled embedding.

Layer (llama.cpp, ``src/models/gemma3.cpp``)::

    a = rms_norm(x, attn_norm);  q, k, v = a Wq, a Wk, a Wv
    q, k = rope(rms_norm(q)), rope(rms_norm(k)) per head; sliding layers have their own rotation and window
    y = x + rms_norm(attention(q, k, v) Wo, post_attention_norm)
    x = y + rms_norm(geglu(b Wgate, b Wup) Wdown, post_ffw_norm),  b = rms_norm(y, ffn_norm)
"""

from dataclasses import dataclass

from engine.arrays import Array, Matrix, Pass, Value
from engine.models.base import Model
from engine.models.heads import Heads


@dataclass
class Layer:
    """Weights of one layer."""

    attn_norm: Array
    attn_q: Matrix
    attn_k: Matrix
    attn_v: Matrix
    attn_output: Matrix
    heads: Heads[Array]
    post_attention_norm: Array
    ffn_norm: Array
    ffn_gate: Matrix
    ffn_up: Matrix
    ffn_down: Matrix
    post_ffw_norm: Array


class Gemma3(Model):
    """gemma3, text only."""

    layers: list[Layer]

    def load_rest(self) -> None:
        """Load the tables of rotation angles."""
        c, n_ctx = self.config, self.cache.n_ctx
        self.rotary, self.rotary_sliding = self._rotary(c.rope, n_ctx), self._rotary(c.rope_sliding, n_ctx)

    def load_layer(self, il: int) -> Layer:
        """The weights of layer ``il``."""
        c = self.config
        blk = f"blk.{il}."
        return Layer(
            attn_norm=self._vector(blk + "attn_norm.weight", c.n_embd),
            attn_q=self._matrix(blk + "attn_q.weight", c.n_head * c.d_k, c.n_embd),
            attn_k=self._matrix(blk + "attn_k.weight", c.n_head_kv * c.d_k, c.n_embd),
            attn_v=self._matrix(blk + "attn_v.weight", c.n_head_kv * c.d_v, c.n_embd),
            attn_output=self._matrix(blk + "attn_output.weight", c.n_embd, c.n_head * c.d_v),
            heads=self._heads(blk, il, normed="qk"),
            post_attention_norm=self._vector(blk + "post_attention_norm.weight", c.n_embd),
            ffn_norm=self._vector(blk + "ffn_norm.weight", c.n_embd),
            ffn_gate=self._matrix(blk + "ffn_gate.weight", c.n_ff, c.n_embd),
            ffn_up=self._matrix(blk + "ffn_up.weight", c.n_ff, c.n_embd),
            ffn_down=self._matrix(blk + "ffn_down.weight", c.n_embd, c.n_ff),
            post_ffw_norm=self._vector(blk + "post_ffw_norm.weight", c.n_embd),
        )

    def block(self, il: int, x: Array, batch: Pass[Array]) -> Array:
        """One layer."""
        ops, c, layer = self.ops, self.config, self.layers[il]
        a = ops.rms_norm(x, layer.attn_norm, c.norm_eps)
        q, k, v = ops.matmul(a, layer.attn_q, layer.attn_k, layer.attn_v)
        rotary = self.rotary_sliding if c.sliding[il] else self.rotary
        o: Value = ops.attention(layer.heads, q, k, v, self.cache.layers[il], batch, rotary.table)
        (o,) = ops.matmul(o, layer.attn_output)
        y = ops.rms_norm_add(x, o, layer.post_attention_norm, c.norm_eps)
        b = ops.rms_norm(y, layer.ffn_norm, c.norm_eps)
        gate, up = ops.matmul(b, layer.ffn_gate, layer.ffn_up)
        (down,) = ops.matmul(ops.geglu(gate, up), layer.ffn_down)
        return ops.rms_norm_add(y, down, layer.post_ffw_norm, c.norm_eps)
