"""A linear layer: a matrix with an optional bias and scale.

All products with a single matrix in a forward pass are computed here.  This is therefore the place for extensions of all
linear layers, such as low-rank adapters or matrices that are divided among devices.  Separate operations multiply stacked
matrices, such as those of experts and of heads.
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
        """The result for x [n, columns]: float32 [n, rows]."""
        (y,) = products(ops, x, [self])
        return y

    def add_to(self, ops: Ops, x: Array, o: Value) -> Array:
        """The sum of x [n, rows] and the result for o [n, columns], in one operation: float32 [n, rows].  ``scale`` must be
        1."""
        assert self.scale == 1.0
        return ops.matmul_add(x, o, self.matrix, self.bias)

    def finish(self, ops: Ops, y: Array, biased: bool = True) -> Array:
        """Apply the scale and, if ``biased``, the bias to y = x @ matrix^T: float32 [n, rows]."""
        if self.scale != 1.0:
            y = ops.scale(y, self.scale)
        return ops.add(y, self.bias) if biased and self.bias is not None else y


def products(ops: Ops, x: Value, layers: Sequence[Linear], biased: bool = True) -> list[Array]:
    """The results of several layers for the same input x [n, columns], each float32 [n, rows of the layer].

    biased: whether biases are added.
    """
    outputs = ops.matmul(x, *(layer.matrix for layer in layers))
    return [layer.finish(ops, y, biased) for layer, y in zip(layers, outputs, strict=True)]
