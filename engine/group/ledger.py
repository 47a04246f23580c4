"""Owners that count what they would load: a model is built and a pass of it is recorded, but nothing is read or computed.

Arrays have shapes and no meaning.  So the memory that each of several devices needs is known before any of them loads a
matrix: its rows of the matrices, whole vectors, and the parts of vectors that a group uploads when a pass is recorded.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from engine.ops.experts import ChosenExperts
from engine.ops.operations import Ops
from engine.ops.weight import Weight

Shape = tuple[int, ...]


class CountedMatrix(NamedTuple):
    """A matrix, or each of stacked ones, that has not been loaded."""

    name: str
    rows: int
    columns: int


def _like(x: Any, *rest: Any) -> Shape:
    """The shape of the first argument."""
    shape: Shape = x.shape
    return shape


def _attended(heads: Any, q: Any, *rest: Any) -> Shape:
    return q.shape[0], heads.n_head * heads.d_v


SHAPES: Mapping[str, Callable[..., Shape]] = {
    **dict.fromkeys(("plain", "scale", "softcap", "sparsify", "add", "add_gated"), _like),
    **dict.fromkeys(("rms_norm", "layer_norm", "grouped_norm", "rms_norm_add", "gated_norm"), _like),
    **dict.fromkeys(("matmul_add", "gate_heads"), _like),
    **dict.fromkeys(("attention", "attend_past"), _attended),
    "embed": lambda table, tokens, *rest: (tokens.size, table.columns),
    "activate": lambda activation, gate, up: up.shape,
    "columns": lambda x, begin, n: (x.shape[0], n),
    "join_columns": lambda parts: (parts[0].shape[0], sum(part.shape[1] for part in parts)),
    "spread_logits": lambda logits, index: (logits.shape[0], index.size),
    "activate_experts": lambda experts, x, ids: (ids.size, experts.up.rows),
    "join_experts": lambda experts, activations, ids, weights: (ids.shape[0], experts.down.rows),
    "delta_net": lambda net, x, *rest: (x.shape[0], net.n_v * net.state_size),
    "per_layer_inputs": lambda m, e, weight, *rest: (m.shape[1] // weight.size, m.shape[0], weight.size),
    "beside": lambda e, hiddens, batch: (e.shape[0], e.shape[1] + hiddens.shape[2]),
    "rows_before": lambda hiddens, batch: (batch.rows, hiddens.shape[2]),
    "mtp_input": lambda e, e_norm, hiddens, *rest: (e.shape[0] * hiddens.shape[2] // e.shape[1], 2 * e.shape[1]),
}
"""The shapes of the results of operations."""


class Ledger:
    """An owner in the place of a backend, which counts the bytes of what it loads, ``n_bytes``.  What it does not do itself,
    it asks the backend."""

    def __init__(self, ops: Ops) -> None:
        self.n_bytes = 0
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        if name not in SHAPES:
            return getattr(self._ops, name)
        shape = SHAPES[name]
        return lambda *given: np.zeros(shape(*given), np.float32)

    @property
    def owners(self) -> "tuple[Ledger, ...]":
        """Itself."""
        return (self,)

    # --- memory ----------------------------------------------------------------------------------------------------

    def weight(self, weight: Weight, host: bool = False) -> CountedMatrix:
        """Count a matrix, unless it is in host memory."""
        self.n_bytes += 0 if host else self._ops.weight_bytes(weight)
        return CountedMatrix(weight.name, weight.rows // weight.stack, weight.columns)

    def upload(self, array: np.ndarray) -> np.ndarray:
        """Count an array."""
        self.n_bytes += self._ops.array_bytes(array.nbytes)
        return array

    def zeros(self, shape: Shape, dtype: DTypeLike) -> np.ndarray:
        """An array that is not counted, as it depends on the context."""
        return np.zeros(shape, dtype)

    def store(self, target: np.ndarray, first: int, rows: np.ndarray) -> None:
        """Nothing."""

    def download(self, array: np.ndarray) -> np.ndarray:
        """The array."""
        return array

    def inputs(self) -> None:
        """None: passes are given their rows."""

    # --- passes ----------------------------------------------------------------------------------------------------

    def together(self, others: Any) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def meet(self) -> None:
        """Nothing."""

    def gathering(self, owners: Any) -> None:
        """None: nothing is exchanged."""

    def own_rows(self, batch: Any) -> Any:
        """The same ones."""
        return batch

    def matmul(self, x: Any, *weights: CountedMatrix) -> list[np.ndarray]:
        """Arrays with a column for each row of a matrix."""
        return [np.zeros((x.shape[0], weight.rows), np.float32) for weight in weights]

    def choose_experts(self, experts: Any, x: Any, tokens: Any = None) -> ChosenExperts[np.ndarray]:
        """The first experts."""
        chosen = np.zeros((x.shape[0], experts.n_used), np.int32)
        return ChosenExperts(chosen, chosen, chosen)

    def keep_rows(self, ring: Any, x: Any, batch: Any) -> None:
        """Nothing."""

    def remember(self, *given: Any) -> None:
        """Nothing."""
