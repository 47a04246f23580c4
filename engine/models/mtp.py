"""Multi-token prediction: layers after the trunk that draft the tokens after the next (DeepSeek-V3, Liu et al. 2024, 2.2).

For token t at position p, with h the normalized output of the trunk at position p - 1, or 0 for p = 0::

    x = [rms_norm(embed(t), enorm), rms_norm(h, hnorm)] Weh
    y = layer(x)                                        attention over a separate cache, then the feed-forward network
    h' = rms_norm(y, shared_head_norm);  logits = h' Whead, for position p + 1

(llama.cpp, ``src/models/qwen35.cpp``, ``common/speculative.cpp``).  For further drafts, h' replaces h.  In some models h
is the output of the trunk before its norm, and y replaces it (``ModelConfig.mtp_normed``).

Most models have one such layer.  A model may have a chain of them, each with its own weights and cache: the i-th draft of a
step is made by the i-th layer, and the last layer makes all further drafts.  The attention of a layer reads the keys of the
drafts before its own, so a draft also stores keys and values of all later layers, which have the same inputs t and h::

    layer 0   token p    draft: token p + 1
    layer 1   keys of p  token p + 1    draft: token p + 2
    layer 2   keys of p  keys of p + 1  token p + 2    draft: token p + 3

Layers are stored after the layers of the trunk in the same file, or in a separate file.  The embedding and Whead are those
of the trunk unless the layer has ``nextn.embed_tokens`` or ``nextn.shared_head_head``.

The outputs h are stored in a ring for each sequence, and the keys and values in pages, all indexed by position.  Every pass
of the trunk writes them for its tokens (:meth:`MTP.follow`), and overwrites the entries that drafts have stored.  Drafts
therefore need no cleanup, the caches of committed tokens are always computed from outputs of the trunk, and a rollback only
changes the next position.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np

from engine.arrays import Array, Batch
from engine.cache.sequence import Sequence
from engine.gguf.file import GGUF, GGUFTensor
from engine.models.base import Model
from engine.models.config import DFLASH, EAGLE3
from engine.models.drafter import ChainDrafter, pass_of, row_after
from engine.models.layer import Layer, load_layer
from engine.models.loader import Loader
from engine.models.needs import hidden_ring, hidden_width
from engine.models.norm import load_norm
from engine.models.weights import bytes_read
from engine.ops.operations import Ops

LENT = ("token_embd.weight", "output.weight", "output_norm.weight")
"""Tensors in the file of a layer that are not loaded, because the layer uses those of the model."""


class DraftingLayer:
    """One layer that drafts for ``model``.

    loader: loads its tensors.  It is the model itself, or a loader of the layer's file; il: its index.
    """

    def __init__(self, model: Model, loader: Loader, il: int) -> None:
        c, own = model.config, f"blk.{il}."
        nextn = own + "nextn."
        self.il = il
        self.layer: Layer = load_layer(loader, loader, il)
        self.eh_proj = loader.product(nextn + "eh_proj.weight", c.n_embd, 2 * c.n_embd)
        self.enorm = loader.vector(nextn + "enorm.weight", c.n_embd)
        self.hnorm = loader.vector(nextn + "hnorm.weight", c.n_embd)

        shape, embedding, head = (c.n_vocab, c.n_embd), nextn + "embed_tokens.weight", nextn + "shared_head_head.weight"
        self.embed_tokens = loader.embedding_matrix(embedding, *shape) if loader.has(embedding) else model.token_embd
        self.output = loader.product(head, *shape) if loader.has(head) else model.output
        norm = nextn + "shared_head_norm"
        self.output_norm = load_norm(loader, norm) if loader.has(norm + ".weight") else model.output_norm
        #: The size in bytes of the weights that one draft reads.
        self.n_bytes = bytes_of_draft(model, loader, own, il)

    def joined(self, model: Model, hidden: Array, batch: Batch[Array]) -> Array:
        """The inputs x of the layer, float32 [rows, n_embd], computed from the tokens and from h of the preceding positions.

        hidden: the rings of h, float32 [sequences, length, n_embd].
        """
        ops, c = model.ops, model.config
        e = ops.embed(self.embed_tokens, batch.tokens, c.embedding_scale)
        return self.eh_proj.apply(ops, ops.mtp_input(e, self.enorm, hidden, self.hnorm, batch, c.norm_eps))

    def remember(self, model: Model, hidden: Array, batch: Batch[Array]) -> None:
        """Store the keys and values of the rows.  hidden: the rings of h, float32 [sequences, length, n_embd]."""
        self.layer.remember(model.ops, self.joined(model, hidden, batch), model.memory(self.il), batch)

    def run(self, model: Model, hidden: Array, batch: Batch[Array]) -> Array:
        """The output y of the layer, float32 [rows, n_embd].  hidden: the rings of h, float32 [sequences, length, n_embd]."""
        return self.layer.run(model.ops, self.joined(model, hidden, batch), model.memory(self.il), batch)

    def finish(self, model: Model, y: Array, hidden: Array, batch: Batch[Array]) -> Array:
        """Store what replaces h in the rings ``hidden``; returns the logits, float32 [rows, n_vocab].

        y: the output of the layer, float32 [rows, n_embd].
        """
        ops, c = model.ops, model.config
        normed = self.output_norm.apply(ops, y)
        if c.mtp_normed:
            y = normed = ops.plain(normed)
        ops.keep_rows(hidden, y, batch)
        return self.output.apply(ops, normed)


@dataclass(frozen=True)
class DraftPass:
    """The operations of the pass by which layer ``number`` of ``mtp`` drafts."""

    mtp: "MTP"
    number: int

    def __call__(self, batch: Batch[Array], n_logits: int) -> Array:
        """Logits after each token, float32 [rows, n_vocab].

        h of the position before the token must be stored.  The pass stores what replaces h at the position of the token.  The
        next pass of the trunk overwrites it with h.
        """
        mtp, model = self.mtp, self.mtp.model
        batch = model.placed(model.ops, batch)
        y = mtp.layers[self.number].run(model, mtp.hidden, batch)
        for later in mtp.layers[self.number + 1 :]:
            later.remember(model, mtp.hidden, batch)
        return mtp.layers[self.number].finish(model, y, mtp.hidden, batch)


class MTP(ChainDrafter):
    """The layers that draft for ``model``, in the order of the chain."""

    def __init__(self, model: Model, layers: SequenceOf[DraftingLayer]) -> None:
        self.model = model
        self.layers = list(layers)
        #: Memory for the inputs of draft passes.
        self.inputs = model.ops.inputs()
        sizes = model.n_sequences, hidden_ring(model.max_rows, model.rewind).capacity, hidden_width(model.config)
        #: float32 [sequences, length, n]: h of position p is in row p % length.
        self.hidden = model.ops.zeros(sizes, np.float32)

    @property
    def ops(self) -> Ops:
        """The backend that computes the layers."""
        return self.model.ops

    def belong(self, model: Model) -> None:
        """Set the model for which the layers draft.  ``model`` must have the same weights as the previous one."""
        self.model = model

    @property
    def n_bytes(self) -> int:
        """The size in bytes of the weights that one draft reads: the mean of all layers."""
        return sum(layer.n_bytes for layer in self.layers) // len(self.layers)

    @property
    def passes(self) -> tuple[DraftPass, ...]:
        """The pass of each layer: the i-th computes the i-th draft of a step, and the last one all further drafts."""
        return tuple(DraftPass(self, number) for number in range(len(self.layers)))

    def follow(self, batch: Batch[Array], hidden: Array) -> None:
        """Store the outputs of the trunk for the tokens of a pass, hidden [rows, n], and the keys and values of all layers
        for these tokens."""
        self.model.ops.keep_rows(self.hidden, hidden, batch)
        for layer in self.layers:
            layer.remember(self.model, self.hidden, batch)

    def forward(self, token: int, position: int, sequence: Sequence, number: int = 0, count: int = 1) -> np.ndarray:
        """Run the pass of draft ``number`` of a step with ``count`` drafts.  Returns the logits, float32 [n_vocab], of the
        token that follows ``token`` at ``position``."""
        model = self.model
        model.reserve(position + 1)
        sequence.reserve(position + 1)
        sequence.overwrite(position + 1)
        model.cache.publish()
        return row_after(model.ops, pass_of(self.passes, number), token, position, sequence.slot, self.inputs)

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length), which the layers share with the trunk."""
        self.model.reserve(length)


