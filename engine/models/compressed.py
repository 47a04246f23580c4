"""Attention over a window of latents and over compressed rows: weights and operations.

For normalized rows n (``engine/models/families/deepseek4.py`` describes the whole layer)::

    c = rms_norm(n Wqa);  q = rotate(rms_norm(c Wqb)) per head
    x = rotate(rms_norm(n Wkv))                         one latent per token, the key and value of all heads
    compressed rows of n Wkv' and n Wgate'              engine/cpu/compressor.py
    with an indexer: rows selected by rotate(c Wq''), n Wproj, and keys, which are computed like compressed rows
    o = inverse rotation of attention(q, latents of the window, compressed rows)
    the heads of each group times Woa, and the concatenated results of all groups times Wob

With ds4's rounding, x, compressed rows, keys of the indexer and its queries are rounded (``engine/cpu/rounding.py``).
"""

from dataclasses import dataclass, replace

import numpy as np

from engine.arrays import Array, Batch, Matrix, Value
from engine.cache.compressed import CompressedCache
from engine.models.compressed_config import CompressedConfig
from engine.models.linear import Linear, products
from engine.models.loader import Loader
from engine.models.mixer import Mixer
from engine.ops.compressor import Compressor
from engine.ops.operations import Ops


@dataclass
class RowWeights:
    """The weights that compute compressed rows, or keys of an indexer.

    values, scores: the linear layers of values and of scores, [overlap * d, n_embd] each.
    law: the parameters of the compressor.
    """

    values: Linear
    scores: Linear
    law: Compressor[Array]


@dataclass
class Indexer:
    """The weights of an indexer, which selects compressed rows.

    queries: the linear layer of the queries, [n_head * d, n_q].
    proj: the linear layer of the weights of heads, [n_head, n_embd].
    keys: the weights that compute the keys.
    """

    queries: Linear
    proj: Linear
    keys: RowWeights


@dataclass
class Compressed(Mixer):
    """The weights of the mixer.

    ones: float32 [d], ones, which stand for the weights of the norm of queries.
    table: float32 [n_ctx, 2, n_rot / 2], cosines and sines by position.
    """

    config: CompressedConfig
    q_a: Linear
    q_a_norm: Array
    q_b: Linear
    kv: Linear
    kv_norm: Array
    ones: Array
    sinks: Array
    table: Array
    output_a: Matrix
    rows: RowWeights | None
    indexer: Indexer | None
    eps: float

    def mix(self, ops: Ops, n: Value, memory: CompressedCache[Array], batch: Batch[Array]) -> Array:
        """Store latents, and the rows of completed blocks, in ``memory``, and compute attention for the normalized rows n
        [rows, n_embd].

        Returns the result before the layer ``output``, float32 [rows, n_group * n_out].
        """
        c = self.config
        made = [rows for rows in (self.rows, None if self.indexer is None else self.indexer.keys) if rows is not None]
        layers = [layer for rows in made for layer in (rows.values, rows.scores)]
        proj = [self.indexer.proj] if self.indexer is not None else []
        q, kv, *rest = products(ops, n, [self.q_a, self.kv, *layers, *proj])
        qr = ops.rms_norm(q, self.q_a_norm, self.eps)
        q, *others = products(ops, qr, [self.q_b, *([self.indexer.queries] if self.indexer is not None else [])])
        q = ops.rotate_tail(q, c.n_head, batch, self.table, self.ones, self.eps)
        self._keep(ops, kv, memory, batch)
        chosen = None
        if self.rows is not None and memory.compressed is not None:
            ops.compress(self.rows.law, rest[0], rest[1], memory.compressed, batch, self.table)
            if c.rounded:
                ops.round_rows(memory.compressed, c.ratio, c.rope.n_rot, batch)
        if self.indexer is not None and c.indexer is not None and memory.keys is not None:
            law = self.indexer.keys.law
            ops.compress(law, rest[2], rest[3], memory.keys, batch, self.table, True)
            own = c.indexer
            queries = ops.rotate_tail(others[0], own.n_head, batch, self.table)
            if c.rounded:
                ops.round_rows(memory.keys, c.ratio, c.rope.n_rot, batch, True)
                queries = ops.round_queries(queries, own.n_head)
            chosen = ops.choose_rows(queries, rest[4], own.factor, c.ratio, own.top_k, memory.keys, batch)
        o = ops.attend_compressed(q, memory, batch, c.scale, self.sinks, c.ratio, chosen)
        o = ops.rotate_tail(o, c.n_head, batch, self.table, None, 0.0, True)
        return ops.grouped_matmul(o, self.output_a, c.n_group)

    def remember(self, ops: Ops, n: Value, memory: CompressedCache[Array], batch: Batch[Array]) -> None:
        """Store the latents of the normalized rows n [rows, n_embd] in ``memory``.

        The layer must have no compressed rows.
        """
        assert self.rows is None
        self._keep(ops, self.kv.apply(ops, n), memory, batch)

    def _keep(self, ops: Ops, kv: Array, memory: CompressedCache[Array], batch: Batch[Array]) -> None:
        x = ops.rotate_tail(kv, 1, batch, self.table, self.kv_norm, self.eps)
        if self.config.rounded:
            x = ops.round_latents(x, self.config.rope.n_rot)
        ops.keep_latents(x, memory, batch)


