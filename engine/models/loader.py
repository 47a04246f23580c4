"""Loading tensors of a file as the parts of a forward pass: matrices, vectors, heads, feed-forward networks, angles."""

from typing import Any

import numpy as np

from engine.arrays import Array, Matrix
from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.gguf.header import shown
from engine.models.config import ModelConfig, RopeConfig
from engine.models.experts import Experts
from engine.models.feed_forward import FeedForward
from engine.models.heads import Heads
from engine.models.rotary import Rotary
from engine.models.weights import Weight, join_rows, load_vector, load_weight
from engine.ops import Ops


class Loader:
    """Loads tensors of ``gguf`` into memory that the operations of ``ops`` can read, and records which it has loaded."""

    def __init__(self, config: ModelConfig, gguf: GGUF, ops: Ops) -> None:
        self.config = config
        self.gguf = gguf
        self.ops = ops
        self._taken: set[str] = set()
        self._rotaries: list[Rotary] = []

    def _weight(self, name: str, rows: int, columns: int, count: int = 0) -> Weight:
        """A matrix of the file, or ``count`` stacked matrices of one tensor."""
        self._taken.add(name)
        return load_weight(self.gguf, name, rows, columns, count)

    def _matrix(self, name: str, rows: int, columns: int, count: int = 0) -> Matrix:
        """A matrix of the file, or ``count`` stacked matrices of one tensor, in memory that the operations can read."""
        return self.ops.weight(self._weight(name, rows, columns, count))

    def _array(self, name: str, *shape: int) -> np.ndarray:
        """A small float32 tensor of the file."""
        self._taken.add(name)
        return load_vector(self.gguf, name, *shape)

    def _vector(self, name: str, *shape: int) -> Array:
        """A small float32 tensor of the file, in memory that the operations can read."""
        return self.ops.upload(self._array(name, *shape))

    def _heads(self, blk: str, il: int, *, normed: str, neox: bool = True, **others: Any) -> Heads[Array]:
        """The heads of an attention layer.  normed: "qk" if queries and keys are normalized, "q" for queries only, or "";
        others: further fields of ``Heads``."""
        c, (n_head_kv, d_k, d_v) = self.config, self.config.heads(il)
        norms = {f"{name}_norm": self._vector(f"{blk}attn_{name}_norm.weight", d_k) for name in normed}
        given: dict[str, Any] = {"neox": neox, "scale": c.attention_scale, "eps": c.norm_eps} | norms | others
        return Heads(c.n_head, n_head_kv, d_k, d_v, **given)

    def _dense(self, blk: str, n_ff: int) -> FeedForward:
        """A feed-forward network for every row."""
        n_embd = self.config.n_embd
        return FeedForward(
            self._matrix(blk + "ffn_gate.weight", n_ff, n_embd),
            self._matrix(blk + "ffn_up.weight", n_ff, n_embd),
            self._matrix(blk + "ffn_down.weight", n_embd, n_ff),
        )

    def _feed_forward(self, blk: str) -> FeedForward | Experts[Array, Matrix]:
        """The feed-forward network of a layer."""
        c, e = self.config, self.config.experts
        if e is None:
            return self._dense(blk, c.n_ff)
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

    def _optional(self, name: str, size: int) -> Array | None:
        return self._vector(name, size) if name in self.gguf.tensors else None

    def _rotary(self, rope: RopeConfig, n_ctx: int, factored: bool = True, like: Rotary | None = None) -> Rotary:
        """Rotation angles of one kind of layer.  factored: apply the factor per frequency that files of Llama 3 and Gemma 4
        contain; like: angles to share if they are equal."""
        factors = None
        if factored and "rope_freqs.weight" in self.gguf.tensors:
            factors = self._array("rope_freqs.weight", rope.n_rot // 2)
            if not np.all(np.isfinite(factors) & (factors > 0)):
                raise ModelError(f"{self.gguf.path}: rope_freqs.weight must be positive numbers; the file is damaged.")
        if like is not None and like.turns_as(rope, factors):
            return like
        self._rotaries.append(Rotary(self.ops, rope, factors, n_ctx))
        return self._rotaries[-1]

    def reserve(self, length: int) -> None:
        """Compute the rotation angles of positions [0, length)."""
        for rotary in self._rotaries:
            rotary.reserve(length)

    def check_complete(self) -> None:
        """Raise ModelError if the file has tensors that no layer has loaded: ignoring them would give wrong answers."""
        c = self.config
        rest = sorted(set(self.gguf.tensors) - self._taken)
        if c.n_mtp_in_file > c.n_mtp:
            # The layer that drafts may be skipped.
            rest = [name for name in rest if not name.startswith(f"blk.{c.n_layer}.")]
        if rest:
            names = ", ".join(shown(name) for name in rest[:4]) + (
                f" and {len(rest) - 4} more" if len(rest) > 4 else ""
            )
            raise ModelError(
                f"{self.gguf.path}: tensors that a plain {c.architecture} model does not have: {names}; "
                "this variant is not supported."
            )