def drafting_layers(model: Model, loader: Loader) -> list[DraftingLayer]:
    """Load all layers that draft for ``model``.  loader: the model itself, or a loader of their file."""
    first = model.config.n_layer
    return [DraftingLayer(model, loader, first + number) for number in range(len(model.config.mtp))]


def load_mtp(model: Model, gguf: GGUF) -> MTP:
    """Load the layers that draft from a separate file, for a model whose configuration includes them.

    Raises ModelError if the tensors do not match the model.
    """
    loader = layer_loader(model, gguf)
    layers = drafting_layers(model, loader)
    loader.ignore(*LENT)
    loader.check_complete()
    return MTP(model, layers)


def layer_loader(model: Model, gguf: GGUF) -> Loader:
    """A loader for the file of a layer that drafts for ``model``."""
    for rope in model.config.ropes:
        model.rotary(rope)  # the model computes the angles of all layers
    return Loader(model.config, gguf, model.ops, model.cache.n_ctx, model)


def layer_tensors(gguf: GGUF) -> list[GGUFTensor]:
    """The tensors in the file of a layer that are loaded."""
    own = kind_of_network(gguf)
    return [tensor for name, tensor in gguf.tensors.items() if own or name not in LENT]


def kind_of_network(gguf: GGUF) -> str:
    """The architecture of a file with a network that reads layers of its target, EAGLE3 or DFLASH
    (``engine/models/eagle3.py``, ``engine/models/dflash.py``); "" for other files."""
    architecture = gguf.metadata.get("general.architecture")
    return architecture if isinstance(architecture, str) and architecture in (EAGLE3, DFLASH) else ""


