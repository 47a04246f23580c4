"""A cut inside a mixture of experts: its experts are on the CPU, and the rest of it is on the GPU.

The rest is the norm, the router, the shared network and the addition to the residual stream.  For a pass of few rows, the GPU
chooses the experts of each row and sends the normalized row with them, their weights included.  The CPU returns the weighted
sum of the experts' outputs, float32 [rows, n_embd], which is added in the order of the row's own choice::

    GPU:  norm, router, choice, send, shared network ... receive, add
    CPU:  ........................... take, experts, sum, give

Other passes compute the mixture on one device, so the CPU has all of its weights, too.
"""

from dataclasses import replace

from engine.arrays import Array, Batch, Matrix
from engine.models.feed_forward import FeedForward, Mixture, choice_of
from engine.models.layer import Layer, load_norms
from engine.models.linear import Linear
from engine.models.loader import Loader
from engine.models.network_config import ExpertsConfig
from engine.ops.experts import ChosenExperts, Experts
from engine.ops.operations import Ops


class MixtureHead:
    """What the GPU computes of the network of a layer whose experts are on the CPU."""

    def __init__(self, layer: Layer, loader: Loader, il: int) -> None:
        """layer: the layer with all weights of its mixture on the CPU; loader: the GPU's; il: the index of the layer."""
        assert isinstance(layer.network, Mixture)
        config, blk = loader.config.layers[il], f"blk.{il}."
        assert isinstance(config.network, ExpertsConfig)
        experts = replace(layer.network.experts, **choice_of(loader, blk, config.network))
        self._layer = load_norms(layer, loader, il)
        self._shared = None
        if experts.shared is not None:
            gate, up, down = (None if matrix is None else Linear(matrix) for matrix in experts.shared)
            assert up is not None and down is not None
            self._shared = FeedForward(gate, up, down, experts.common)
        # The choice reads no matrix of an expert.
        self._experts: Experts[Array, Matrix] = replace(experts, shared=None)

    def begin(self, ops: Ops, x: Array, batch: Batch[Array]) -> tuple[Array, ChosenExperts[Array]]:
        """The normalized rows of the residual stream x, float32 [rows, n_embd], and their experts."""
        b = ops.plain(self._layer.normalized(ops, x, self._layer.before_network))
        return b, ops.choose_experts(self._experts, b, batch.tokens)

    def shared(self, ops: Ops, b: Array) -> Array | None:
        """The output of the shared network for the normalized rows b, float32 [rows, n_embd]; None if there is none."""
        if self._shared is None:
            return None
        return self._shared.down.apply(ops, self._shared.hidden(ops, b))

    def end(self, ops: Ops, x: Array, total: Array, shared: Array | None, logits: Array) -> Array:
        """The residual stream after the network, float32 [rows, n_embd].

        x: the residual stream before it; total: the weighted sum of the experts' outputs; shared: the output of the shared
        network; logits: those of the router.
        """
        if shared is not None:
            total = ops.add_gated(total, shared, logits) if self._experts.shared_gated else ops.add(total, shared)
        return self._layer.after_network.add(ops, x, total)
