"""What all decoder-only transformers share: embedding, layers, output head, cache, and the one entry ``forward``."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.cache.kv import KVCache, LayerShape, Ring, Shape
from engine.cache.recurrent import RecurrentLayer, RecurrentShape, Snapshot
from engine.config import ModelConfig, RopeConfig
from engine.errors import ModelError
from engine.gguf import GGUF
from engine.gguf_header import shown
from engine.models.experts import Experts
from engine.models.feed_forward import FeedForward
from engine.models.heads import Heads
from engine.models.rotary import Rotary
from engine.weights import Weight, join_rows, load_vector, load_weight


class Model:
    """A model on a backend.  ``ops`` is the backend; nothing here or below knows which one.

    A subclass loads its layers and computes one of them in ``block``.  ``mtp``: the layer that drafts tokens
    (``engine/models/mtp.py``), None where there is none or nobody wants it.
    """

    operations: tuple[str, ...] = ()
    """Names of the backend's operations that a forward pass calls: what has to be compiled before it can run."""

    def __init__(self, config: ModelConfig, gguf: GGUF, ops: Any, n_ctx: int, half: bool, slots: int) -> None:
        """half: keys and values are float16; slots: states that recurrent layers keep."""
        self.config = config
        self.slots = slots
        self.mtp: Any = None
        self.gguf = gguf
        self.ops = ops
        self._taken: set[str] = set()
        self._rotaries: list[Rotary] = []
        self.token_embd = self._matrix("token_embd.weight", config.n_vocab, config.n_embd)
        self.output_norm = self._vector("output_norm.weight", config.n_embd)
        tied = "output.weight" not in gguf.tensors
        self.output = self.token_embd if tied else self._matrix("output.weight", config.n_vocab, config.n_embd)
        self.layers: list[Any] = [self.load_layer(il) for il in range(config.n_layer)]
        # The cache comes last: by now the tensors have confirmed the sizes that the metadata claims.
        max_rows = min(ops.max_rows, n_ctx)
        others = [hidden_ring(max_rows, slots)] if config.n_mtp else []
        self.cache = KVCache(layer_shapes(config, slots), n_ctx, max_rows, half, ops.zeros, others)

    # --- loading -----------------------------------------------------------------------------------------------

    def load_layer(self, il: int) -> Any:
        """The weights of layer ``il``."""
        raise NotImplementedError

    def _weight(self, name: str, rows: int, columns: int, count: int = 0) -> Weight:
        """A matrix of the file, or ``count`` of one tensor."""
        self._taken.add(name)
        return load_weight(self.gguf, name, rows, columns, count)

    def _matrix(self, name: str, rows: int, columns: int, count: int = 0) -> Weight:
        """The same, where the operations can read it."""
        weight: Weight = self.ops.weight(self._weight(name, rows, columns, count))
        return weight

    def _array(self, name: str, *shape: int) -> np.ndarray:
        """Small float32 values of the file."""
        self._taken.add(name)
        return load_vector(self.gguf, name, *shape)

    def _vector(self, name: str, *shape: int) -> Any:
        """The same, where the operations can read them."""
        return self.ops.upload(self._array(name, *shape))

    def _heads(self, blk: str, *, normed: bool, neox: bool = True, biases: Any = None, gated: bool = False) -> Heads:
        """The heads of an attention layer."""
        c = self.config
        q_norm, k_norm = (
            self._vector(f"{blk}attn_{name}_norm.weight", c.d_k) if normed else None for name in ("q", "k")
        )
        return Heads(
            c.n_head,
            c.n_head_kv,
            c.d_k,
            c.d_v,
            neox=neox,
            scale=c.attention_scale,
            eps=c.norm_eps,
            q_norm=q_norm,
            k_norm=k_norm,
            biases=biases,
            gated=gated,
        )

    def _feed_forward(self, blk: str) -> FeedForward | Experts:
        """The feed-forward network of a layer."""
        c, e = self.config, self.config.experts
        if e is None:
            return FeedForward(
                self._matrix(blk + "ffn_gate.weight", c.n_ff, c.n_embd),
                self._matrix(blk + "ffn_up.weight", c.n_ff, c.n_embd),
                self._matrix(blk + "ffn_down.weight", c.n_embd, c.n_ff),
            )
        router = [self._array(blk + "ffn_gate_inp.weight", e.n_expert, c.n_embd)]
        shared = None
        if e.n_ff_shared:
            router.append(self._array(blk + "ffn_gate_inp_shexp.weight", c.n_embd))
            shared = (
                self._matrix(blk + "ffn_gate_shexp.weight", e.n_ff_shared, c.n_embd),
                self._matrix(blk + "ffn_up_shexp.weight", e.n_ff_shared, c.n_embd),
                self._matrix(blk + "ffn_down_shexp.weight", c.n_embd, e.n_ff_shared),
            )
        return Experts(
            e.n_expert,
            e.n_used,
            self.ops.weight(join_rows(blk + "ffn_gate_inp.weight", *router)),
            self._matrix(blk + "ffn_gate_exps.weight", e.n_ff, c.n_embd, e.n_expert),
            self._matrix(blk + "ffn_up_exps.weight", e.n_ff, c.n_embd, e.n_expert),
            self._matrix(blk + "ffn_down_exps.weight", c.n_embd, e.n_ff, e.n_expert),
            shared,
        )

    def _optional(self, name: str, size: int) -> Any:
        return self._vector(name, size) if name in self.gguf.tensors else None

    def _rotary(self, rope: RopeConfig) -> Rotary:
        """Angles of one kind of layer; Llama 3 files bring per-frequency factors."""
        factors = None
        if "rope_freqs.weight" in self.gguf.tensors:
            factors = self._array("rope_freqs.weight", rope.n_rot // 2)
            if not np.all(np.isfinite(factors) & (factors > 0)):
                raise ModelError(f"{self.gguf.path}: rope_freqs.weight must be positive numbers; the file is damaged.")
        self._rotaries.append(Rotary(self.ops, rope, factors, self.cache.n_ctx))
        return self._rotaries[-1]

    def check_complete(self) -> None:
        """ModelError for tensors of the file that no layer has asked for: ignoring them would give wrong answers."""
        c = self.config
        rest = sorted(set(self.gguf.tensors) - self._taken)
        if c.n_mtp_in_file > c.n_mtp:
            # The layer that drafts may be left in the file.
            rest = [name for name in rest if not name.startswith(f"blk.{c.n_layer}.")]
        if rest:
            names = ", ".join(shown(name) for name in rest[:4]) + (
                f" and {len(rest) - 4} more" if len(rest) > 4 else ""
            )
            raise ModelError(
                f"{self.gguf.path}: tensors that a plain {c.architecture} model does not have: {names}; "
                "this variant is not supported."
            )

    # --- the forward pass --------------------------------------------------------------------------------------

    def forward(self, tokens: np.ndarray, positions: np.ndarray, n_logits: int) -> np.ndarray:
        """Store ``tokens`` int32 [rows] at ``positions`` int32 [rows] (consecutive, from ``cache.length``) and return
        the logits of the last ``n_logits`` rows: float32 [n_logits, n_vocab].

        rows = 1 is a decode step, more a verify batch or a prompt; the bits of a row are the same in all.
        ContextError if the positions do not fit.
        """
        self.prepare(int(positions[0]), tokens.size)
        logits = self.ops.run(self.compute, tokens, positions, n_logits)
        return np.empty((0, self.config.n_vocab), np.float32) if logits is None else logits

    def prepare(self, first: int, count: int) -> None:
        """Claim positions [first, first + count) of the cache and have their angles ready."""
        self.cache.advance(first, count)
        self.reserve(self.cache.length)

    def reserve(self, length: int) -> None:
        """Have the angles of positions [0, length) ready."""
        for rotary in self._rotaries:
            rotary.reserve(length)

    def save(self) -> Snapshot:
        """What recurrent layers, and the layer that drafts, know after the tokens in the cache; at least one."""
        length, arrays = self.cache.length, []
        for _, ring, back in self.rings():
            n = int(ring.shape[0])
            rows = [p % n for p in range(max(0, length - back), length)]
            arrays += [np.array(self.ops.download(ring[row : row + 1])) for row in rows]
        return Snapshot(length, arrays)

    def restore(self, snapshot: Snapshot) -> None:
        """Go on after the tokens of a snapshot, whose keys and values must lie in the cache."""
        length, arrays = snapshot.length, iter(snapshot.arrays)
        for _, ring, back in self.rings():
            for p in range(max(0, length - back), length):
                self.ops.store(ring, p % int(ring.shape[0]), next(arrays))
        self.cache.restored(length)

    def rings(self) -> Iterator[tuple[str, Any, int]]:
        """Each ring by position beside keys and values: its name, the ring, and how many of its latest rows a pass needs."""
        net = self.config.delta_net
        for il, layer in enumerate(self.cache.layers):
            if net is not None and isinstance(layer, RecurrentLayer):
                yield f"inputs of layer {il}", layer.conv, net.n_conv - 1
                yield f"state of layer {il}", layer.states, 1
        if self.mtp is not None:
            yield "output of the trunk", self.mtp.hidden, 1

    def compute(self, tokens: Any, positions: Any, n_logits: int) -> Any:
        """The operations of a pass, on the backend's arrays; None where no logits are asked for.  A backend may record them
        once and repeat them, so they depend on the number of rows, never on the values."""
        ops, config = self.ops, self.config
        x = ops.embed(self.token_embd, tokens, config.embedding_scale)
        for il in range(config.n_layer):
            x = self.block(il, x, positions)
        last = slice(tokens.size - n_logits, tokens.size)
        if self.mtp is not None:
            # It goes on from what every token has become, not only from those that logits are asked for.
            hidden = ops.plain(ops.rms_norm(x, self.output_norm, config.norm_eps))
            self.mtp.follow(tokens, positions, hidden)
            x = hidden[last]
        elif n_logits:
            x = ops.rms_norm(x[last], self.output_norm, config.norm_eps)
        if n_logits == 0:
            return None
        (logits,) = ops.matmul(x, self.output)
        return ops.softcap(logits, config.final_softcap) if config.final_softcap else logits

    def block(self, il: int, x: Any, positions: Any) -> Any:
        """One layer: residual stream in, residual stream out, float32 [rows, n_embd]."""
        raise NotImplementedError


def layer_shapes(config: ModelConfig, slots: int) -> list[Shape]:
    """What each layer keeps, that of the layer that drafts last; ``slots``: states of recurrent layers."""
    full = LayerShape(config.n_head_kv, config.d_k, config.d_v)
    shapes: list[Shape] = []
    for il in range(config.n_layer):
        net = config.delta_net
        if net is not None and config.recurrent[il]:
            shapes.append(RecurrentShape(net.n_channels, net.n_conv, net.n_v, net.state_size, slots))
        elif config.sliding[il]:
            shapes.append(LayerShape(config.n_head_kv, config.d_k, config.d_v, config.window))
        else:
            shapes.append(full)
    return shapes + [full] * config.n_mtp


def hidden_ring(max_rows: int, slots: int) -> Ring:
    """What each of the latest tokens has become, for the layer that drafts: it needs that of one position before."""
    return Ring(1, max(max_rows, slots) + 1)


def slot_bytes(config: ModelConfig) -> int:
    """Memory of the states of all recurrent layers after one token; 0 where there are none."""
    return sum(s.slot_bytes for s in layer_shapes(config, 1) if isinstance(s, RecurrentShape))
