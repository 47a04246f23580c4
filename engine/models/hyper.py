"""Hyper-connections: the weights that mix the streams around a sub-layer, or before the output."""

from dataclasses import dataclass

import numpy as np

from engine.arrays import Array
from engine.models.config import StreamsConfig
from engine.models.linear import Linear
from engine.models.loader import Loader
from engine.ops.operations import Ops


@dataclass
class HyperConnection:
    """fn: the layer of 24 products, or 4 before the output, [24, 4 n_embd]; scale, base: float32 [3], [24], or [1], [4];
    ones: float32 [4 n_embd]."""

    fn: Linear
    scale: Array
    base: Array
    ones: Array
    config: StreamsConfig
    norm_eps: float

    def weights(self, ops: Ops, x: Array) -> Array:
        """The weights for the streams x [rows, 4 n_embd]: float32 [rows, 24], or [rows, 4] before the output."""
        m = self.fn.apply(ops, ops.rms_norm(x, self.ones, self.norm_eps))
        return ops.stream_weights(m, self.scale, self.base, self.config.epsilon, self.config.rounds)


def load_hyper_connection(loader: Loader, name: str, last: bool = False) -> HyperConnection:
    """Load the tensors ``name_fn``, ``name_scale`` and ``name_base``; ``last``: of the streams before the output."""
    c = loader.config
    assert c.streams is not None
    n = c.streams.count
    rows = n if last else n * (n + 2)
    return HyperConnection(
        loader.product(f"{name}_fn.weight", rows, n * c.n_embd),
        loader.vector(f"{name}_scale.weight", 1 if last else 3),
        loader.vector(f"{name}_base.weight", rows),
        loader.ops.upload(np.ones(n * c.n_embd, np.float32)),
        c.streams,
        c.norm_eps,
    )
