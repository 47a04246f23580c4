"""gemma4-assistant: a small model that drafts for a gemma4 model, using its outputs, keys and values.

For token t at position p, with h the normalized output of the trunk at position p - 1, and P the position of the last sampled
token before the drafts of a step (llama.cpp, ``src/models/gemma4-assistant.cpp``)::

    x = [embed(t), h] Wpre                          the embedding of the trunk
    x = layer(x)                                    as in engine/models/families/gemma4.py, but with queries only.  They have
                                                    position P, and read the keys and values before P of the last layer of
                                                    the same kind in the trunk
    y = rms_norm(x, output_norm);  h' = y Wpost;  logits = y Whead, for position p + 1

For further drafts, h' replaces h, with the same P.  Drafts have no keys, so the assistant sees them only through h'.  It has
no cache.  The outputs h are stored in rings indexed by position, as in ``engine/models/mtp.py``.  Every pass of the trunk
overwrites the entries that drafts have stored there.
"""

from dataclasses import replace

import numpy as np

from engine.arrays import Array, Batch
from engine.cache.pages import spare
from engine.cache.sequence import Sequence
from engine.errors import ModelError, UsageError
from engine.gguf.file import GGUF
from engine.limits import DECODE_ANSWERS
from engine.models.attention_config import AttentionConfig
from engine.models.base import Model
from engine.models.config import ModelConfig
from engine.models.drafter import ChainDrafter, row_after
from engine.models.families.gemma4 import Gemma4Loader
from engine.models.linear import products
from engine.models.weights import bytes_read
from engine.ops.executor import Forward
from engine.ops.operations import Ops

IGNORED = ("masked_embd_centroids.weight", "masked_embd_ordering")
"""Tensors that select the logits to compute.  They are ignored, because this engine computes all logits."""


