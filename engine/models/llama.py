"""The llama family: llama, qwen2 (adds biases to q, k, v), qwen3 (normalizes each head of q and k), qwen3moe (qwen3 with a
mixture of experts).

Layer (llama.cpp, ``src/models/llama.cpp``, ``qwen2.cpp``, ``qwen3.cpp``,
``qwen3moe.cpp``)::

    a = rms_norm(x, attn_norm)
    q, k, v = a Wq (+ bq), a Wk (+ bk), a Wv (+ bv)
    q, k = rms_norm(q), rms_norm(k) per head            qwen3
    q, k = rope(q), rope(k)                             pairs (2i, 2i+1) in llama, (i, i + n/2) in qwen
    x = x + attention(q, k, v) Wo (+ bo)
    x = x + swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(x, ffn_norm); in qwen3moe, experts(b)
"""

from dataclasses import dataclass

from engine.arrays import Array, Matrix, Pass, Value
from engine.models.base import Model
from engine.models.experts import Experts
from engine.models.feed_forward import FeedForward, feed_forward
from engine.models.heads import Heads


@dataclass
class Layer:
    """Weights of one layer; the biases and head norms of q, k and v are in ``heads``."""

    attn_norm: Array
    attn_q: Matrix
    attn_k: Matrix
    attn_v: Matrix
    attn_output: Matrix
    heads: Heads[Array]
    attn_output_bias: Array | None
    ffn_norm: Array
    ffn: FeedForward | Experts[Array, Matrix]


class Llama(Model):
    """llama, qwen2, qwen3 and qwen3moe."""

    layers: list[Layer]

    def load_rest(self) -> None:
        """Load the table of rotation angles."""
        self.rotary = self._rotary(self.config.rope, self.cache.n_ctx)

    def load_layer(self, il: int) -> Layer:
        """The weights of layer ``il``; qwen3 requires head norms, the others have none."""
        c = self.config
        blk = f"blk.{il}."
        q_rows, k_rows, v_rows = c.n_head * c.d_k, c.n_head_kv * c.d_k, c.n_head_kv * c.d_v
        return Layer(
            attn_norm=self._vector(blk + "attn_norm.weight", c.n_embd),
            attn_q=self._matrix(blk + "attn_q.weight", q_rows, c.n_embd),
            attn_k=self._matrix(blk + "attn_k.weight", k_rows, c.n_embd),
            attn_v=self._matrix(blk + "attn_v.weight", v_rows, c.n_embd),
            attn_output=self._matrix(blk + "attn_output.weight", c.n_embd, c.n_head * c.d_v),
            heads=self._heads(
                blk,
                il,
                normed="qk" if c.architecture in ("qwen3", "qwen3moe") else "",
                neox=c.architecture != "llama",
                biases=self._biases(blk, q_rows, k_rows, v_rows),
            ),
            attn_output_bias=self._optional(blk + "attn_output.bias", c.n_embd),
            ffn_norm=self._vector(blk + "ffn_norm.weight", c.n_embd),
            ffn=self._feed_forward(blk),
        )

    def _biases(self, blk: str, q_rows: int, k_rows: int, v_rows: int) -> tuple[Array, Array, Array] | None:
        """The biases of q, k and v; a file has all of them or none."""
        if not any(f"{blk}attn_{name}.bias" in self.gguf.tensors for name in "qkv"):
            return None
        q, k, v = (
            self._vector(f"{blk}attn_{n}.bias", rows) for n, rows in (("q", q_rows), ("k", k_rows), ("v", v_rows))
        )
        return q, k, v

    def block(self, il: int, x: Array, batch: Pass[Array]) -> Array:
        """One layer."""
        ops, c, layer = self.ops, self.config, self.layers[il]
        a = ops.rms_norm(x, layer.attn_norm, c.norm_eps)
        q, k, v = ops.matmul(a, layer.attn_q, layer.attn_k, layer.attn_v)
        o: Value = ops.attention(layer.heads, q, k, v, self.cache.layers[il], batch, self.rotary.table)
        if layer.attn_output_bias is None:
            x = ops.matmul_add(x, o, layer.attn_output)
        else:
            (o,) = ops.matmul(o, layer.attn_output)
            x = ops.add(x, ops.add(o, layer.attn_output_bias))
        b = ops.rms_norm(x, layer.ffn_norm, c.norm_eps)
        return feed_forward(ops, layer.ffn, x, b)
