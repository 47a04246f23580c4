"""The latent attention of one layer (multi-head latent attention, DeepSeek-V2, 2024): weights and operations.

c, k' = a Wkv_a;  q, q' = a Wq, or rms_norm(a Wq_a) Wq_b, for each head;  a position is stored as [rms_norm(c), rope(k')];
o = attention of queries [Wk_b q, rope(q')] over the stored vectors, then Wv_b o for each head
(``Operations.latent_attention``);  the layer adds o Wo to the residual stream.  Some models do not rotate q' and k'.

This is the *absorbed* form: Wk_b is applied to the query of a head instead of to all latents, q . (Wk_b^T c) = (Wk_b q) . c,
and Wv_b is applied to a weighted sum of latents instead of to each latent.  Prefill and decode both use this form, so that
the bits are the same.

With an indexer (DeepSeek-V3.2, 2025), a position also has a key, layer_norm(a Wk') of d elements, and a token attends to the
top_k positions that it sees with the largest sum over h of (a Wproj)_h relu(q''_h . key) / sqrt(n_index d), where q'' =
rms_norm(a Wq_a) Wq''; the first elements of keys and of q'' are rotated.  In files, these elements are in an order of the
model: here they are the last ones, in pairs of neighbours, in keys and queries alike, which does not change their products.
A layer without an indexer may attend to the positions that the last layer with one has selected (``Batch.choice``).
"""

from dataclasses import dataclass, replace

import numpy as np
from gguf.quants import dequantize

from engine.arrays import Array, Batch, Matrix, Value
from engine.cache.latent import LatentCache
from engine.errors import ModelError
from engine.models.indexer_config import IndexerConfig
from engine.models.latent_config import LatentConfig
from engine.models.linear import Linear, products
from engine.models.loader import Loader
from engine.models.mixer import Mixer
from engine.models.weights import join_rows
from engine.ops.latent import Latent
from engine.ops.operations import Ops
from engine.ops.weight import Weight

KEY_EPS = 1e-6
"""The epsilon of the norm of an indexer's keys, for which files have no key."""


@dataclass
class PositionIndexer:
    """The weights of an indexer, which selects positions.

    queries: the linear layer of the queries, [n_head * d, q_rank].
    keys: the linear layer of the keys, [d, n_embd].
    norm, bias: float32 [d], the weights of the norm of keys.
    proj: the linear layer of the weights of heads, [n_head, n_embd].
    table: float32 [n_ctx, 2, n_rope / 2], cosines and sines by position.
    """

    config: IndexerConfig
    queries: Linear
    keys: Linear
    norm: Array
    bias: Array
    proj: Linear
    table: Array

    def keep(self, ops: Ops, k: Array, memory: LatentCache[Array], batch: Batch[Array]) -> None:
        """Store the keys of the rows in ``memory``.  k: the results of ``keys``, float32 [rows, d]."""
        assert memory.keys is not None
        normed = ops.plain(ops.layer_norm(k, self.norm, self.bias, KEY_EPS))
        ops.keep_keys(ops.rotate_tail(normed, 1, batch, self.table), memory.keys, batch)

    def choose(self, ops: Ops, q: Array, weights: Array, memory: LatentCache[Array], batch: Batch[Array]) -> Array:
        """The positions that each row attends to, int32 [rows, top_k].

        q: the results of ``queries``, float32 [rows, n_head * d]; weights: those of ``proj``, float32 [rows, n_head].
        """
        c = self.config
        assert memory.keys is not None
        turned = ops.rotate_tail(q, c.n_head, batch, self.table)
        return ops.choose_rows(turned, weights, c.factor, 1, c.top_k, memory.keys, batch)