class Assistant(Gemma4Loader, ChainDrafter):
    """The assistant of ``target``, on the same device or on another GPU that can read the memory of the target.

    Raises ModelError if the file is the assistant of another model.
    """

    def __init__(self, config: ModelConfig, gguf: GGUF, ops: Ops, target: Model) -> None:
        # The assistant shares the target's tables of angles that are equal, if both are on the same device.
        super().__init__(config, gguf, ops, target.cache.n_ctx, target if ops is target.ops else None)
        c = config
        self._target = target
        self._memories = [self._memory_of(il) for il in range(c.n_layer)]
        for il in (target.config.owners[memory] for memory in self._memories):
            if not ops.can_reach(target.placement.memory(il)):
                raise UsageError(
                    f"{gguf.path} reads the keys of layer {il}, which is on another kind of device: place more layers of the "
                    "model on the GPU (n_gpu_layers=...), or leave out the assistant."
                )
        self._token_embd = target.token_embd
        self.output = self.product("token_embd.weight", c.n_vocab, c.n_embd)
        self.output_norm = self.vector("output_norm.weight", c.n_embd)
        self.pre_projection = self.product("nextn.pre_projection.weight", c.n_embd, 2 * c.n_embd_out)
        self.post_projection = self.product("nextn.post_projection.weight", c.n_embd_out, c.n_embd)
        self.mixers = [self.load_mixer(il) for il in range(c.n_layer)]
        self.networks = [self.load_network(il) for il in range(c.n_layer)]
        self.ignore(*IGNORED)
        self.check_complete()
        #: Memory for the inputs of the assistant's passes.
        self.inputs = ops.inputs()
        #: int32 [2, DECODE_ANSWERS]: P and P - 1 of each row, where steps write them: all owners read them there.
        self.anchor = ops.owners[0].zeros((2, DECODE_ANSWERS), np.int32)
        #: float32 [sequences, length, n_embd_out]: h of position p is in row p % length.  There are more rows than steps in
        #: flight can write after the last committed position.
        sizes = target.cache.n_sequences, spare(target.ops.decode_rows), c.n_embd_out
        self.hidden = target.ops.zeros(sizes, np.float32)

    def _memory_of(self, il: int) -> int:
        """The index, in the target's cache, of the layer whose keys and values layer ``il`` reads."""
        c, t = self.config, self._target.config
        if t.architecture != "gemma4" or t.n_embd != c.n_embd_out or t.n_vocab != c.n_vocab:
            raise ModelError(
                f"{self.gguf.path} drafts for gemma4 models of {c.n_embd_out} dimensions and {c.n_vocab} tokens, and "
                f"{self._target.gguf.path} is {t.architecture} of {t.n_embd} and {t.n_vocab}; use that model's assistant."
            )
        own = _attention(c, il)
        alike = [n for n in range(t.n_layer) if (_attention(t, n).window > 0) == (own.window > 0)]
        last = _attention(t, alike[-1]) if alike else None
        if last is None or (last.n_head_kv, last.d_k) != (own.n_head_kv, own.d_k) or last.window == 1:
            raise ModelError(
                f"layer {il} of {self.gguf.path} requires keys that {self._target.gguf.path} does not have; "
                "use the assistant of that model."
            )
        return t.memory(alike[-1])

    @property
    def n_bytes(self) -> int:
        """The size in bytes of the weights that one draft reads."""
        return bytes_read(self.gguf.tensors.values(), self.config)

    def follow(self, batch: Batch[Array], hidden: Array) -> None:
        """Store the outputs of the trunk for the tokens of a pass: hidden [rows, n_embd_out]."""
        if not batch.mixed and batch.rows > self.hidden.shape[1]:
            last = slice(batch.rows - self.hidden.shape[1], batch.rows)
            hidden, batch = hidden[last], batch.part(last)
        self._target.ops.keep_rows(self.hidden, hidden, batch)

    def compute(self, batch: Batch[Array], n_logits: int) -> Array:
        """The operations of a draft pass: logits after one token, float32 [1, n_vocab].

        h of the position before the token must be stored.  The pass stores h' at the position of the token.  The next pass
        of the trunk overwrites it with h.
        """
        ops, c, target = self.ops, self.config, self._target
        e = ops.embed(self._token_embd, batch.tokens, target.config.embedding_scale)
        x = self.pre_projection.apply(ops, ops.beside(e, self.hidden, batch))
        # All drafts of a step use the position of the last sampled token and see the positions before it.
        places, last = (self.anchor[i : i + 1].reshape(DECODE_ANSWERS)[: batch.rows] for i in range(2))
        here = replace(batch, positions=places)
        for il, (layer, network) in enumerate(zip(self.mixers, self.networks, strict=True)):
            memory = target.cache.layers[self._memories[il]]
            window = memory.window - 1 if layer.window else 0
            dropped = target.dropped(self._memories[il])
            seen = last if layer.window or dropped is None else ops.places(last, here, dropped)
            q = layer.attn_q.apply(ops, ops.rms_norm(x, layer.attn_norm, c.norm_eps))
            o = ops.attend_past(layer.heads, q, memory, here, seen, layer.table, window)
            x = self.add_network(ops, network, self.add_attention(ops, layer, x, o), None)
        y = ops.plain(ops.rms_norm(x, self.output_norm, c.norm_eps))
        logits, hidden = products(ops, y, [self.output, self.post_projection])
        ops.keep_rows(self.hidden, hidden, batch)
        return logits

    def stand(self, position: int) -> None:
        """Set P, the position of the last sampled token before the next drafts.  It must be at least 1."""
        anchor = np.array([[position], [position - 1]], np.int32)
        self.ops.owners[0].store(self.anchor, 0, np.repeat(anchor, DECODE_ANSWERS, 1))

    @property
    def passes(self) -> tuple[Forward[Array]]:
        """The pass of all drafts."""
        return (self.compute,)

    def forward(self, token: int, position: int, sequence: Sequence, number: int = 0, count: int = 1) -> np.ndarray:
        """Run the pass of draft ``number`` of a step with ``count`` drafts.  Returns the logits, float32 [n_vocab], of the
        token that follows ``token`` at ``position``."""
        self.reserve(position + 1)
        return row_after(self.ops, self.compute, token, position, sequence.slot, self.inputs)


def _attention(config: ModelConfig, il: int) -> AttentionConfig:
    mixer = config.layers[il].mixer
    assert isinstance(mixer, AttentionConfig)
    return mixer
