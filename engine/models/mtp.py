"""Multi-token prediction: a layer after the trunk that drafts the tokens after the next (DeepSeek-V3, Liu et al. 2024, 2.2).

For token t at position p, with h the normalized output of the trunk at position p - 1, or 0 for p = 0::

    x = [rms_norm(embed(t), enorm), rms_norm(h, hnorm)] Weh
    y = layer(x)                                        attention over a separate cache, then the feed-forward network
    h' = rms_norm(y, shared_head_norm);  logits = h' Whead, for position p + 1

(llama.cpp, ``src/models/qwen35.cpp``, ``common/speculative.cpp``).  For further drafts, h' replaces h.

The layer is stored after the layers of the trunk in the same file, or in a separate file.  The embedding and Whead are those
of the trunk unless the file of the layer has ``nextn.embed_tokens`` or ``nextn.shared_head_head``.

The outputs h are stored in a ring for each sequence, and the keys and values in pages, all indexed by position.  Every pass
of the trunk writes them for its tokens (:meth:`MTP.follow`), and overwrites the entries that drafts have stored.  Drafts
therefore need no cleanup, the cache of committed tokens is always computed from outputs of the trunk, and a rollback only
changes the next position.
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
"""Tensors in the file of a layer that are not loaded, because the layer uses those of the model."""


class MTP:
    """The layer that drafts for ``model``.

    loader: loads the tensors of the layer.  It is the model itself, or a loader of the layer's file.
    """

    def __init__(self, model: Model, loader: Loader) -> None:
        c, own = model.config, f"blk.{model.config.n_layer}."
        self._model = model
        self._layer = load_layer(loader, loader, c.n_layer)
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
        #: Memory for the inputs of draft passes.
        self.inputs = model.ops.inputs()
        length = hidden_ring(model.max_rows, model.rewind).capacity
        #: float32 [sequences, length, n_embd]: h of position p is in row p % length.
        self.hidden = model.ops.zeros((model.n_sequences, length, c.n_embd), np.float32)

    @property
    def ops(self) -> Ops:
        """The backend that computes the layer."""
        return self._model.ops

    def belong(self, model: Model) -> None:
        """Set the model for which the layer drafts.  ``model`` must have the same weights as the previous one."""
        self._model = model

    @property
    def n_bytes(self) -> int:
        """The size in bytes of the weights that one draft reads."""
        return self._n_bytes

    def _joined(self, batch: Batch[Array]) -> Array:
        """The inputs x of the layer, computed from the tokens and from h of the preceding positions, float32 [rows,
        n_embd]."""
        ops, c = self._model.ops, self._model.config
        e = ops.embed(self.embed_tokens, batch.tokens, c.embedding_scale)
        return self.eh_proj.apply(ops, ops.mtp_input(e, self.enorm, self.hidden, self.hnorm, batch, c.norm_eps))

    def follow(self, batch: Batch[Array], hidden: Array) -> None:
        """Store the outputs of the trunk for the tokens of a pass, hidden [rows, n_embd], and the keys and values of this
        layer for these tokens."""
        model = self._model
        model.ops.keep_rows(self.hidden, hidden, batch)
        self._layer.remember(model.ops, self._joined(batch), model.memory(model.config.n_layer), batch)

    def compute(self, batch: Batch[Array], n_logits: int) -> Array:
        """The operations of a draft pass: logits after one token, float32 [1, n_vocab].

        h of the position before the token must be stored.  The pass stores h' at the position of the token.  The next pass
        of the trunk overwrites it with h.
        """
        model, ops, c = self._model, self._model.ops, self._model.config
        x = self._layer.run(ops, self._joined(batch), model.memory(c.n_layer), batch)
        hidden = ops.plain(ops.rms_norm(x, self.output_norm, c.norm_eps))
        ops.keep_rows(self.hidden, hidden, batch)
        return self.output.apply(ops, hidden)

    def forward(self, token: int, position: int, sequence: Sequence) -> np.ndarray:
        """Run a draft pass.  Returns the logits, float32 [n_vocab], of the token that follows ``token`` at ``position``."""
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
        """Compute the rotation angles of positions [0, length), which the layer shares with the trunk."""
        self._model.reserve(length)


def load_mtp(model: Model, gguf: GGUF) -> MTP:
    """Load a layer that drafts from a separate file, for a model whose configuration includes it.

    Raises ModelError if the tensors do not match the model.
    """
    loader = layer_loader(model, gguf)
    layer = MTP(model, loader)
    loader.ignore(*LENT)
    loader.check_complete()
    return layer


def layer_loader(model: Model, gguf: GGUF) -> Loader:
    """A loader for the file of a layer that drafts for ``model``."""
    for rope in model.config.ropes:
        model.rotary(rope)  # the model computes the angles of all layers
    return Loader(model.config, gguf, model.ops, model.cache.n_ctx, model)


def layer_tensors(gguf: GGUF) -> list[GGUFTensor]:
    """The tensors in the file of a layer that are loaded."""
    return [tensor for name, tensor in gguf.tensors.items() if name not in LENT]


def bytes_of_draft(model: Model, loader: Loader, own: str, head: str = "") -> int:
    """The size in bytes of the weights that one draft reads: those of the layer and of the output head.

    own, head: the prefixes of the names of the layer's tensors.
    """
    tensors, blk = loader.gguf.tensors, f"blk.{model.config.n_layer}."
    begin = (own, head) if head else (own,)
    read = [tensor for name, tensor in tensors.items() if name.startswith(begin) and "embed_tokens" not in name]
    if own + "nextn.shared_head_head.weight" not in tensors:
        lent = model.gguf.tensors
        read.append(lent["output.weight" if "output.weight" in lent else "token_embd.weight"])
    named = (replace(tensor, name=tensor.name.replace(own, blk)) for tensor in read)
    return bytes_read(named, model.config)
