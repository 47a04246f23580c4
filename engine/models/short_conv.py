"""The gated short convolution of one layer: weights and operations.

b, c, x = a Win;  y = c * conv(b * x), a causal convolution of each channel over the latest ``taps`` tokens
(``engine/cpu/short_conv.py``);  the layer adds y Wout to the residual stream.
"""

from dataclasses import dataclass

from engine.arrays import Array, Batch, Value
from engine.cache.short_conv import ShortConvCache
from engine.models.linear import Linear
from engine.models.loader import Loader
from engine.models.mixer import Mixer
from engine.models.short_conv_config import ShortConvConfig
from engine.ops.operations import Ops


@dataclass
class ShortConv(Mixer):
    """The weights of a short convolution.

    inputs: the linear layer that computes b, c and x, one after the other.
    weight: float32 [n, taps], the weights of the convolution, the oldest tap first.
    """

    inputs: Linear
    weight: Array

    def mix(self, ops: Ops, a: Value, memory: ShortConvCache[Array], batch: Batch[Array]) -> Value:
        """Store the inputs of the convolution in ``memory``, and compute it for the normalized rows a [rows, n].

        Returns the result before the output layer, float32 [rows, n].
        """
        return ops.short_conv(self.weight, self.inputs.apply(ops, a), memory, batch)


def load_short_conv(loader: Loader, blk: str, config: ShortConvConfig) -> ShortConv:
    """Load the tensors ``shortconv.in_proj``, ``shortconv.conv`` and ``shortconv.out_proj``."""
    n = config.n
    return ShortConv(
        loader.linear(blk + "shortconv.out_proj", n, n),
        loader.linear(blk + "shortconv.in_proj", 3 * n, n),
        loader.vector(blk + "shortconv.conv.weight", n, config.taps),
    )
