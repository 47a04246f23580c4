"""What all decoder-only transformers share: embedding, layers, output head, cache, and the one entry ``forward``."""

from typing import Any, ClassVar

import numpy as np

from engine.cache.kv import KVCache, LayerShape
from engine.config import ModelConfig, RopeConfig
from engine.errors import ModelError
from engine.gguf import GGUF
from engine.gguf_header import shown
from engine.models.rotary import Rotary
from engine.weights import Weight, load_vector, load_weight


class Model:
    """A model on a backend.  ``ops`` is the backend; nothing here or below knows which one.

    A subclass loads its layers and computes one of them in ``block``.
    """

    operations: ClassVar[tuple[str, ...]] = ()
    """Names of the backend's operations that a forward pass calls: what has to be compiled before it can run."""

    def __init__(self, config: ModelConfig, gguf: GGUF, ops: Any, n_ctx: int, half: bool) -> None:
        self.config = config
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
        self.cache = KVCache(layer_shapes(config), n_ctx, min(ops.max_rows, n_ctx), half, ops.zeros)

    # --- loading -----------------------------------------------------------------------------------------------

    def load_layer(self, il: int) -> Any:
        """The weights of layer ``il``."""
        raise NotImplementedError

    def _matrix(self, name: str, rows: int, columns: int) -> Weight:
        self._taken.add(name)
        weight: Weight = self.ops.weight(load_weight(self.gguf, name, rows, columns))
        return weight

    def _vector(self, name: str, size: int) -> Any:
        self._taken.add(name)
        return self.ops.upload(load_vector(self.gguf, name, size))

    def _optional(self, name: str, size: int) -> Any:
        return self._vector(name, size) if name in self.gguf.tensors else None

    def _rotary(self, rope: RopeConfig) -> Rotary:
        """Angles of one kind of layer; Llama 3 files bring per-frequency factors."""
        factors = None
        if "rope_freqs.weight" in self.gguf.tensors:
            self._taken.add("rope_freqs.weight")
            factors = load_vector(self.gguf, "rope_freqs.weight", rope.n_rot // 2)
            if not np.all(np.isfinite(factors) & (factors > 0)):
                raise ModelError(f"{self.gguf.path}: rope_freqs.weight must be positive numbers; the file is damaged.")
        self._rotaries.append(Rotary(self.ops, rope, factors, self.cache.n_ctx))
        return self._rotaries[-1]

    def check_complete(self) -> None:
        """ModelError for tensors of the file that no layer has asked for: ignoring them would give wrong answers."""
        rest = sorted(set(self.gguf.tensors) - self._taken)
        if rest:
            names = ", ".join(shown(name) for name in rest[:4]) + (
                f" and {len(rest) - 4} more" if len(rest) > 4 else ""
            )
            raise ModelError(
                f"{self.gguf.path}: tensors that a plain {self.config.architecture} model does not have: {names}; "
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

    def compute(self, tokens: Any, positions: Any, n_logits: int) -> Any:
        """The operations of a pass, on the backend's arrays; None where no logits are asked for.  A backend may record them
        once and repeat them, so they depend on the number of rows, never on the values."""
        ops, config = self.ops, self.config
        x = ops.embed(self.token_embd, tokens, config.embedding_scale)
        for il in range(config.n_layer):
            x = self.block(il, x, positions)
        if n_logits == 0:
            return None
        x = ops.rms_norm(x[tokens.size - n_logits :], self.output_norm, config.norm_eps)
        (logits,) = ops.matmul(x, self.output)
        return ops.softcap(logits, config.final_softcap) if config.final_softcap else logits

    def block(self, il: int, x: Any, positions: Any) -> Any:
        """One layer: residual stream in, residual stream out, float32 [rows, n_embd]."""
        raise NotImplementedError


def layer_shapes(config: ModelConfig) -> list[LayerShape]:
    """What each layer stores per position."""
    return [
        LayerShape(config.n_head_kv, config.d_k, config.d_v, config.window if sliding else 0)
        for sliding in config.sliding
    ]
