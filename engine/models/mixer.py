"""The interface of a loaded mixer and of a loaded network."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from engine.arrays import Array, Batch, Value
from engine.models.linear import Linear
from engine.models.residual import Residual
from engine.ops.operations import Ops


@dataclass
class Mixer(ABC):
    """The weights of a mixer.

    output: the linear layer whose result is added to the residual stream.
    """

    output: Linear

    @abstractmethod
    def mix(self, ops: Ops, a: Value, memory: Any, batch: Batch[Array]) -> Value:
        """Store the cache entries of the normalized rows a [rows, n_embd] in ``memory``, and compute the mixer.

        memory: the cache that ``MixerConfig.cache_spec`` specifies.

        Returns the result before the layer ``output``, float32 [rows, columns of output].
        """

    def remember(self, ops: Ops, a: Value, memory: Any, batch: Batch[Array]) -> None:
        """Store the cache entries of the normalized rows a [rows, n_embd] in ``memory``, without computing the mixer.

        Only mixers of layers that draft need this method.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be the mixer of a layer that drafts")


class Network(ABC):
    """The weights of a network."""

    @abstractmethod
    def add(self, ops: Ops, x: Array, b: Value, batch: Batch[Array], residual: Residual) -> Array:
        """Add the result for the normalized rows b [rows, n_embd] to the residual stream x [rows, n_embd].

        residual: the way in which the result is added.

        Returns float32 [rows, n_embd].
        """
