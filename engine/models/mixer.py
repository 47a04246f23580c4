"""What a layer uses of a mixer and of a network that are loaded."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from engine.arrays import Array, Batch, Value
from engine.models.linear import Linear
from engine.models.residual import Residual
from engine.ops.operations import Ops


@dataclass
class Mixer(ABC):
    """The weights of a mixer.  output: the layer whose result is added to the residual stream."""

    output: Linear

    @abstractmethod
    def mix(self, ops: Ops, a: Value, memory: Any, batch: Batch[Array]) -> Value:
        """The result for the normalized rows a [rows, n_embd], before the layer ``output``: float32 [rows, columns of
        output].  What later rows need of them is stored in ``memory``, which ``MixerConfig.cache_spec`` describes."""

    def remember(self, ops: Ops, a: Value, memory: Any, batch: Batch[Array]) -> None:
        """Store what later rows need of the normalized rows a [rows, n_embd] in ``memory``, without a result.  Only mixers of
        layers that draft have this."""
        raise NotImplementedError(f"{type(self).__name__} cannot be the mixer of a layer that drafts")


class Network(ABC):
    """The weights of a network."""

    @abstractmethod
    def add(self, ops: Ops, x: Array, b: Value, batch: Batch[Array], residual: Residual) -> Array:
        """The residual stream x [rows, n_embd], and the result for the normalized rows b [rows, n_embd] added to it as
        ``residual`` says: float32 [rows, n_embd]."""
