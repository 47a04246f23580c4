"""Operations on rows: sums, norms, gates, rotation, and rings of rows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from engine.arrays import Batch
from engine.cpu import add, delta_net, glu, layer_norm, mtp, per_layer, rms_norm, rope, softcap, taps
from engine.cpu.operations.shared import SharedOperations
from engine.ops.activation import Activation

f32 = np.float32

_NO_BIAS = np.zeros(0, f32)


class RowOperations(SharedOperations):
    """What is computed row by row, without a matrix."""

    def add(self, x: np.ndarray, y: np.ndarray, scale: float = 1.0) -> np.ndarray:
        if scale == 1.0:
            return self._add(x, y)
        z, n = self.empty(x.shape), x.shape[-1]
        given = x.reshape(-1, n), y.reshape(-1, n), f32(scale), z.reshape(-1, n)
        self.do(add.add_scaled, *given, items=x.size // n, ns=0.1 * n)
        return z

    def add_gated(self, x: np.ndarray, y: np.ndarray, gates: np.ndarray) -> np.ndarray:
        z = self.empty(x.shape)
        self.do(add.add_gated, x, y, gates, z, items=x.shape[0], ns=0.1 * x.shape[1])
        return z

    def _add(self, x: np.ndarray, y: np.ndarray, joined: bool = False) -> np.ndarray:
        z = self.empty(x.shape)
        if y.size == x.size:
            given = x.reshape(-1), y.reshape(-1), z.reshape(-1)
            self.do(add.add, *given, items=x.size, ns=0.1, joined=joined, multiple=64)
        else:
            n = y.size
            self.do(add.add_bias, x.reshape(-1, n), y, z.reshape(-1, n), items=x.size // n, ns=0.1 * n, joined=joined)
        return z

    def scale(self, x: np.ndarray, factor: float) -> np.ndarray:
        z = self.empty(x.shape)
        self.do(add.scale, x.reshape(-1), f32(factor), z.reshape(-1), items=x.size, ns=0.1, multiple=64)
        return z

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis: x [..., n], weight [n] or [0] for ones; float32 [..., n]."""
        return self._norm(x, weight, eps)

    def _norm(self, x: np.ndarray, weight: np.ndarray, eps: float, joined: bool = False) -> np.ndarray:
        y, n = self.empty(x.shape), x.shape[-1]
        given = x.reshape(-1, n), weight, f32(eps), y.reshape(-1, n)
        self.do(rms_norm.rms_norm, *given, items=x.size // n, ns=20 + 0.3 * n, joined=joined)
        return y

    def grouped_norm(self, x: np.ndarray, weight: np.ndarray, n_group: int, eps: float) -> np.ndarray:
        y, n = self.empty(x.shape), x.shape[1] // n_group
        given = x.reshape(-1, n), weight.reshape(n_group, n), f32(eps), y.reshape(-1, n)
        self.do(rms_norm.rms_norm_groups, *given, items=x.size // n, ns=20 + 0.3 * n)
        return y

    def rms_norm_add(
        self, residual: np.ndarray, x: np.ndarray, weight: np.ndarray, eps: float, scale: float = 1.0
    ) -> np.ndarray:
        y, n = self.empty(x.shape), weight.size
        given = residual, x, weight, f32(eps), f32(scale), y
        self.do(rms_norm.rms_norm_add, *given, items=x.shape[0], ns=20 + 0.3 * n)
        return y

    def layer_norm(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> np.ndarray:
        y, n = self.empty(x.shape), x.shape[1]
        given = x, weight, _NO_BIAS if bias is None else bias, f32(eps), y
        self.do(layer_norm.layer_norm, *given, items=x.shape[0], ns=20 + 0.6 * n)
        return y

    def gated_norm(
        self, x: np.ndarray, weight: np.ndarray, gate: np.ndarray, eps: float, swish: bool = True
    ) -> np.ndarray:
        y, n = self.empty(x.shape), weight.size
        given = x.reshape(-1, n), weight, gate.reshape(-1, n), f32(eps), swish, y.reshape(-1, n)
        self.do(delta_net.gated_norm, *given, items=x.size // n, ns=20 + 1.5 * n)
        return y

    def per_layer_inputs(
        self, m: np.ndarray, e: np.ndarray, weight: np.ndarray, scale: float, eps: float
    ) -> np.ndarray:
        rows, n = m.shape[0], weight.size
        out = self.empty((m.shape[1] // n, rows, n))
        given = m, e, weight, f32(scale), f32(eps), out
        self.do(per_layer.per_layer_inputs, *given, items=out.shape[0] * rows, ns=20 + 0.5 * n)
        return out

    def activate(self, activation: Activation, gate: np.ndarray | None, up: np.ndarray) -> np.ndarray:
        y, gate = self.empty(up.shape), up if gate is None else gate
        given = gate.reshape(-1), up.reshape(-1), *map(f32, activation.numbers), y.reshape(-1)
        self.do(glu.activate(activation.kind), *given, items=y.size, ns=0.5, multiple=64)
        return y

    def gate_heads(self, x: np.ndarray, gates: np.ndarray) -> np.ndarray:
        y, heads = self.empty(x.shape), gates.size
        d = x.size // heads
        self.do(glu.gate_heads, x.reshape(heads, d), gates.reshape(-1), y.reshape(heads, d), items=heads, ns=0.1 * d)
        return y

    def softcap(self, x: np.ndarray, cap: float) -> np.ndarray:
        self.do(softcap.softcap, x.reshape(-1), f32(cap), items=x.size, ns=0.5, multiple=64)
        return x

    def rope(self, x: np.ndarray, positions: np.ndarray, table: np.ndarray, neox: bool) -> np.ndarray:
        """Rotate x [rows, heads, head_dim] by its positions, in place; returns x."""
        items, d = x.shape[0] * x.shape[1], x.shape[2]
        self.do(rope.rope, x, positions, table, neox, x, items=items, ns=0.5 * d)
        return x

    def _rotate(self, x: np.ndarray, positions: np.ndarray, table: np.ndarray, neox: bool, joined: bool) -> np.ndarray:
        y = self.empty(x.shape)
        items, d = x.shape[0] * x.shape[1], x.shape[2]
        self.do(rope.rope, x, positions, table, neox, y, items=items, ns=0.5 * d, joined=joined)
        return y

    def plain(self, x: np.ndarray) -> np.ndarray:
        return x

    def keep_rows(self, ring: np.ndarray, x: np.ndarray, batch: Batch[np.ndarray]) -> None:
        given = ring, x, batch.positions, batch.sequences
        self.do(mtp.keep_rows, *given, items=x.shape[0], ns=0.1 * x.shape[1])

    def beside(self, e: np.ndarray, hiddens: np.ndarray, batch: Batch[np.ndarray]) -> np.ndarray:
        rows, n = e.shape[0], e.shape[1] + hiddens.shape[2]
        out = self.empty((rows, n))
        self.do(mtp.beside, e, hiddens, batch.positions, batch.sequences, out, items=rows, ns=0.1 * n)
        return out

    def rows_before(self, hiddens: np.ndarray, batch: Batch[np.ndarray]) -> np.ndarray:
        rows, n = batch.positions.size, hiddens.shape[2]
        out = self.empty((rows, n))
        self.do(taps.rows_before, hiddens, batch.positions, batch.sequences, out, items=rows, ns=0.1 * n)
        return out

    def reinterpret(self, x: np.ndarray, dtype: DTypeLike) -> np.ndarray:
        return x.view(dtype)

    def join_columns(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        (rows, _), widths = parts[0].shape, [part.shape[1] for part in parts]
        out = self.empty((rows, sum(widths)))
        for i, part in enumerate(parts):
            self.do(taps.place_columns, part, sum(widths[:i]), out, items=rows, ns=0.1 * widths[i], joined=i > 0)
        return out

    def spread_logits(self, logits: np.ndarray, index: np.ndarray) -> np.ndarray:
        out = self.empty((logits.shape[0], index.size))
        self.do(taps.spread_logits, logits, index, out, items=out.shape[0], ns=0.5 * index.size)
        return out

    def mtp_input(
        self,
        e: np.ndarray,
        e_norm: np.ndarray,
        hiddens: np.ndarray,
        h_norm: np.ndarray,
        batch: Batch[np.ndarray],
        eps: float,
    ) -> np.ndarray:
        rows, n = e.shape
        out = self.empty((rows * (hiddens.shape[2] // n), 2 * n))
        given = e, e_norm, hiddens, h_norm, batch.positions, batch.sequences, f32(eps), out
        self.do(mtp.mtp_input, *given, items=rows, ns=0.6 * n)
        return out
