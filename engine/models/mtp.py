"""Multi-token prediction: a layer after the trunk that drafts the tokens after the next (DeepSeek-V3, Liu et al. 2024, 2.2).

For token t at position p, with h the trunk's output (normalized) at position p - 1, or 0 for p = 0::

    x = [rms_norm(embed(t), enorm), rms_norm(h, hnorm)] Weh
    y = layer(x)                                        attention over a cache of its own, then the feed-forward network
    h' = rms_norm(y, shared_head_norm);  logits = h' Whead, for position p + 1

(llama.cpp, ``src/models/qwen35.cpp``, ``common/speculative.cpp``).  A chain of drafts continues with h' in place of the
trunk's h.

The layer is in the file of the trunk, behind it, or alone in a file of its own.  Embedding and Whead are the trunk's unless
the layer has its own (``nextn.embed_tokens``, ``nextn.shared_head_head``).

The outputs h are stored in a ring of each sequence, the keys and the values in pages, all by position.  Every pass of the
trunk writes all of them for its tokens (:meth:`MTP.follow`), over what drafts stored there.  So drafts need no cleaning
up, the cache always holds values made from the trunk's own outputs, and a rollback only changes the next position.
"""

from dataclasses import replace

import numpy as np

from engine.arrays import Array, Batch
from engine.cache.sequence import Sequence
from engine.gguf.file import GGUF, GGUFTensor
from engine.models.base import Model
from engine.models.layer import load_layer
from engine.models.loader import Loader
from engine.models.needs import hidden_ring
from engine.models.weights import bytes_read
from engine.ops.operations import Ops

LENT = ("token_embd.weight", "output.weight", "output_norm.weight")
"""Tensors of the file of a layer that the model has too, and lends to it."""


class MTP:
    """The layer that drafts for ``model``.  loader: loads its tensors: the model itself, or a loader of the layer's file."""

    def __init__(self, model: Model, loader: Loader) -> None:
        c, own = model.config, f"blk.{model.config.n_layer}."
        self._model = model
        self._layer = load_layer(loader, c.n_layer)
        nextn = own + "nextn."
        self.eh_proj = loader.product(nextn + "eh_proj.weight", c.n_embd, 2 * c.n_embd)
        self.enorm = loader.vector(nextn + "enorm.weight", c.n_embd)
        self.hnorm = loader.vector(nextn + "hnorm.weight", c.n_embd)

        shape, embedding, head = (c.n_vocab, c.n_embd), nextn + "embed_tokens.weight", nextn + "shared_head_head.weight"
        self.embed_tokens = loader.matrix(embedding, *shape) if loader.has(embedding) else model.token_embd
        self.output = loader.product(head, *shape) if loader.has(head) else model.output
        norm = loader.optional(nextn + "shared_head_norm.weight", c.n_embd)
        self.output_norm = model.output_norm if norm is None else norm
        self._n_bytes = bytes_of_draft(model, loader, own)
        #: Memory for the inputs of its passes.
        self.inputs = model.ops.inputs()
        length = hidden_ring(model.max_rows, model.rewind).capacity
        #: float32 [sequences, length, n_embd]: h of position p in row p % length.
        self.hidden = model.ops.zeros((model.n_sequences, length, c.n_embd), np.float32)

    @property
    def ops(self) -> Ops:
        """The backend that computes the layer."""
        return self._model.ops

    def belong(self, model: Model) -> None:
        """Draft for ``model``, which has the same weights, from now on."""
        self._model = model

    @property
    def n_bytes(self) -> int:
        """Bytes of weights that one draft reads."""
        return self._n_bytes

    def _joined(self, batch: Batch[Array]) -> Array:
        """The inputs x of the tokens, from the outputs h of the preceding positions: float32 [rows, n_embd]."""
        ops, c = self._model.ops, self._model.config
        e = ops.embed(self.embed_tokens, batch.tokens, c.embedding_scale)
        return self.eh_proj.apply(ops, ops.mtp_input(e, self.enorm, self.hidden, self.hnorm, batch, c.norm_eps))

    def follow(self, batch: Batch[Array], hidden: Array) -> None:
        """Store the outputs ``hidden`` [rows, n_embd] of the trunk for the tokens of a pass, and this layer's keys and values
        for them."""
        model = self._model
        model.ops.keep_rows(self.hidden, hidden, batch)
        self._layer.remember(model.ops, self._joined(batch), model.memory(model.config.n_layer), batch)

    def compute(self, batch: Batch[Array], n_logits: int) -> Array:
        """Logits after one token, float32 [1, n_vocab].  The h of the position before must be stored.  Stores h' in place of
        the trunk's h, which overwrites it later."""
        model, ops, c = self._model, self._model.ops, self._model.config
        x = self._layer.run(ops, self._joined(batch), model.memory(c.n_layer), batch)
        hidden = ops.plain(ops.rms_norm(x, self.output_norm, c.norm_eps))
        ops.keep_rows(self.hidden, hidden, batch)
        return self.output.apply(ops, hidden)

    def forward(self, token: int, position: int, sequence: Sequence) -> np.ndarray:
        """Logits float32 [n_vocab] for the token after ``token`` at ``position`` of a sequence."""
        model = self._model
        model.reserve(position + 1)
        sequence.reserve(position + 1)
        sequence.overwrite(position + 1)
        model.cache.publish()
        tokens, positions, slots = (np.array([number], np.int32) for number in (token, position, sequence.slot))
        batch = Batch(tokens, positions, slots)
        logits = model.ops.run(self.compute, batch, 1, self.inputs)
        assert logits is not None
        return logits[0]

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length), which are shared with the trunk."""
        self._model.reserve(length)


def load_mtp(model: Model, gguf: GGUF) -> MTP:
    """The layer of a file of its own, for a model whose configuration has it.  Raises ModelError if the tensors do not match
    the model."""
    loader = layer_loader(model, gguf)
    layer = MTP(model, loader)
    loader.ignore(*LENT)
    loader.check_complete()
    return layer


def layer_loader(model: Model, gguf: GGUF) -> Loader:
    """A loader of the file of a layer that drafts for ``model``."""
    for rope in model.config.ropes:
        model.rotary(rope)  # the model fills the angles for all layers
    return Loader(model.config, gguf, model.ops, model.cache.n_ctx, model)


def layer_tensors(gguf: GGUF) -> list[GGUFTensor]:
    """The tensors of the file of a layer that are loaded for it."""
    return [tensor for name, tensor in gguf.tensors.items() if name not in LENT]


def bytes_of_draft(model: Model, loader: Loader, own: str, head: str = "") -> int:
    """Bytes of weights that one draft reads: of the layer, whose tensors' names begin with ``own`` or ``head``, and of the
    output."""
    tensors, blk = loader.gguf.tensors, f"blk.{model.config.n_layer}."
    begin = (own, head) if head else (own,)
    read = [tensor for name, tensor in tensors.items() if name.startswith(begin) and "embed_tokens" not in name]
    if own + "nextn.shared_head_head.weight" not in tensors:
        lent = model.gguf.tensors
        read.append(lent["output.weight" if "output.weight" in lent else "token_embd.weight"])
    named = (replace(tensor, name=tensor.name.replace(own, blk)) for tensor in read)
    return bytes_read(named, model.config)