@dataclass
class LatentAttention(Mixer):
    """The weights of latent attention.

    q_a: the linear layer that computes a latent of the queries, or None.
    q_norm: the weights of the norm of this latent, float32 [q_rank], or None.
    queries: the linear layers that compute the two parts of all queries.
    keys: the linear layers that compute c and k'.
    latent: the parameters of latent attention.
    indexer: the weights of the indexer, or None.
    """

    q_a: Linear | None
    q_norm: Array | None
    queries: list[Linear]
    keys: list[Linear]
    latent: Latent[Array, Matrix]
    indexer: PositionIndexer | None = None

    def mix(self, ops: Ops, a: Value, memory: LatentCache[Array], batch: Batch[Array]) -> Value:
        """Store latents in ``memory`` and compute attention for the normalized rows a [rows, n_embd].

        Returns the result before the output layer, float32 [rows, n_head * d_v].
        """
        chosen = None
        if self.q_a is None:
            q, q_rope, c, k_rope = products(ops, a, [*self.queries, *self.keys])
        else:
            assert self.q_norm is not None
            latent, c, k_rope, *rest = products(ops, a, [self.q_a, *self.keys, *self._of_indexer(memory.chooses)])
            normed = ops.rms_norm(latent, self.q_norm, self.latent.eps)
            further = [self.indexer.queries] if self.indexer is not None and memory.chooses else []
            q, q_rope, *others = products(ops, normed, [*self.queries, *further])
            if self.indexer is not None:
                self.indexer.keep(ops, rest[0], memory, batch)
                if memory.chooses:
                    chosen = self.indexer.choose(ops, others[0], rest[1], memory, batch)
                    if batch.choice is not None:
                        batch.choice.rows = chosen
            elif memory.chooses:
                assert batch.choice is not None
                chosen = batch.choice.rows
        return ops.latent_attention(self.latent, q, q_rope, c, k_rope, memory, batch, chosen)

    def _of_indexer(self, chooses: bool) -> list[Linear]:
        """The linear layers of the indexer that have the same input as the keys; chooses: whether it selects positions."""
        if self.indexer is None:
            return []
        return [self.indexer.keys, self.indexer.proj] if chooses else [self.indexer.keys]

    def remember(self, ops: Ops, a: Value, memory: LatentCache[Array], batch: Batch[Array]) -> None:
        """Store the latents and the indexer's keys of the normalized rows a [rows, n_embd] in ``memory``."""
        c, k_rope, *rest = products(ops, a, [*self.keys, *self._of_indexer(False)])
        if self.indexer is not None:
            self.indexer.keep(ops, rest[0], memory, batch)
        ops.remember_latent(self.latent, c, k_rope, memory, batch)


def load_latent_attention(loader: Loader, blk: str, config: LatentConfig) -> LatentAttention:
    """Load the tensors ``attn_q``, or ``attn_q_a``, ``attn_q_a_norm`` and ``attn_q_b``; ``attn_kv_a_mqa``,
    ``attn_kv_a_norm``, ``attn_k_b`` and ``attn_v_b``, or ``attn_kv_b``; and ``attn_output``; with an indexer also
    ``indexer...``."""
    c, n_embd = config, loader.config.n_embd
    q_a = q_norm = None
    if c.q_rank:
        q_a = loader.linear(blk + "attn_q_a", c.q_rank, n_embd)
        q_norm = loader.vector(blk + "attn_q_a_norm.weight", c.q_rank)
    name = blk + ("attn_q_b" if c.q_rank else "attn_q")
    queries = _divided(loader, name, c.n_head, (c.n_nope, c.n_rope), c.q_rank or n_embd)
    keys = _divided(loader, blk + "attn_kv_a_mqa", 1, (c.rank, c.n_rope), n_embd)
    k_b, v_b = _per_head(loader, blk, c)
    return LatentAttention(
        loader.linear(blk + "attn_output", n_embd, c.n_head * c.d_v),
        q_a,
        q_norm,
        queries,
        keys,
        Latent(
            *(c.n_head, c.n_nope, c.n_rope, c.rank, c.d_v, c.scale, loader.config.norm_eps),
            norm=loader.vector(blk + "attn_kv_a_norm.weight", c.rank),
            k_b=loader.ops.weight(k_b),
            v_b=loader.ops.weight(v_b),
            table=loader.table(c.rope),
            query_scales=loader.temperature(c.temperature),
        ),
        _load_indexer(loader, blk + "indexer.", c, c.indexer) if c.indexer is not None else None,
    )


