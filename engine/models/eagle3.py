"""EAGLE-3: a small network in a file of its own that drafts from what several layers of its target compute (Li et al. 2025).

With a, b, c the residual stream of the target before three of its layers, at position p - 1, and t the token at position p::

    g = [a, b, c] Wfc                                   optionally with a norm of [a, b, c]
    x = [rms_norm(embed(t), attn_norm), rms_norm(g, attn_norm_2)]
    y = g + attention(x Wq, x Wk, x Wv) Wo              over a separate cache, without position 0
    y = y + swiglu(rms_norm(y, ffn_norm))
    logits = rms_norm(y, output_norm) Whead, for position p + 1

(llama.cpp, ``src/models/eagle3.cpp``, ``common/speculative.cpp``).  For further drafts, y replaces g.  In some files the
normalized g takes the place of g in the first sum.  Whead may have fewer rows than the vocabulary of the target has tokens;
the tensor ``d2t`` then has the token of each row.

Such a network is used like a layer for multi-token prediction (``engine/models/mtp.py``): every pass of the target stores,
for all of its tokens, g in rings, and keys and values in pages.  llama.cpp numbers the positions of keys from the second
token on, because the first one has no g.  Here they have the positions of their tokens, and position 0 is hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.arrays import Array, Batch
from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.models.base import Model
from engine.models.config import EAGLE3, LayerConfig, ModelConfig
from engine.models.layer import load_layer
from engine.models.linear import Linear
from engine.models.loader import Loader
from engine.models.metadata import Metadata
from engine.models.mixer import Mixer
from engine.models.mtp import MTP, DraftingLayer, lent_output, rows_of_tokens
from engine.models.norm import load_norm
from engine.models.weights import bytes_read
from engine.ops.operations import Ops

TARGETS = ("llama", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "gpt-oss", "gemma4")
"""The architectures of models for which such networks exist."""


def with_eagle3(config: ModelConfig, gguf: GGUF, network: GGUF) -> ModelConfig:
    """A copy of the configuration of the model ``gguf`` with the network that drafts for it.

    Raises ModelError if the network belongs to another model, and GGUFError for invalid values.
    """
    own = _read(network)
    wanted = f"{network.path} drafts for models"
    m = Metadata(network, EAGLE3)
    if config.architecture not in TARGETS:
        raise ModelError(
            f"{wanted} of the architectures {', '.join(TARGETS)}, and {gguf.path} is {config.architecture}."
        )
    width = m.integer("target_hidden_size")
    if width != config.n_embd:
        raise ModelError(f"{wanted} with embeddings of {width}, and {gguf.path} has {config.n_embd}.")
    taps = m.taps(config.n_layer, str(gguf.path))
    if "token_embd.weight" not in network.tensors and own.n_embd != config.n_embd:
        raise ModelError(f"{network.path} has no token_embd.weight, and its width is not that of {gguf.path}.")
    return replace(config, mtp=own.layers, mtp_apart=True, mtp_problem="", taps=taps, n_embd_draft=own.n_embd)


def _read(gguf: GGUF) -> ModelConfig:
    """The configuration of the network alone."""
    m = Metadata(gguf, EAGLE3)
    if m.n_blocks != 1:
        m.refuse("block_count", f"is {m.n_blocks}, and networks of one layer are supported")
    attention = m.attention(0, m.rope(neox=False), n_in=2 * m.n_embd, hides_first=True)
    eps = m.number("attention.layer_norm_rms_epsilon", None, 0.0, 1.0)
    layer = LayerConfig(attention, m.dense(0))
    return ModelConfig(EAGLE3, gguf.path.stem, m.n_embd, m.n_vocab, m.n_ctx_train, eps, (layer,))


@dataclass
class TapFusion:
    """What the target computes of the layers that the network reads: g from the rows of their inputs.

    norm: the weights of a norm of all of them together, float32, or None.
    """

    product: Linear
    norm: Array | None
    norm_eps: float

    def apply(self, ops: Ops, taps: Sequence[Array]) -> Array:
        """g, float32 [rows, n], of the residual stream before each layer, float32 [rows, n_embd]."""
        joined = ops.join_columns(taps)
        if self.norm is None:
            return self.product.apply(ops, joined)
        return self.product.apply(ops, ops.rms_norm(joined, self.norm, self.norm_eps))


class EagleLayer(DraftingLayer):
    """The layer of the network, which drafts for ``model``.

    loader: a loader of its file, whose configuration is that of the network.
    """

    def __init__(self, model: Model, loader: Loader) -> None:
        c, n_vocab, blk = loader.config, model.config.n_vocab, "blk.0."
        self.il = model.config.n_layer
        self.layer = load_layer(loader, loader, 0)
        assert self.layer.before_mixer is not None and isinstance(self.layer.mixer, Mixer)
        self.mixer = self.layer.mixer
        self.enorm, self.hnorm = self.layer.before_mixer.weight, loader.vector(blk + "attn_norm_2.weight", c.n_embd)
        self.output_norm = load_norm(loader, "output_norm")
        self._norm_eps = c.norm_eps
        self._adds_normed = Metadata(loader.gguf, EAGLE3).flag("norm_before_residual", False)
        self.embed_tokens = model.token_embd
        if loader.has("token_embd.weight"):
            self.embed_tokens = loader.embedding_matrix("token_embd.weight", n_vocab, c.n_embd)
        #: int32 [n_vocab]: the row of the output for each token, -1: none.  None: row t is token t.
        n_rows, self.row_of_token = rows_of_tokens(loader, n_vocab)
        self.output = loader.product("output.weight", n_rows, c.n_embd) if loader.has("output.weight") else model.output
        own = [tensor for name, tensor in loader.gguf.tensors.items() if name.startswith((blk, "output.weight"))]
        if not loader.has("output.weight"):
            own.append(lent_output(model.gguf))
        self.n_bytes = bytes_read(own, c)

    def joined(self, model: Model, hidden: Array, batch: Batch[Array]) -> Array:
        """The inputs x of attention, float32 [rows, 2 n], computed from the tokens and from g of the preceding positions.

        hidden: the rings of g, float32 [sequences, length, n].
        """
        ops = model.ops
        e = ops.embed(self.embed_tokens, batch.tokens)
        return ops.mtp_input(e, self.enorm, hidden, self.hnorm, batch, self._norm_eps)

    def remember(self, model: Model, hidden: Array, batch: Batch[Array]) -> None:
        """Store the keys and values of the rows.  hidden: the rings of g, float32 [sequences, length, n]."""
        x = self.joined(model, hidden, batch)
        self.mixer.remember(model.ops, x, model.memory(self.il), batch)

    def run(self, model: Model, hidden: Array, batch: Batch[Array]) -> Array:
        """The output y, float32 [rows, n].  hidden: the rings of g, float32 [sequences, length, n]."""
        ops, layer = model.ops, self.layer
        o = self.mixer.mix(ops, self.joined(model, hidden, batch), model.memory(self.il), batch)
        g = ops.rows_before(hidden, batch)
        if self._adds_normed:
            g = ops.plain(ops.rms_norm(g, self.hnorm, self._norm_eps))
        return layer.feed(ops, layer.after_mixer.add_product(ops, g, o, self.mixer.output), batch)

    def finish(self, model: Model, y: Array, hidden: Array, batch: Batch[Array]) -> Array:
        """Store y [rows, n] in the rings ``hidden``; returns the logits, float32 [rows, n_vocab]."""
        ops = model.ops
        ops.keep_rows(hidden, y, batch)
        logits = self.output.apply(ops, self.output_norm.apply(ops, y))
        return logits if self.row_of_token is None else ops.spread_logits(logits, self.row_of_token)


def load_eagle3(model: Model, gguf: GGUF) -> MTP:
    """Load the network of a file that drafts for ``model``, whose configuration includes it.  The model then computes g.

    Raises ModelError if the tensors do not match.
    """
    loader = Loader(_read(gguf), gguf, model.ops, model.cache.n_ctx, model)
    # The model computes the angles of all layers; factors of frequencies are in the file of the network.
    model.further.append(loader)
    c, width = loader.config, model.config.n_embd * len(model.config.taps)
    has_norm = Metadata(gguf, EAGLE3).flag("norm_before_fc", False)
    norm = loader.vector("enc.output_norm.weight", width) if has_norm else None
    model.fusion = TapFusion(loader.product("fc.weight", c.n_embd, width), norm, c.norm_eps)
    layer = EagleLayer(model, loader)
    loader.check_complete()
    return MTP(model, [layer])
