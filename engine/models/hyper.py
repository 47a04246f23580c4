"""Hyper-connections: the weights that mix streams around a sub-layer, or before the output."""

from dataclasses import dataclass

import numpy as np

from engine.arrays import Array
from engine.models.config import HyperConfig
from engine.models.linear import Linear
from engine.models.loader import Loader
from engine.ops.operations import Ops


@dataclass
class HyperConnection:
    """The weights of a hyper-connection, around a sub-layer or before the output.

    fn: the linear layer of the mixing weights, [24, 4 n_embd], or [4, 4 n_embd] before the output.
    scale: float32 [3], or [1] before the output.
    base: float32 [24], or [4] before the output.
    ones: float32 [4 n_embd], ones, which stand for the weights of the norm of streams.
    """

    fn: Linear
    scale: Array
    base: Array
    ones: Array
    config: HyperConfig
    norm_eps: float

    def weights(self, ops: Ops, x: Array) -> Array:
        """The mixing weights for the streams x [rows, 4 n_embd]: float32 [rows, 24], or [rows, 4] before the output."""
        m = self.fn.apply(ops, ops.rms_norm(x, self.ones, self.norm_eps))
        return ops.stream_weights(m, self.scale, self.base, self.config.epsilon, self.config.rounds)


def load_hyper_connection(loader: Loader, name: str, last: bool = False) -> HyperConnection:
    """Load the tensors ``name_fn``, ``name_scale`` and ``name_base``.

    last: whether the hyper-connection is the one before the output.
    """
    c = loader.config
    assert isinstance(c.streams, HyperConfig)
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
