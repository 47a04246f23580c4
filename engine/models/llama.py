"""The llama family: llama, qwen2 (adds biases to q, k, v), qwen3 (normalizes each head of q and k).

Layer (llama.cpp, ``src/models/llama.cpp``, ``qwen2.cpp``, ``qwen3.cpp``)::

    a = rms_norm(x, attn_norm)
    q, k, v = a Wq (+ bq), a Wk (+ bk), a Wv (+ bv)
    q, k = rms_norm(q), rms_norm(k) per head            qwen3
    q, k = rope(q), rope(k)                             pairs (2i, 2i+1) in llama, (i, i + n/2) in qwen
    x = x + attention(q, k, v) Wo (+ bo)
    x = x + swiglu(b Wgate, b Wup) Wdown,  b = rms_norm(x, ffn_norm)
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.models.base import Model
from engine.weights import Weight


@dataclass
class Layer:
    """Weights of one layer; biases and head norms are None where the file has none."""

    attn_norm: Any
    attn_q: Weight
    attn_k: Weight
    attn_v: Weight
    attn_output: Weight
    attn_q_bias: Any
    attn_k_bias: Any
    attn_v_bias: Any
    attn_output_bias: Any
    attn_q_norm: Any
    attn_k_norm: Any
    ffn_norm: Any
    ffn_gate: Weight
    ffn_up: Weight
    ffn_down: Weight


class Llama(Model):
    """llama, qwen2 and qwen3."""

    operations = ("embed", "rms_norm", "matmul", "rope", "append", "attend", "swiglu")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.neox = self.config.architecture != "llama"
        self.rotary = self._rotary(self.config.rope)

    def load_layer(self, il: int) -> Layer:
        """The weights of layer ``il``; qwen3 must have its head norms, the others have none."""
        c = self.config
        blk = f"blk.{il}."
        q_rows, k_rows, v_rows = c.n_head * c.d_k, c.n_head_kv * c.d_k, c.n_head_kv * c.d_v
        head_norms = c.architecture == "qwen3"
        return Layer(
            attn_norm=self._vector(blk + "attn_norm.weight", c.n_embd),
            attn_q=self._matrix(blk + "attn_q.weight", q_rows, c.n_embd),
            attn_k=self._matrix(blk + "attn_k.weight", k_rows, c.n_embd),
            attn_v=self._matrix(blk + "attn_v.weight", v_rows, c.n_embd),
            attn_output=self._matrix(blk + "attn_output.weight", c.n_embd, c.n_head * c.d_v),
            attn_q_bias=self._optional(blk + "attn_q.bias", q_rows),
            attn_k_bias=self._optional(blk + "attn_k.bias", k_rows),
            attn_v_bias=self._optional(blk + "attn_v.bias", v_rows),
            attn_output_bias=self._optional(blk + "attn_output.bias", c.n_embd),
            attn_q_norm=self._vector(blk + "attn_q_norm.weight", c.d_k) if head_norms else None,
            attn_k_norm=self._vector(blk + "attn_k_norm.weight", c.d_k) if head_norms else None,
            ffn_norm=self._vector(blk + "ffn_norm.weight", c.n_embd),
            ffn_gate=self._matrix(blk + "ffn_gate.weight", c.n_ff, c.n_embd),
            ffn_up=self._matrix(blk + "ffn_up.weight", c.n_ff, c.n_embd),
            ffn_down=self._matrix(blk + "ffn_down.weight", c.n_embd, c.n_ff),
        )

    def block(self, il: int, x: Any, positions: np.ndarray) -> Any:
        """One layer."""
        ops, c, layer, cache = self.ops, self.config, self.layers[il], self.cache.layers[il]
        rows = positions.size
        a = ops.rms_norm(x, layer.attn_norm, c.norm_eps)
        q, k, v = ops.matmul(a, layer.attn_q, layer.attn_k, layer.attn_v)
        q, k, v = (
            self._biased(q, layer.attn_q_bias),
            self._biased(k, layer.attn_k_bias),
            self._biased(v, layer.attn_v_bias),
        )
        q = q.reshape(rows, c.n_head, c.d_k)
        k = k.reshape(rows, c.n_head_kv, c.d_k)
        v = v.reshape(rows, c.n_head_kv, c.d_v)
        if layer.attn_q_norm is not None:
            q = ops.rms_norm(q, layer.attn_q_norm, c.norm_eps)
            k = ops.rms_norm(k, layer.attn_k_norm, c.norm_eps)
        table = self.rotary.table(self.cache.length)
        q = ops.rope(q, positions, table, self.neox)
        k = ops.rope(k, positions, table, self.neox)
        ops.append(cache, k, v, positions)
        (o,) = ops.matmul(ops.attend(q, cache, positions, c.attention_scale), layer.attn_output)
        x = ops.add(x, self._biased(o, layer.attn_output_bias))
        b = ops.rms_norm(x, layer.ffn_norm, c.norm_eps)
        gate, up = ops.matmul(b, layer.ffn_gate, layer.ffn_up)
        (down,) = ops.matmul(ops.swiglu(gate, up), layer.ffn_down)
        return ops.add(x, down)

    def _biased(self, x: Any, bias: Any) -> Any:
        return x if bias is None else self.ops.add(x, bias)