def load_compressed(loader: Loader, blk: str, config: CompressedConfig) -> Compressed:
    """Load the tensors ``attn_q_a``, ``attn_q_b``, ``attn_kv``, ``attn_output_a``, ``attn_output_b``, the norms, and
    ``attn_sinks``; with compressed rows also ``attn_compressor_...``, and with an indexer ``indexer_compressor_...`` and
    ``indexer...``."""
    c, n_embd, ops = config, loader.config.n_embd, loader.ops
    group = c.n_head // c.n_group * c.d
    output = loader.weight(blk + "attn_output_a.weight", c.n_group * c.n_out, group)
    indexer = None
    if c.indexer is not None:
        own = c.indexer
        indexer = Indexer(
            loader.product(blk + "indexer.attn_q_b.weight", own.n_head * own.d, c.n_q),
            loader.product(blk + "indexer.proj.weight", own.n_head, n_embd),
            _load_rows(loader, blk + "indexer_compressor", c, own.d),
        )
    return Compressed(
        loader.product(blk + "attn_output_b.weight", n_embd, c.n_group * c.n_out),
        c,
        loader.product(blk + "attn_q_a.weight", c.n_q, n_embd),
        loader.vector(blk + "attn_q_a_norm.weight", c.n_q),
        loader.product(blk + "attn_q_b.weight", c.n_head * c.d, c.n_q),
        loader.product(blk + "attn_kv.weight", c.d, n_embd),
        loader.vector(blk + "attn_kv_a_norm.weight", c.d),
        ops.upload(np.ones(c.d, np.float32)),
        loader.vector(blk + "attn_sinks.weight", c.n_head),
        loader.rotary(c.rope).table,
        ops.weight(replace(output, stack=c.n_group)),
        _load_rows(loader, blk + "attn_compressor", c, c.d) if c.ratio else None,
        indexer,
        loader.config.norm_eps,
    )


def _load_rows(loader: Loader, name: str, c: CompressedConfig, d: int) -> RowWeights:
    width, n_embd = c.overlap * d, loader.config.n_embd
    return RowWeights(
        loader.product(f"{name}_kv.weight", width, n_embd),
        loader.product(f"{name}_gate.weight", width, n_embd),
        Compressor(
            c.ratio,
            c.overlap,
            loader.vector(f"{name}_ape.weight", c.ratio, width),
            loader.vector(f"{name}_norm.weight", d),
            loader.config.norm_eps,
        ),
    )
