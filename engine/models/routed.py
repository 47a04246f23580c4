"""A cut inside a mixture of experts: its experts are on the CPU, and the rest of it is on the GPU.

The rest is the norm, the router, the shared network and the addition to the residual stream.  For a pass of few rows, the GPU
chooses the experts of each row and sends the normalized row with them, their weights included.  The CPU returns the weighted
sum of the experts' outputs, float32 [rows, n_embd], which is added in the order of the row's own choice::

    GPU:  norm, router, choice, send ....... shared network, receive, add
    CPU:  ......................... take, experts, sum, give

Other passes compute the mixture on one device, so the CPU has all of its weights, too.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from engine.arrays import Array, Batch, Matrix
from engine.models.feed_forward import FeedForward, Mixture, choice_of
from engine.models.layer import Layer, load_norms
from engine.models.linear import Linear
from engine.models.loader import Loader
from engine.models.network_config import ExpertsConfig
from engine.models.stage import DivisibleModel, RowSlice, Stage, StageInputs
from engine.ops.exchange import Exchange
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
            self._shared = FeedForward(gate, up, down, experts.activation)
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


class ExpertsStage(Stage):
    """The experts of one mixture on the CPU, for rows whose experts the GPU has chosen."""

    def __init__(
        self, model: DivisibleModel, inputs: StageInputs, plain: Stage, layer: Layer, exchange: Exchange[Array]
    ) -> None:
        """plain: the stage of the whole network, whose ``seconds`` include those of this one; layer: its layer; exchange:
        where the experts of the rows are."""
        super().__init__(model, inputs, plain.parts, False, False)
        assert isinstance(layer.network, Mixture)
        self._plain = plain
        self._experts = layer.network.experts
        self._exchange = exchange
        shape = inputs.rows, self._experts.n_used
        self._ids, self._weights = self.ops.zeros(shape, np.int32), self.ops.zeros(shape, np.float32)

    def compute(self, batch: Batch[Array], n_logits: int) -> Array:
        """The weighted sum of the experts' outputs for all rows, float32 [rows, n_embd].  n_logits: not used."""
        rows = slice(batch.rows)
        return self.ops.sum_experts(self._experts, self._inputs.x[rows], self._ids[rows], self._weights[rows])

    def answer(self, slices: Sequence[RowSlice], rows: np.ndarray, padded: int) -> None:
        """Replace normalized rows by the weighted sums of their experts' outputs, float32 [rows, n_embd].

        slices: the pass, from :meth:`slices`; padded: the number of rows of the device's pass.
        """
        begun = time.perf_counter()
        chosen = self._exchange.chosen(padded, self._experts.n_used)
        for part, batch in slices:
            for target, source in zip((self._inputs.x, self._ids, self._weights), (rows, *chosen), strict=True):
                self.ops.store(cast(Array, target), 0, source[part])
            self.ops.run(self.compute, batch, batch.rows, None, self.prompt_rows, rows[part])
        self._plain.seconds += time.perf_counter() - begun