def _load_indexer(loader: Loader, name: str, c: LatentConfig, own: IndexerConfig) -> PositionIndexer:
    """Load the tensors ``attn_q_b``, ``attn_k``, ``k_norm`` and ``proj`` of an indexer, with the rotated elements of heads as
    the last ones, in pairs of neighbours."""
    n_embd, half = loader.config.n_embd, c.n_rope // 2
    assert c.rope is not None
    queries = loader.weight(name + "attn_q_b.weight", own.n_head * own.d, c.q_rank)
    keys = loader.weight(name + "attn_k.weight", own.d, n_embd)
    rotated = np.arange(c.n_rope)
    if own.neox:
        rotated = rotated.reshape(2, half).T.ravel()
    order = np.concatenate([np.arange(c.n_rope, own.d), rotated])
    heads = (own.d * np.arange(own.n_head)[:, None] + order).ravel()
    norm, bias = (loader.array(f"{name}k_norm.{kind}", own.d)[order] for kind in ("weight", "bias"))
    return PositionIndexer(
        own,
        Linear(loader.ops.weight(queries.reordered(heads))),
        Linear(loader.ops.weight(keys.reordered(order))),
        loader.ops.upload(norm),
        loader.ops.upload(bias),
        loader.product(name + "proj.weight", own.n_head, n_embd),
        loader.rotary(c.rope).table,
    )


def _divided(loader: Loader, name: str, heads: int, widths: tuple[int, int], columns: int) -> list[Linear]:
    """Load the linear layer ``name`` as two layers.  A file has the rows of both for each head in turn.

    widths: the number of rows per head in each of the two layers.
    """
    whole = loader.weight(name + ".weight", heads * sum(widths), columns)
    # The indices are computed only after the tensor has confirmed the sizes.
    by_head = np.arange(whole.rows).reshape(heads, sum(widths))
    parts = [by_head[:, : widths[0]].ravel(), by_head[:, widths[0] :].ravel()]
    bias = loader.array(name + ".bias", whole.rows) if loader.has(name + ".bias") else None
    scale = loader.scalar(name + ".scale")
    return [
        Linear(loader.ops.weight(whole.reordered(rows)), None if bias is None else loader.ops.upload(bias[rows]), scale)
        for rows in parts
    ]


def _per_head(loader: Loader, blk: str, c: LatentConfig) -> tuple[Weight, Weight]:
    """Load the stacked matrices k_b and v_b.  Older files have both in one tensor: for each head, the transpose of k_b, then
    v_b."""
    for name in ("attn_k_b.scale", "attn_v_b.scale", "attn_kv_b.scale"):
        if loader.has(blk + name):
            raise ModelError(f"{loader.gguf.path}: the scale {blk}{name} is not supported; use a file without it.")
    if not loader.has(old := blk + "attn_kv_b.weight"):
        k_b = loader.weight(blk + "attn_k_b.weight", c.rank, c.n_nope, c.n_head)
        return k_b, loader.weight(blk + "attn_v_b.weight", c.d_v, c.rank, c.n_head)
    pitch = c.n_nope + c.d_v
    whole = loader.weight(old, c.n_head * pitch, c.rank)
    # The blocks of a format are parts of rows, so a matrix can only be transposed after dequantization.
    try:
        floats = dequantize(whole.runs(0, c.n_nope, pitch).part(0, c.n_head * c.n_nope), whole.format.type)
    except NotImplementedError as error:
        raise ModelError(
            f"{loader.gguf.path}: tensor {old} is {whole.format.name}, of which columns cannot be taken; "
            "convert the model again, into attn_k_b and attn_v_b."
        ) from error
    turned = floats.reshape(c.n_head, c.n_nope, c.rank).swapaxes(1, 2).reshape(c.n_head * c.rank, c.n_nope)
    return replace(join_rows(old, turned), stack=c.n_head), whole.runs(c.n_nope, c.d_v, pitch)
