"""An encoder: a token attends to the whole text, later tokens included, so a pass reads whole texts.

Layer (Vaswani et al. 2017)::

    x = layer_norm(x + attention(x), after_mixer)
    x = layer_norm(x + network(x), after_network)

The keys and values of all rows are stored first; then each row attends up to the last position of its text.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.arrays import Array, Batch, Value
from engine.models.attention import Attention, load_attention
from engine.models.attention_config import AttentionConfig
from engine.models.base import Model, TokenSequences
from engine.models.feed_forward import FeedForward, load_feed_forward
from engine.models.network_config import DenseConfig
from engine.models.norm import Norm, load_norm
from engine.models.residual import Residual
from engine.ops.operations import Ops


@dataclass
class EncoderLayer:
    """The weights of one layer."""

    mixer: Attention
    network: FeedForward
    after_mixer: Norm
    after_network: Norm
    residual: Residual

    def mix(self, ops: Ops, x: Array, memory: Any, batch: Batch[Array], last: Array) -> Array:
        """The residual stream after attention from x before it, float32 [rows, n_embd].

        last: int32 [rows], the last position of the text of each row.
        """
        o = self.mixer.mix_up_to(ops, x, memory, batch, last)
        return ops.plain(self.after_mixer.apply(ops, self.residual.add_product(ops, x, o, self.mixer.output)))

    def feed(self, ops: Ops, x: Array, batch: Batch[Array]) -> Array:
        """The residual stream after the network from x before it, float32 [rows, n_embd]."""
        return ops.plain(self.after_network.apply(ops, self.network.add(ops, x, x, batch, self.residual)))


class Encoder(Model):
    """A model whose tokens attend to the whole text.  It has no logits: a pass returns the outputs of its rows, or the scores
    of a reranker.

    Its residual stream begins with layer_norm(embedding + position + token type).
    """

    layers: list[Any]
    #: int32 [rows]: the last position of the text of each row of a pass.
    last: Array

    def load_output(self) -> None:
        """Do nothing: there are no logits."""

    def load_layer(self, il: int) -> Any:
        """Load the weights of layer ``il``."""
        c, blk, loader = self.config, f"blk.{il}.", self.loader(self.placement.mixers[il])
        config = c.layers[il]
        assert isinstance(config.mixer, AttentionConfig) and isinstance(config.network, DenseConfig)
        return EncoderLayer(
            load_attention(loader, blk, config.mixer),
            load_feed_forward(loader, blk, config.network),
            load_norm(loader, blk + config.norms.after_mixer),
            load_norm(loader, blk + config.norms.after_network),
            Residual(None, c.norm_eps, 1.0),
        )

    def load_rest(self) -> None:
        """Load what the residual stream begins with, and allocate memory for the last positions of texts."""
        self.last = self.rows_of_integers()
        c, first = self.config, self.loader(self.placement.first)
        #: float32 [n_embd], which is added to the embedding of every token: the first type, "sentence A"; None: no types.
        self.token_type: Array | None = None
        if c.n_token_types and self.has("token_types.weight"):
            types = first.array("token_types.weight", c.n_token_types, c.n_embd)
            self.token_type = self.ops.upload(np.ascontiguousarray(types[0]))
        self.embedding_norm = load_norm(first, "token_embd_norm")

    def rows_of_integers(self) -> Array:
        """Allocate an array with an integer for each row of a pass, int32 [rows]."""
        return self.ops.zeros((max(self.prompt_rows, self.max_rows, self.ops.decode_rows),), np.int32)

    def read_texts(self, parts: TokenSequences) -> list[np.ndarray]:
        """Run one pass over whole texts, whose sequences are empty.  See :meth:`Model.read_texts`."""
        self.prepare_texts([len(tokens) for _, tokens in parts])
        return super().read_texts(parts)

    def prepare_texts(self, lengths: SequenceOf[int]) -> None:
        """Tell attention how long the texts of the next pass are."""
        self.fill(self.last, np.concatenate([np.full(n, n - 1, np.int32) for n in lengths]))

    def fill(self, target: Array, rows: np.ndarray) -> None:
        """Store integers of the rows of a pass, int32 [rows].  Rows that fill a pass are copies of the last one."""
        self.ops.store(target, 0, np.pad(rows, (0, target.size - rows.size), "edge"))

    def enter(self, ops: Ops, x: Array) -> Array:
        """The residual stream before the first layer, computed from the embeddings x, float32 [rows, n_embd]."""
        if self.token_type is not None:
            x = ops.add(x, self.token_type)
        return ops.plain(self.embedding_norm.apply(ops, x))

    def mix(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute the attention of layer ``il``: the residual stream after it from x before it, float32 [rows, n_embd]."""
        return self.layers[il].mix(ops, x, self.memory(il, ops), batch, self.last[: batch.rows])

    def feed(self, ops: Ops, il: int, x: Array, batch: Batch[Array]) -> Array:
        """Compute the network of layer ``il``: the residual stream after it from x before it, float32 [rows, n_embd]."""
        return self.layers[il].feed(ops, x, batch)

    def finish(self, x: Array, batch: Batch[Array], n_logits: int, taps: SequenceOf[Array] = ()) -> Array | None:
        """The result of :meth:`outputs` for the residual stream x after the last layer; None for ``n_logits`` 0."""
        return self.joined(x[batch.rows - n_logits : batch.rows]) if n_logits else None

    def normed(self, x: Array) -> Value:
        """x itself, which is normalized."""
        return x
