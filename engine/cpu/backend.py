"""The operations a forward pass is written against, on the CPU.

Arrays are NumPy arrays.  Every method returns a new array unless it says "in place"; shapes are [rows, ...].
"""

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np

from engine.cache.kv import LayerCache
from engine.cpu import attention, embed, glu, matmul, rms_norm, rope, softcap
from engine.errors import UsageError
from engine.memory import available_memory
from engine.models.heads import Heads
from engine.sampler import SamplingParams
from engine.weights import Weight

f32 = np.float32

Forward = Callable[[np.ndarray, np.ndarray, int], np.ndarray | None]
"""The operations of a pass: tokens, positions, number of logits rows to logits."""


Progress = Callable[[str, int, int], None]


class Backend:
    """Operations on ``n_threads`` threads (0: as many as the machine offers).  The thread count never shows in a bit."""

    name = "cpu"
    max_rows = 128
    """Rows of one pass; longer prompts go in batches of this size.  No bit depends on it."""

    def __init__(self, n_threads: int = 0) -> None:
        available = numba.config.NUMBA_NUM_THREADS
        if not 0 <= n_threads <= available:
            raise UsageError(f"threads must be between 1 and {available}, not {n_threads}.")
        self.n_threads = n_threads or available
        numba.set_num_threads(self.n_threads)

    # --- memory ------------------------------------------------------------------------------------------------

    def free_memory(self, weights: int) -> int:
        """Bytes free for a cache; 0 where the system does not say.  Weights are mapped, so they take none of it for good."""
        return available_memory()

    def scratch_bytes(self, n_head: int, d_v: int, n_ctx: int) -> int:
        """Bytes that attention over ``n_ctx`` positions needs beside the cache: next to nothing."""
        return 0

    def loaded(self) -> None:
        """All weights are there."""

    def upload(self, array: np.ndarray) -> np.ndarray:
        """An array the operations can read."""
        return array

    def weight(self, weight: Weight) -> Weight:
        """A weight matrix the operations can read: here the mapped rows themselves."""
        return weight

    def zeros(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """Zeroed memory; pages are taken from the system when they are first written."""
        return np.zeros(shape, dtype)

    def store(self, target: np.ndarray, first: int, rows: np.ndarray) -> None:
        """target[first : first + len(rows)] = rows."""
        target[first : first + rows.shape[0]] = rows

    def run(self, forward: Forward, tokens: np.ndarray, positions: np.ndarray, n_logits: int) -> np.ndarray | None:
        """``forward(tokens, positions, n_logits)``: here every operation computes when it is called."""
        return forward(tokens, positions, n_logits)

    def warm_up(self, model: Any, progress: Progress | None) -> None:
        """Compile every kernel of a model by running one token, each operation announced before its first call."""
        if progress:
            progress("compile", 0, len(model.operations))
        model.ops = _Announcer(self, model.operations, progress)
        try:
            model.forward(np.zeros(1, np.int32), np.zeros(1, np.int32), 1)
        finally:
            model.ops = self
        if progress:
            progress("compile", len(model.operations), len(model.operations))

    def can_sample(self, params: SamplingParams) -> bool:
        """Whether ``decode`` can choose tokens in this way: here logits are where the sampler is, so there is none."""
        return False

    # --- operations --------------------------------------------------------------------------------------------

    def embed(self, table: Weight, tokens: np.ndarray, scale: float = 1.0) -> np.ndarray:
        """Rows ``tokens`` int32 [rows] of the embedding, times scale: float32 [rows, n_embd]."""
        out = np.empty((tokens.size, table.columns), f32)
        entry = table.format
        embed.embed_rows(int(entry.type), entry.block, entry.block_bytes, table.data, tokens, f32(scale), out)
        return out

    def matmul(self, x: np.ndarray, *weights: Weight) -> list[np.ndarray]:
        """x float32 [rows, K] times each weight [R, K]: a float32 [rows, R] for each; x is quantized once per unit."""
        quantized: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        outputs = []
        numba.set_num_threads(self.n_threads)
        for weight in weights:
            entry = weight.format
            out = np.empty((x.shape[0], weight.rows), f32)
            if entry.quantized:
                if entry.unit not in quantized:
                    quantized[entry.unit] = self._quantize(x, entry.unit)
                q, d, s = quantized[entry.unit]
                has_min = entry.min_max > 0
                matmul.matmul_quantized(int(entry.type), entry.unit, has_min, weight.data, q, d, s, self.n_threads, out)
            else:
                matmul.matmul_float(int(entry.type), entry.block_bytes, weight.data, x, self.n_threads, out)
            outputs.append(out)
        return outputs

    def matmul_add(self, residual: np.ndarray, x: np.ndarray, weight: Weight) -> np.ndarray:
        """residual + x times the weight."""
        return self.add(residual, self.matmul(x, weight)[0])

    def _quantize(self, x: np.ndarray, unit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, columns = x.shape
        q = np.empty((rows, columns), np.int8)
        d = np.empty((rows, columns // unit), f32)
        s = np.empty((rows, columns // 16), np.int16)
        matmul.quantize_rows(x, unit, q, d, s)
        return q, d, s

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """x + y; y may be a bias [n] for every row."""
        return x + y

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        """Normalize the last axis of x [..., n]; weight [n]."""
        y = np.empty_like(x)
        n = weight.size
        rms_norm.rms_norm(x.reshape(-1, n), weight, f32(eps), y.reshape(-1, n))
        return y

    def rms_norm_add(self, residual: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        """residual + normalized x."""
        y = np.empty_like(x)
        rms_norm.rms_norm_add(residual, x, weight, f32(eps), y)
        return y

    def attention(
        self,
        heads: Heads,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        cache: LayerCache,
        positions: np.ndarray,
        table: np.ndarray,
    ) -> np.ndarray:
        """Store k and v [rows, heads * width] at their positions and attend q over the cache: float32 [rows, n_head * d_v].

        Before that: biases, normalization of each head of q and k where the layer has them, and rotation by ``table``.
        """
        if heads.biases:
            q, k, v = (self.add(x, bias) for x, bias in zip((q, k, v), heads.biases, strict=True))
        rows = positions.size
        q = q.reshape(rows, heads.n_head, heads.d_k)
        k = k.reshape(rows, heads.n_head_kv, heads.d_k)
        if heads.q_norm is not None:
            q = self.rms_norm(q, heads.q_norm, heads.eps)
            k = self.rms_norm(k, heads.k_norm, heads.eps)
        self.rope(q, positions, table, heads.neox)
        self.rope(k, positions, table, heads.neox)
        self.append(cache, k, v.reshape(rows, heads.n_head_kv, heads.d_v), positions)
        return self.attend(q, cache, positions, heads.scale)

    def rope(self, x: np.ndarray, positions: np.ndarray, table: np.ndarray, neox: bool) -> np.ndarray:
        """Rotate x [rows, heads, head_dim] in place by its positions; returns it."""
        rope.rope(x, positions, table, neox)
        return x

    def append(self, cache: LayerCache, k: np.ndarray, v: np.ndarray, positions: np.ndarray) -> None:
        """Store k, v [rows, n_head_kv, head_dim] at their positions."""
        attention.append(k, v, positions, cache.half, cache.keys, cache.values)

    def attend(self, q: np.ndarray, cache: LayerCache, positions: np.ndarray, scale: float) -> np.ndarray:
        """Attention of q [rows, n_head, d_k] over the cache; float32 [rows, n_head * d_v]."""
        rows, n_head, _ = q.shape
        out = np.empty((rows, n_head, cache.values.shape[3]), f32)
        numba.set_num_threads(self.n_threads)
        window = cache.window
        attention.attend(q, cache.keys, cache.values, positions, f32(scale), window, cache.half, self.n_threads, out)
        return out.reshape(rows, -1)

    def swiglu(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """silu(gate) * up."""
        y = np.empty_like(up)
        glu.swiglu(gate.reshape(-1), up.reshape(-1), y.reshape(-1))
        return y

    def geglu(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        """gelu(gate) * up."""
        y = np.empty_like(up)
        glu.geglu(gate.reshape(-1), up.reshape(-1), y.reshape(-1))
        return y

    def softcap(self, x: np.ndarray, cap: float) -> np.ndarray:
        """cap * tanh(x / cap), in place; returns x."""
        softcap.softcap(x.reshape(-1), f32(cap))
        return x


class _Announcer:
    """A backend that reports each operation before its first call."""

    def __init__(self, ops: Backend, names: Sequence[str], progress: Progress | None) -> None:
        self._ops = ops
        self._names = names
        self._progress = progress
        self._seen: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name in self._names and name not in self._seen:
            self._seen.add(name)
            if self._progress:
                self._progress("compile", len(self._seen) - 1, len(self._names))
        return getattr(self._ops, name)
