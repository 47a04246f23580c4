"""DFlash: a small network in a file of its own that drafts a block of tokens in one pass (Chen et al. 2026), and DSpark.

It reads what several layers of its target compute, like EAGLE-3 (``engine/models/eagle3.py``).  With a, b, ... the residual
stream of the target before these layers at position p, every pass of the target stores for its tokens::

    g = rms_norm([a, b, ...] Wfc, hidden_norm)
    k, v = g Wk, g Wv                              for each layer of the network, with its norm of keys and its rotation

To draft n tokens after the last sampled one, which has position p, the network reads a block of n + 1 rows at the positions
from p on: that token, and n mask tokens.  Each layer stores keys and values of these rows, too, and each row attends to all
positions before the block and to all rows of the block::

    x = embed(token)
    x = x + attention(rms_norm(x, attn_norm)) Wo
    x = x + swiglu(rms_norm(x, ffn_norm))
    logits = rms_norm(x, output_norm) Whead        of row i, for the token at position p + i

(llama.cpp, ``src/models/dflash.cpp``, ``common/speculative.cpp``).  The next pass of the target overwrites the keys and
values of a block.

DSpark adds a Markov head, which corrects the logits of a row by the token t before it, and a confidence head, which predicts
whether the target keeps the draft::

    logits += embed(t, W1) W2;  confidence = sigmoid([rms_norm(x, output_norm), embed(t, W1)] Wc + bc)

In most of its networks the logits of row i are those of position p + i + 1, so that a block of n rows drafts n tokens.

The rows of logits are kept until all drafts of the step have been made.  The pass of draft i reads the row of that draft and
corrects it.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np

from engine.arrays import Array, Batch
from engine.cache.sequence import Sequence
from engine.gguf.file import GGUF
from engine.limits import DECODE_ROWS
from engine.models.attention import Attention
from engine.models.base import Model
from engine.models.dflash_config import DFlashConfig, read_dflash
from engine.models.drafter import BlockPass, row_after
from engine.models.layer import Layer, load_layer
from engine.models.linear import Linear
from engine.models.loader import Loader
from engine.models.mtp import lent_output, rows_of_tokens
from engine.models.weights import bytes_read
from engine.ops.executor import Forward
from engine.ops.operations import Ops


@dataclass
class NormedFusion:
    """What the target computes of the layers that the network reads: g from the rows of their inputs.

    norm: the weights of the norm of g, float32 [n_embd].
    """

    product: Linear
    norm: Array
    norm_eps: float

    def apply(self, ops: Ops, taps: SequenceOf[Array]) -> Array:
        """g, float32 [rows, n_embd], of the residual stream before each layer, float32 [rows, n_embd]."""
        return ops.plain(ops.rms_norm(self.product.apply(ops, ops.join_columns(taps)), self.norm, self.norm_eps))


@dataclass(frozen=True)
class BlockDraft:
    """The operations of the pass that makes draft ``number`` of a step from the logits of its block."""

    network: "DFlash"
    number: int

    def __call__(self, batch: Batch[Array], n_logits: int) -> Array:
        """Logits for the position after the token of each row of the batch, which precedes the draft, float32 [rows,
        n_vocab]."""
        net, ops = self.network, self.network.ops
        logits = ops.rows_before(net.logits, net.row_of_draft(self.number, batch))
        if net.markov is not None:
            table, correction = net.markov
            logits = ops.add(logits, correction.apply(ops, ops.embed(table, batch.tokens)))
        c = net.config.network
        if c.logit_scale != 1.0:
            logits = ops.scale(logits, c.logit_scale)
        if c.final_softcap:
            logits = ops.softcap(logits, c.final_softcap)
        return logits if net.row_of_token is None else ops.spread_logits(logits, net.row_of_token)


@dataclass(frozen=True)
class Confidence:
    """The operations of the pass that judges draft ``number`` of a step."""

    network: "DFlash"
    number: int

    def __call__(self, batch: Batch[Array], n_logits: int) -> Array:
        """The logit of the confidence in the draft that follows the token of each row of the batch, float32 [rows, 1]."""
        net, ops = self.network, self.network.ops
        assert net.markov is not None and net.confidence_head is not None
        x = ops.rows_before(net.outputs, net.row_of_draft(self.number, batch))
        return net.confidence_head.apply(ops, ops.join_columns([x, ops.embed(net.markov[0], batch.tokens)]))


class DFlash:
    """The network that drafts for ``model``.

    loader: a loader of its file, whose configuration is that of the network.
    """

    hidden = None

    def __init__(self, model: Model, loader: Loader, config: DFlashConfig) -> None:
        self.model, self.config = model, config
        ops, c, n_vocab, rows = model.ops, loader.config, model.config.n_vocab, DECODE_ROWS
        self._first = model.config.n_layer
        self.layers: list[Layer] = [load_layer(loader, loader, il) for il in range(c.n_layer)]
        self._scales = [loader.scalar(f"blk.{il}.layer_output_scale.weight") for il in range(c.n_layer)]
        self._output_norm = loader.vector("output_norm.weight", c.n_embd)
        self._norm_eps = c.norm_eps
        own = loader.has("token_embd.weight")
        self._embedding = model.token_embd
        if own:
            self._embedding = loader.embedding_matrix("token_embd.weight", n_vocab, c.n_embd)
        #: int32 [n_vocab]: the row of the output for each token, -1: none.  None: row t is token t.
        n_rows, self.row_of_token = rows_of_tokens(loader, n_vocab)
        if loader.has("output.weight"):
            self._output = loader.product("output.weight", n_rows, c.n_embd)
        elif own and len(ops.owners) > 1:
            self._output = loader.product("token_embd.weight", n_vocab, c.n_embd)
        else:
            self._output = Linear(self._embedding) if own else model.output
        #: The embedding and the matrix of the Markov head.
        self.markov = None
        self.confidence_head: Linear | None = None
        if loader.has("markov_w1.weight"):
            rank = loader.gguf.tensors["markov_w1.weight"].shape[1]
            table = loader.embedding_matrix("markov_w1.weight", n_vocab, rank)
            self.markov = table, loader.linear("markov_w2", n_rows, rank)
            if loader.has("conf_proj.weight"):
                self.confidence_head = loader.linear("conf_proj", 1, c.n_embd + rank)
        #: The size in bytes of the weights that one draft reads.
        self.n_bytes = self._bytes(loader) // config.block
        #: Memory for the inputs of the draft passes, and of the pass of a block.
        self.inputs, self._block_inputs = ops.inputs(), ops.inputs()
        #: float32 [1, 16, ...]: the logits and the normalized outputs of the rows of the latest block.
        self.logits = ops.zeros((1, rows, n_rows), np.float32)
        self.outputs = ops.zeros((1, rows, c.n_embd), np.float32)
        # Where steps write them: all owners read them there.
        last, places = ops.owners[0].zeros((rows,), np.int32), ops.owners[0].zeros((rows, rows), np.int32)
        #: The pass of a block.
        self.block = BlockPass(self.fill, config.mask, config.shift, config.causal, last, places)
        self._numbers, self._nowhere = ops.upload(np.arange(rows, dtype=np.int32)), ops.zeros((rows,), np.int32)

    def _bytes(self, loader: Loader) -> int:
        """The size in bytes of the weights that a block and its drafts read."""
        names = ("fc.weight", "token_embd.weight", "markov_w1.weight")
        own = [tensor for name, tensor in loader.gguf.tensors.items() if name not in names]
        correction = [tensor for tensor in own if tensor.name.startswith("markov_w2")] * (self.config.block - 1)
        if not loader.has("output.weight"):
            own.append(lent_output(loader.gguf if loader.has("token_embd.weight") else self.model.gguf))
        return bytes_read([*own, *correction], loader.config)

    @property
    def ops(self) -> Ops:
        """The backend that computes the network."""
        return self.model.ops

    def belong(self, model: Model) -> None:
        """Set the model for which the network drafts.  ``model`` must have the same weights as the previous one."""
        self.model = model

    @property
    def passes(self) -> tuple[Forward[Array], ...]:
        """The i-th pass computes the i-th draft of a step."""
        return tuple(BlockDraft(self, number) for number in range(self.config.block))

    @property
    def listed(self) -> SequenceOf[tuple[Forward[Array], int]]:
        """Passes that together use every kernel, each with the maximum number of its rows for one sequence."""
        judges = [(Confidence(self, 0), 1)] if self.confidence_head is not None else []
        return [(self.fill, self.config.block + 1), (self.passes[0], 1), *judges]

    def follow(self, batch: Batch[Array], hidden: Array) -> None:
        """Store the keys and values of g, hidden [rows, n_embd], for the tokens of a pass of the trunk."""
        for number, layer in enumerate(self.layers):
            assert layer.mixer is not None
            layer.mixer.remember(self.ops, hidden, self.model.memory(self._first + number), batch)

    def fill(self, batch: Batch[Array], n_logits: int) -> None:
        """The operations of the pass of a block: keep the logits of its rows, and their normalized outputs.

        n_logits: not used.
        """
        ops, model, c = self.ops, self.model, self.config
        batch, last = model.placed(ops, batch), self.block.last[: batch.rows]
        place = last if batch.thinned is None else ops.places(last, batch, batch.thinned.dropped)
        x = ops.embed(self._embedding, batch.tokens, c.network.embedding_scale)
        for number, layer in enumerate(self.layers):
            mixer, memory = layer.mixer, model.memory(self._first + number)
            assert isinstance(mixer, Attention)
            a = layer.normalized(ops, x, layer.before_mixer)
            o = mixer.mix_up_to(ops, a, memory, batch, last if memory.window > 0 else place)
            x = layer.feed(ops, layer.after_mixer.add_product(ops, x, o, mixer.output), batch)
            if self._scales[number] != 1.0:
                x = ops.scale(x, self._scales[number])
        y = ops.plain(ops.rms_norm(x, self._output_norm, self._norm_eps))
        rows = self._rows(self._numbers, batch)
        if self.confidence_head is not None:
            ops.keep_rows(self.outputs, y, rows)
        ops.keep_rows(self.logits, self._output.apply(ops, y), rows)

    def row_of_draft(self, number: int, batch: Batch[Array]) -> Batch[Array]:
        """Where ``Operations.rows_before`` finds the rows that predict draft ``number`` of the sequences of a batch."""
        return self._rows(self.block.places[number : number + 1].reshape(DECODE_ROWS), batch)

    def _rows(self, numbers: Array, batch: Batch[Array]) -> Batch[Array]:
        """A batch of as many rows of a single sequence, at positions ``numbers``."""
        numbers, nowhere = numbers[: batch.rows], self._nowhere[: batch.rows]
        return replace(batch, positions=numbers, sequences=nowhere, mixed=False)

    def forward(self, token: int, position: int, sequence: Sequence, number: int = 0, count: int = 1) -> np.ndarray:
        """Run the pass of draft ``number`` of a step with ``count`` drafts; for the first draft, also the pass of the block.
        Returns the logits, float32 [n_vocab], of the token that follows ``token`` at ``position``."""
        if number == 0:
            self._fill(token, position, sequence, count)
        return row_after(self.ops, BlockDraft(self, number), token, position, sequence.slot, self.inputs)

    def confidence(self, token: int, position: int, sequence: Sequence, number: int) -> float:
        """The predicted probability that the target keeps draft ``number`` of a step, which follows ``token`` at
        ``position``."""
        judge = Confidence(self, number)
        logit = float(row_after(self.ops, judge, token, position, sequence.slot, self.inputs)[0])
        return float(0.5 + 0.5 * np.tanh(0.5 * logit))

    def prepare(self, position: int, count: int, sequence: Sequence) -> np.ndarray:
        """Prepare the pass of a block of ``count`` drafts, whose last sampled token has this position.  Returns the positions
        of its rows, int32 [rows]."""
        block, rows = self.block, count + self.config.shift
        positions = np.arange(position, position + rows, dtype=np.int32)
        last = positions if block.causal else np.full(rows, positions[-1])
        lead = self.ops.owners[0]
        lead.store(block.last, 0, last.astype(np.int32))
        numbers = np.arange(DECODE_ROWS, dtype=np.int32) + block.shift + 1
        lead.store(block.places, 0, np.repeat(numbers[:, None], DECODE_ROWS, 1))
        model, end = self.model, position + rows
        model.reserve(end)
        sequence.reserve(end)
        sequence.overwrite(end)
        model.cache.publish()
        return positions

    def _fill(self, token: int, position: int, sequence: Sequence, count: int) -> None:
        positions = self.prepare(position, count, sequence)
        tokens = np.full(positions.size, self.config.mask, np.int32)
        tokens[0] = token
        batch = Batch(tokens, positions, np.full(positions.size, sequence.slot, np.int32))
        self.ops.run(self.fill, batch, 0, self._block_inputs)

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""
        self.model.reserve(length)


def load_dflash(model: Model, gguf: GGUF) -> DFlash:
    """Load the network of a file that drafts for ``model``, whose configuration includes it.  The model then computes g.

    Raises ModelError if the tensors do not match.
    """
    config = read_dflash(gguf, model.config.n_vocab)
    loader = Loader(config.network, gguf, model.ops, model.cache.n_ctx, model)
    # The model computes the angles of all layers; factors of frequencies are in the file of the network.
    model.further.append(loader)
    c = config.network
    product = loader.linear("fc", c.n_embd, len(model.config.taps) * c.n_embd)
    model.fusion = NormedFusion(product, loader.vector("enc.output_norm.weight", c.n_embd), c.norm_eps)
    network = DFlash(model, loader, config)
    loader.check_complete()
    return network
