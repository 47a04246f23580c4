"""A linear layer: a matrix, and what files have beside it.

All products of a forward pass by one matrix are computed here, so this is the place of what is added to every layer, such as
low-rank adapters or parts of a matrix on several devices.  Stacked matrices, those of experts and of heads, are multiplied by
operations of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.arrays import Array, Matrix, Value
from engine.ops.operations import Ops


@dataclass(frozen=True)
class Linear:
    """y = x @ matrix^T * scale + bias: matrix [rows, columns]; bias float32 [rows] or None."""

    matrix: Matrix
    bias: Array | None = None
    scale: float = 1.0

    def apply(self, ops: Ops, x: Value) -> Array:
        """The result for rows x [rows, columns]: float32 [rows, rows of the matrix]."""
        (y,) = products(ops, x, [self])
        return y

    def add_to(self, ops: Ops, x: Array, o: Value) -> Array:
        """x [rows, rows of the matrix] and the result for rows o [rows, columns], in one operation; ``scale`` must be 1."""
        assert self.scale == 1.0
        return ops.matmul_add(x, o, self.matrix, self.bias)

    def finish(self, ops: Ops, y: Array, biased: bool = True) -> Array:
        """y = x @ matrix^T, scaled and, if ``biased``, with the bias: float32 [rows of x, rows]."""
        if self.scale != 1.0:
            y = ops.scale(y, self.scale)
        return ops.add(y, self.bias) if biased and self.bias is not None else y


def products(ops: Ops, x: Value, layers: Sequence[Linear], biased: bool = True) -> list[Array]:
    """The results of several layers of one input x [rows, columns]; without their biases unless ``biased``."""
    outputs = ops.matmul(x, *(layer.matrix for layer in layers))
    return [layer.finish(ops, y, biased) for layer, y in zip(layers, outputs, strict=True)]
