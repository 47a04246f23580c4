"""The interface of a loaded mixer and of a loaded network."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from engine.arrays import Array, Batch, Value
from engine.models.linear import Linear
from engine.models.residual import Residual
from engine.ops.operations import Ops


class LayerMixer(ABC):
    """The weights of all that mixes tokens in a layer."""

    @abstractmethod
    def add(self, ops: Ops, x: Array, a: Value, memory: Any, batch: Batch[Array], residual: Residual) -> Array:
        """Store the cache entries of the normalized rows a [rows, n_embd] in ``memory``, and add the result for them to the
        residual stream x [rows, n_embd].

        memory: the cache that ``MixerConfig.cache_spec`` specifies.
        residual: the way in which the result is added.

        Returns float32 [rows, n_embd].
        """

    def remember(self, ops: Ops, a: Value, memory: Any, batch: Batch[Array]) -> None:
        """Store the cache entries of the normalized rows a [rows, n_embd] in ``memory``, without computing the mixer.

        Only mixers of layers that draft need this method.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be the mixer of a layer that drafts")


@dataclass
class Mixer(LayerMixer):
    """The weights of a mixer with one output layer.

    output: the linear layer whose result is added to the residual stream.
    """

    output: Linear

    @abstractmethod
    def mix(self, ops: Ops, a: Value, memory: Any, batch: Batch[Array]) -> Value:
        """Store the cache entries of the normalized rows a [rows, n_embd] in ``memory``, and compute the mixer.

        memory: the cache that ``MixerConfig.cache_spec`` specifies.

        Returns the result before the layer ``output``, float32 [rows, columns of output].
        """

    def add(self, ops: Ops, x: Array, a: Value, memory: Any, batch: Batch[Array], residual: Residual) -> Array:
        """Compute the mixer and add the result of the layer ``output`` to x.  See :meth:`LayerMixer.add`."""
        return residual.add_product(ops, x, self.mix(ops, a, memory, batch), self.output)


class Network(ABC):
    """The weights of a network."""

    @abstractmethod
    def add(self, ops: Ops, x: Array, b: Value, batch: Batch[Array], residual: Residual) -> Array:
        """Add the result for the normalized rows b [rows, n_embd] to the residual stream x [rows, n_embd].

        residual: the way in which the result is added.

        Returns float32 [rows, n_embd].
        """
