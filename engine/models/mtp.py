"""Multi-token prediction: a layer after the trunk that drafts the tokens after the next (DeepSeek-V3, Liu et al. 2024, 2.2).

For token t at position p, with h the trunk's output (normalized) at position p - 1, or 0 for p = 0::

    x = [rms_norm(embed(t), enorm), rms_norm(h, hnorm)] Weh
    y = layer(x)                                        attention over a cache of its own, then the feed-forward network
    h' = rms_norm(y, shared_head_norm);  logits = h' Whead, for position p + 1

(llama.cpp, ``src/models/qwen35.cpp``, ``common/speculative.cpp``).  A chain of drafts continues with h' in place of the
trunk's h.

The outputs h are stored in a ring of each sequence, the keys and the values in pages, all by position.  Every pass of the
trunk writes all of them for its tokens (:meth:`MTP.follow`), over what drafts stored there.  So drafts need no cleaning
up, the cache always holds values made from the trunk's own outputs, and a rollback only changes the next position.
"""

import numpy as np

from engine.arrays import Array, Matrix, Pass
from engine.cache.sequence import Sequence
from engine.models.base import Model
from engine.models.layer import Layer
from engine.models.needs import hidden_ring
from engine.models.weights import bytes_read
from engine.ops import Ops


class MTP:
    """The layer of a model that drafts."""

    def __init__(self, model: Model, layer: Layer) -> None:
        c, blk = model.config, f"blk.{model.config.n_layer}.nextn."
        self._model = model
        self._layer = layer
        self.eh_proj = model.matrix(blk + "eh_proj.weight", c.n_embd, 2 * c.n_embd)
        self.enorm = model.vector(blk + "enorm.weight", c.n_embd)
        self.hnorm = model.vector(blk + "hnorm.weight", c.n_embd)
        self.embed_tokens = self._own("embed_tokens.weight", model.token_embd)
        self.output = self._own("shared_head_head.weight", model.output)
        norm = model.optional(blk + "shared_head_norm.weight", c.n_embd)
        self.output_norm = model.output_norm if norm is None else norm
        #: Memory for the inputs of its passes.
        self.inputs = model.ops.inputs()
        length = hidden_ring(model.cache.max_rows, model.rewind).capacity
        #: float32 [sequences, length, n_embd]: h of position p in row p % length.
        self.hidden = model.ops.zeros((model.cache.n_sequences, length, c.n_embd), np.float32)

    @property
    def ops(self) -> Ops:
        """The backend that computes the layer."""
        return self._model.ops

    def belong(self, model: Model) -> None:
        """Draft for ``model``, which has the same weights, from now on."""
        self._model = model

    def _own(self, name: str, other: Matrix) -> Matrix:
        """A matrix [n_vocab, n_embd] of this layer if the file has one, else ``other``, the trunk's."""
        model, name = self._model, f"blk.{self._model.config.n_layer}.nextn.{name}"
        return model.matrix(name, model.config.n_vocab, model.config.n_embd) if model.has(name) else other

    @property
    def n_bytes(self) -> int:
        """Bytes of weights that one draft reads."""
        model, blk = self._model, f"blk.{self._model.config.n_layer}."
        tensors = model.gguf.tensors
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(blk) and "embed_tokens" not in name}
        if blk + "nextn.shared_head_head.weight" not in tensors:
            head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
            own[head] = tensors[head]
        return bytes_read(own.values(), model.config)

    def _joined(self, batch: Pass[Array]) -> Array:
        """The inputs x of the tokens, from the outputs h of the preceding positions: float32 [rows, n_embd]."""
        ops, c = self._model.ops, self._model.config
        e = ops.embed(self.embed_tokens, batch.tokens, c.embedding_scale)
        (x,) = ops.matmul(ops.mtp_input(e, self.enorm, self.hidden, self.hnorm, batch, c.norm_eps), self.eh_proj)
        return x

    def follow(self, batch: Pass[Array], hidden: Array) -> None:
        """Store the outputs ``hidden`` [rows, n_embd] of the trunk for the tokens of a pass, and this layer's keys and values
        for them."""
        model = self._model
        model.ops.keep_rows(self.hidden, hidden, batch)
        self._layer.remember(model.ops, self._joined(batch), model.memory(model.config.n_layer), batch)

    def compute(self, batch: Pass[Array], n_logits: int) -> Array:
        """Logits after one token, float32 [1, n_vocab].  The h of the position before must be stored.  Stores h' in place of
        the trunk's h, which overwrites it later."""
        model, ops, c = self._model, self._model.ops, self._model.config
        x = self._layer.run(ops, self._joined(batch), model.memory(c.n_layer), batch)
        hidden = ops.plain(ops.rms_norm(x, self.output_norm, c.norm_eps))
        ops.keep_rows(self.hidden, hidden, batch)
        (logits,) = ops.matmul(hidden, self.output)
        return logits

    def forward(self, token: int, position: int, sequence: Sequence | None = None) -> np.ndarray:
        """Logits float32 [n_vocab] for the token after ``token`` at ``position`` of a sequence; None: the one in slot 0."""
        model = self._model
        sequence = sequence or model.sequence
        model.reserve(position + 1)
        sequence.reserve(position + 1)
        sequence.overwrite(position + 1)
        model.cache.publish()
        tokens, positions, slots = (np.array([number], np.int32) for number in (token, position, sequence.slot))
        batch = Pass(tokens, positions, slots)
        logits = model.ops.run(self.compute, batch, 1, self.inputs)
        assert logits is not None
        return logits[0]

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length), which are shared with the trunk."""
        self._model.reserve(length)