def rows_of_tokens(loader: Loader, n_vocab: int) -> tuple[int, Array | None]:
    """The number of rows of the output of a network, and the row for each token, int32 [n_vocab], -1: none.  None instead of
    an array if there is a row for each token, in their order."""
    if not loader.has("d2t"):
        return n_vocab, None
    tokens = loader.host_integers("d2t", loader.gguf.tensors["d2t"].shape[0], end=n_vocab)
    rows = np.full(n_vocab, -1, np.int32)
    rows[tokens] = np.arange(tokens.size, dtype=np.int32)
    return tokens.size, loader.ops.upload(rows)


def bytes_of_draft(model: Model, loader: Loader, own: str, il: int, head: str = "") -> int:
    """The size in bytes of the weights that one draft reads: those of layer ``il`` and of the output head.

    own, head: the prefixes of the names of the layer's tensors.
    """
    tensors, blk = loader.gguf.tensors, f"blk.{il}."
    begin = (own, head) if head else (own,)
    read = [tensor for name, tensor in tensors.items() if name.startswith(begin) and "embed_tokens" not in name]
    if own + "nextn.shared_head_head.weight" not in tensors:
        read.append(lent_output(model.gguf))
    named = (replace(tensor, name=tensor.name.replace(own, blk)) for tensor in read)
    return bytes_read(named, model.config)


def lent_output(gguf: GGUF) -> GGUFTensor:
    """The tensor of a model's file that is its output matrix, which layers that draft use if they have none of their own."""
    return gguf.tensors["output.weight" if "output.weight" in gguf.tensors else "token_embd.weight"]
