"""The attention of one layer: weights and operations.

q, k, v = a Wq (+ bq), a Wk (+ bk), a Wv (+ bv);  o = attention(q, k, v);  the layer adds o Wo (+ bo) to the residual stream.
``AttentionConfig`` specifies the operations on q, k and v before attention.
"""

from dataclasses import dataclass

import numpy as np

from engine.arrays import Array, Batch, Value
from engine.cache.kv import AttentionCache
from engine.models.attention_config import AttentionConfig
from engine.models.linear import Linear, products
from engine.models.loader import Loader
from engine.models.mixer import Mixer
from engine.ops.heads import Heads
from engine.ops.operations import Ops
from engine.shares import HeadRows


@dataclass
class Attention(Mixer):
    """The weights of attention.

    inputs: the linear layers that compute q, k and v, or only q and k, which is then also v.
    heads: the parameters of attention.
    row_norms: the weights of the norms of whole rows of q and of k, float32 [n_head * d_k] and [n_head_kv * d_k]; or empty.
    centered: whether these are instead weights of layer norms of each head.
    table: float32 [n_ctx, 2, n_rot / 2], cosines and sines by position; None: there is no rotation.
    gate: the linear layer that computes a gate for each head; None: there are no such gates.
    value_scale: a factor of the result.
    """

    inputs: list[Linear]
    heads: Heads[Array]
    row_norms: list[Array]
    table: Array | None
    gate: Linear | None = None
    value_scale: float = 1.0
    centered: bool = False

    def mix(self, ops: Ops, a: Value, memory: AttentionCache[Array], batch: Batch[Array]) -> Value:
        """Store keys and values in ``memory`` and compute attention for the normalized rows a [rows, n_embd].

        Returns the result before the output layer, float32 [rows, n_head * d_v].
        """
        q, k, v = self._inputs(ops, a)
        o = self._scaled(ops, ops.attention(self.heads, q, k, v, memory, batch, self.table))
        return o if self.gate is None else ops.gate_heads(ops.plain(o), self.gate.apply(ops, a))

    def mix_up_to(
        self, ops: Ops, a: Value, memory: AttentionCache[Array], batch: Batch[Array], last: Array, reach: int = 0
    ) -> Value:
        """Store keys and values in ``memory`` and compute attention of each normalized row of a [rows, n_embd] up to a given
        position, which may be that of a later row.  A window ends there, too.

        last: int32 [rows], the last position to which each row attends, or its place if the layer has no window and sequences
            may be thinned (``AttentionCache.places``).
        reach: if it is not 0, ``last`` are the spans of the rows with this reach (``engine/ops/spans.py``).

        Returns the result before the output layer, float32 [rows, n_head * d_v].
        """
        q, k, v = self._inputs(ops, a)
        ops.remember(self.heads, k, v, memory, batch, self.table)
        window = 2 * reach + 1 if reach else memory.window
        return self._scaled(ops, ops.attend_past(self.heads, q, memory, batch, last, self.table, window, reach > 0))

    def _scaled(self, ops: Ops, o: Value) -> Value:
        return o if self.value_scale == 1.0 else ops.scale(ops.plain(o), self.value_scale)

    def _inputs(self, ops: Ops, a: Value) -> tuple[Array, Array, Array]:
        q, k, *v = products(ops, a, self.inputs, self.heads.biases is None)
        if self.row_norms:
            q, k = self._normalized(ops, q, 0), self._normalized(ops, k, 1)
        return q, k, v[0] if v else k

    def remember(self, ops: Ops, a: Value, memory: AttentionCache[Array], batch: Batch[Array]) -> None:
        """Store the keys and values of the normalized rows a [rows, n_embd] in ``memory``."""
        k, *v = products(ops, a, self.inputs[1:], self.heads.biases is None)
        if self.row_norms:
            k = self._normalized(ops, k, 1)
        ops.remember(self.heads, k, v[0] if v else k, memory, batch, self.table)

    def _normalized(self, ops: Ops, x: Array, which: int) -> Array:
        weight, eps = self.row_norms[which], self.heads.eps
        if not self.centered:
            return ops.plain(ops.rms_norm(x, weight, eps))
        rows, n, d = *x.shape, self.heads.d_k
        return ops.plain(ops.layer_norm(x.reshape(rows * n // d, d), weight, None, eps)).reshape(rows, n)


def load_attention(loader: Loader, blk: str, config: AttentionConfig) -> Attention:
    """Load the tensors ``attn_q``, ``attn_k``, ``attn_v`` (or ``attn_qkv``) and ``attn_output``, and, depending on the
    configuration, ``attn_q_norm``, ``attn_k_norm``, ``attn_sinks`` and ``attn_gate``."""
    c, n_embd = config, loader.config.n_embd
    rows = (c.n_head * c.d_k * (2 if c.gated else 1), c.n_head_kv * c.d_k, c.n_head_kv * c.d_v)
    names = ("attn_q", "attn_k") if c.keys_are_values else ("attn_q", "attn_k", "attn_v")
    inputs = loader.linears(blk, names, "attn_qkv", rows[: len(names)], c.n_in or n_embd, c.n_head_kv)
    centered = c.norm == "centered heads"
    by_row = centered or c.norm == "rows"
    norms = {"q_norm": c.n_head, "k_norm": c.n_head_kv} if by_row else dict.fromkeys(("q_norm", "k_norm"), 1)
    weights = (
        {name: _norm_weights(loader, c, f"{blk}attn_{name}.weight", n) for name, n in norms.items()} if c.norm else {}
    )
    biases = [layer.bias for layer in inputs if layer.bias is not None]
    # The rotation kernel can add all three biases, but a norm of whole rows must come after the biases.
    fused = len(biases) == 3 and not by_row
    heads: Heads[Array] = Heads(
        c.n_head,
        c.n_head_kv,
        c.d_k,
        c.d_v,
        neox=c.rope is None or c.rope.neox,
        scale=c.scale,
        eps=loader.config.norm_eps,
        q_norm=None if by_row else weights.get("q_norm"),
        k_norm=None if by_row else weights.get("k_norm"),
        biases=(biases[0], biases[1], biases[2]) if fused else None,
        gated=c.gated,
        v_normed=c.normed_values,
        norm_after=c.norm == "rotated heads",
        sinks=loader.vector(blk + "attn_sinks.weight", c.n_head) if c.sinks else None,
        query_scales=loader.temperature(c.temperature),
        softcap=c.softcap,
    )
    output = loader.linear(blk + "attn_output", n_embd, c.n_head * c.d_v)
    of_gates = HeadRows(c.n_head_kv, (c.n_head,))
    gate = loader.linear(blk + "attn_gate", c.n_head, c.n_in or n_embd, of_gates) if c.head_gates else None
    row_norms = list(weights.values()) if by_row else []
    return Attention(output, inputs, heads, row_norms, loader.table(c.rope), gate, c.value_scale, centered)


def _norm_weights(loader: Loader, config: AttentionConfig, name: str, n: int) -> Array:
    """The weights of a norm of queries or keys of n heads, one after another, which are 1 if it has none."""
    shape = (n, config.d_k) if config.norm == "centered heads" else (n * config.d_k,)
    weights = loader.array(name, *shape) if config.norm_weights else np.ones(shape, np.float32)
    return loader.ops.upload(weights.reshape(-1))
