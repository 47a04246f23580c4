"""The addition of the result of a mixer or of a network to the residual stream."""

from dataclasses import dataclass

from engine.arrays import Array, Value
from engine.models.linear import Linear
from engine.ops.operations import Ops


@dataclass(frozen=True)
class Residual:
    """The addition x + rms_norm(y, norm), or x + scale * y if there is no norm.

    norm: float32 [n_embd], the weights of the norm, or None.
    eps: the epsilon of the norm.
    scale: a factor of the result, which is used only without a norm.
    """

    norm: Array | None
    eps: float
    scale: float

    @property
    def plain(self) -> bool:
        """Whether the result is x + y."""
        return self.norm is None and self.scale == 1.0

    def add(self, ops: Ops, x: Array, y: Array) -> Array:
        """Add the result y to the residual stream x: float32 [rows, n_embd]."""
        if self.norm is None:
            return ops.add(x, y, self.scale)
        return ops.rms_norm_add(x, y, self.norm, self.eps)

    def add_product(self, ops: Ops, x: Array, o: Value, output: Linear) -> Array:
        """Add the result of the layer ``output`` for the rows o to the residual stream x: float32 [rows, n_embd]."""
        if self.plain and output.scale == 1.0:
            return output.add_to(ops, x, o)
        return self.add(ops, x, output.apply(ops, o))
