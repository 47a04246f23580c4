"""Pooling: how the outputs of the tokens of a text become one vector, on the host, in float64.

The sums have one order, whatever the device and the number of passes: the outputs are added in the order of their positions,
and the squares of a vector, which float64 holds exactly, are summed exactly and rounded once.
"""

import math

import numpy as np

from engine.numerics import exp

f32 = np.float32


class PooledText:
    """The outputs of the tokens of one text, which arrive in the order of their positions.

    kind: "mean", "cls" or "last".
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._count = 0
        self._value = np.zeros(0)

    def add(self, rows: np.ndarray) -> None:
        """Take the outputs of the next tokens, float32 [n, width], n > 0."""
        if not self._count:
            self._value = np.zeros(rows.shape[1])
        if self._kind == "mean":
            for row in rows:
                self._value += row
        elif self._kind == "last" or not self._count:
            self._value[:] = rows[-1 if self._kind == "last" else 0]
        self._count += len(rows)

    @property
    def vector(self) -> np.ndarray:
        """The vector of the text, float32 [width]."""
        mean = self._kind == "mean"
        return (self._value / self._count if mean else self._value).astype(f32)


def normalized(vector: np.ndarray) -> np.ndarray:
    """``vector`` divided by its length in float64, and rounded to float32; itself if all elements are 0.

    vector: float32 [n].
    """
    wide = vector.astype(np.float64)
    length = math.sqrt(math.fsum((wide * wide).tolist()))
    return (wide / length).astype(f32) if length else vector


def softmax(scores: np.ndarray) -> np.ndarray:
    """The softmax of a few scores, float32 [n]: exp(score - the largest) in float32, divided by their sum in rising order."""
    weights = np.array([exp(score - scores.max()) for score in scores], f32)
    total = f32(0)
    for weight in weights:
        total += weight
    return weights / total
