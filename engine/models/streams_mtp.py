"""Multi-token prediction for a model with hyper-connections, by a layer in a separate file (DeepSeek-V4).

For token t at position p, with H the streams after the last layer of the trunk, before they are joined, at position p - 1, or
0 for p = 0::

    X_s = [rms_norm(embed(t), enorm), rms_norm(H_s, hnorm)] Weh     for each stream s
    Y = layer(X)                                        attention over a window of latents in a separate cache
    logits = rms_norm(joined(Y), shared_head_norm) Whead, for position p + 1; the streams are joined with separate weights

(llama.cpp, ``src/models/deepseek4.cpp``).  For further drafts, Y replaces H.  The streams are stored in a ring for each
sequence, and the latents in pages, both indexed by position.  Every pass of the trunk writes both for its tokens
(``engine/models/mtp.py``).

The embedding and Whead are those of the model.  Files have two layouts.  In files from llama.cpp, the layer is numbered after
the last layer of the model.  In files from ds4, tensor names begin with ``mtp.0.``, and the two halves of Weh are separate
matrices.
"""

from dataclasses import replace

import numpy as np

from engine.arrays import Array, Batch
from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.models.base import Model
from engine.models.families.deepseek4 import load_layer
from engine.models.hyper import load_hyper_connection
from engine.models.linear import Linear
from engine.models.loader import Loader
from engine.models.mtp import LENT, MTP, DraftingLayer, bytes_of_draft, layer_loader
from engine.models.norm import load_norm
from engine.ops.weight import Weight


class StreamsLayer(DraftingLayer):
    """The layer that drafts for a model with hyper-connections, whose configuration must include it.

    loader: a loader of the layer's file.
    """

    def __init__(self, model: Model, loader: Loader) -> None:
        c = model.config
        (config,) = c.mtp
        self.il = c.n_layer
        own = "mtp.0." if loader.has("mtp.0.e_proj.weight") else f"blk.{c.n_layer}."
        nextn, head, norm = own + "nextn.", "output_hc", own + "nextn.shared_head_norm"
        if own == "mtp.0.":
            nextn, head, norm = own, own + "hc_head", own + "norm"
            joined = _beside(loader, own + "e_proj.weight", own + "h_proj.weight")
        else:
            joined = loader.weight(nextn + "eh_proj.weight", c.n_embd, 2 * c.n_embd)
        self.eh_proj = Linear(model.ops.weight(joined))
        self.enorm, self.hnorm = (loader.vector(f"{nextn}{name}.weight", c.n_embd) for name in ("enorm", "hnorm"))
        self.layer = load_layer(loader, loader, own, config)  # type: ignore[assignment]
        self._streams = load_hyper_connection(loader, head, last=True)
        self.embed_tokens, self.output = model.token_embd, model.output
        own_head = own + "nextn.shared_head_head.weight"
        if loader.has(own_head):
            self.output = loader.product(own_head, c.n_vocab, c.n_embd)
        norms = [name for name in (norm, "output_norm") if loader.has(name + ".weight")]
        self.output_norm = load_norm(loader, norms[0]) if norms else model.output_norm
        loader.ignore(*LENT, nextn + "embed_tokens.weight", own + "exp_probs_b_vl.bias")
        self.n_bytes = bytes_of_draft(model, loader, own, self.il, head)

    def joined(self, model: Model, hidden: Array, batch: Batch[Array]) -> Array:
        """The streams X, float32 [rows, 4 n_embd], computed from the tokens and from H of the preceding positions.

        hidden: the rings of H, float32 [sequences, length, 4 n_embd].
        """
        ops = model.ops
        e = ops.embed(self.embed_tokens, batch.tokens)
        x = self.eh_proj.apply(ops, ops.mtp_input(e, self.enorm, hidden, self.hnorm, batch, model.config.norm_eps))
        return x.reshape(batch.rows, x.size // batch.rows)

    def finish(self, model: Model, y: Array, hidden: Array, batch: Batch[Array]) -> Array:
        """Store the streams y [rows, 4 n_embd] after the layer in the rings ``hidden``; returns the logits, float32 [rows,
        n_vocab]."""
        ops = model.ops
        ops.keep_rows(hidden, y, batch)
        u = ops.collapse(y, self._streams.weights(ops, y))
        return self.output.apply(ops, self.output_norm.apply(ops, u))


def load_streams_mtp(model: Model, gguf: GGUF) -> MTP:
    """Load the layer that drafts from a separate file, for a model with hyper-connections whose configuration includes it.

    Raises ModelError if the layer belongs to another model.
    """
    loader = layer_loader(model, gguf)
    layer = StreamsLayer(model, loader)
    loader.check_complete()
    return MTP(model, [layer])


def _beside(loader: Loader, *names: str) -> Weight:
    """Concatenate the rows of several matrices [n_embd, n_embd] into one matrix [n_embd, n_embd * len(names)]."""
    n = loader.config.n_embd
    parts = [loader.weight(name, n, n) for name in names]
    if len({part.format for part in parts}) > 1:
        raise ModelError(f"{loader.gguf.path}: {' and '.join(names)} have different formats, which is not supported.")
    data = np.concatenate([part.data for part in parts], axis=1)
    data.flags.writeable = False  # like mapped rows, so that the same compiled kernels accept both
    return replace(parts[0], name=f"{names[0]} and {names[1]}", columns=n * len(parts), data=data)
