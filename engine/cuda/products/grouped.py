"""The launches of a product whose matrix consists of groups: each group multiplies its own part of a row.

It is the last product of a mixture in which every row uses every expert, the groups, in order.
"""

import numpy as np

from engine.cuda.products.mixture import MixtureLaunches
from engine.cuda.rows import NARROW_ROWS
from engine.cuda.runtime.recorder import Int8, Recorder
from engine.cuda.runtime.tensor import DeviceWeight, Tensor
from engine.cuda.runtime.values import plain, quantized
from engine.ops.experts import Experts


class Grouped(MixtureLaunches):
    """One call of ``Backend.grouped_matmul``: x [rows, n_group * K] times a matrix [n_group * R, K]."""

    def __init__(self, recorder: Recorder, x: Tensor, weight: DeviceWeight, ids: Tensor) -> None:
        """ids: int32 [rows, n_group], 0 to n_group - 1 in each row."""
        (rows, n_group), self._recorder = ids.shape, recorder
        self._parts = x.reshape(rows * n_group, weight.columns)
        self._experts = Experts(n_group, n_group, weight, weight, weight, weight)
        self._weight, self._rows, self._pairs, self._ids = weight, rows, rows * n_group, ids
        self._wide, self._joins, self._routed, self._sorted = rows > NARROW_ROWS, False, True, {}
        self._streamed, self._choice, self._weights = 0, (0, 0, 0, 0), ids

    def record(self) -> Tensor:
        """Record the launches and return the result, float32 [rows, n_group * R]."""
        parts = self._parts

        def activations(unit: int) -> Int8 | Tensor:
            recorder = self._recorder
            return quantized(recorder, parts, unit, self._rows) if unit else plain(recorder, parts)

        (y,) = self._products([self._weight], [], [(None, None)], activations, True, parts)
        return y.reshape(self._rows, y.size // self._rows)


def group_ids(rows: int, n_group: int) -> np.ndarray:
    """The groups of each row: int32 [rows, n_group]."""
    return np.tile(np.arange(n_group, dtype=np.int32), (rows, 1))
