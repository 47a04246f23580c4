"""Two mixers in one layer: weights and operations.

x = x + first(a) Wo_first + second(a) Wo_second, added from left to right; both read the normalized rows a.
"""

from dataclasses import dataclass

from engine.arrays import Array, Batch, Value
from engine.cache.pair import PairCache
from engine.models.mixer import LayerMixer
from engine.models.residual import Residual
from engine.ops.operations import Ops


@dataclass
class MixerPair(LayerMixer):
    """The weights of two mixers that read the same input."""

    first: LayerMixer
    second: LayerMixer

    def add(
        self, ops: Ops, x: Array, a: Value, memory: PairCache[Array], batch: Batch[Array], residual: Residual
    ) -> Array:
        """Store the cache entries of the normalized rows a [rows, n_embd] in ``memory``, and add the results of both mixers
        to the residual stream x [rows, n_embd]: float32 [rows, n_embd]."""
        rows = ops.plain(a)  # it is used twice
        x = self.first.add(ops, x, rows, memory.first, batch, residual)
        return self.second.add(ops, x, rows, memory.second, batch, residual)
