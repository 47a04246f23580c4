"""A norm of the residual stream: its weights, and the operation that they are for."""

from dataclasses import dataclass

from engine.arrays import Array, Value
from engine.models.loader import Loader
from engine.ops.operations import Ops


@dataclass(frozen=True)
class Norm:
    """rms_norm(x), or layer_norm(x) if ``centered``.

    weight: float32 [n].
    bias: float32 [n], or None; only a layer norm may have one.
    eps: the epsilon of the norm.
    centered: whether the mean of a row is subtracted.
    """

    weight: Array
    bias: Array | None
    eps: float
    centered: bool

    def apply(self, ops: Ops, x: Array) -> Value:
        """The normalized rows x: float32 [rows, n]."""
        if self.centered:
            return ops.layer_norm(x, self.weight, self.bias, self.eps)
        return ops.rms_norm(x, self.weight, self.eps)


def load_norm(loader: Loader, name: str) -> Norm:
    """Load the tensor ``name.weight``, or ``name`` if the file has that, and, of a layer norm, ``name.bias`` if the file has
    it."""
    c = loader.config
    centered = c.norm == "layer"
    bias = loader.optional(name + ".bias", c.n_embd) if centered else None
    # Files of Falcon-H1 have a norm without the usual end.
    weight = loader.vector(name if loader.has(name) else name + ".weight", c.n_embd)
    return Norm(weight, bias, c.norm_eps, centered)
