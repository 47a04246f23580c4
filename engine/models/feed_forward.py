"""The network of one layer: a dense network, or a mixture of experts."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.arrays import Array, Batch, Matrix, Value
from engine.models.linear import Linear, products
from engine.models.loader import Loader
from engine.models.mixer import Network
from engine.models.network_config import DenseConfig, ExpertsConfig
from engine.models.residual import Residual
from engine.models.weights import join_rows
from engine.ops.activation import Activation
from engine.ops.experts import Experts
from engine.ops.operations import Ops
from engine.shares import UNDIVIDED


@dataclass
class FeedForward(Network):
    """The weights of a dense network, activation(x Wgate, x Wup) Wdown.

    gate, up: [n_ff, n_embd].  gate is None if the activation has no gate.
    down: [n_embd, n_ff].
    sparsity: that of :class:`DenseConfig`.
    """

    gate: Linear | None
    up: Linear
    down: Linear
    activation: Activation
    sparsity: float | None = None

    def add(self, ops: Ops, x: Array, b: Value, batch: Batch[Array], residual: Residual) -> Array:
        """Add the result for the normalized rows b to the residual stream x: float32 [rows, n_embd]."""
        return residual.add_product(ops, x, self.hidden(ops, b), self.down)

    def hidden(self, ops: Ops, x: Value) -> Value:
        """The activations of the rows x [rows, n_embd] before the layer ``down``: float32 [rows, n_ff]."""
        if self.gate is None:
            return ops.activate(self.activation, None, self.up.apply(ops, x))
        gate, up = products(ops, x, [self.gate, self.up])
        if self.sparsity is not None:
            gate = ops.sparsify(gate, self.sparsity)
        return ops.activate(self.activation, gate, up)


@dataclass
class Latents:
    """What surrounds experts that read latents and compute latents.

    down, up: the layers before and after the experts, [n_latent, n_embd] and [n_embd, n_latent].
    shared: the shared network, which reads the rows themselves; None: there is none.
    """

    down: Linear
    up: Linear
    shared: FeedForward | None


@dataclass
class Mixture(Network):
    """The weights of a mixture of experts, including the router and the shared network.

    latents: None: the experts read the rows themselves, and ``experts`` has the shared network.
    """

    experts: Experts[Array, Matrix]
    latents: Latents | None = None

    def add(self, ops: Ops, x: Array, b: Value, batch: Batch[Array], residual: Residual) -> Array:
        """Add the result for the normalized rows b to the residual stream x: float32 [rows, n_embd]."""
        if self.latents is not None:
            rows, latents = ops.plain(b), self.latents
            y = ops.experts(self.experts, None, latents.down.apply(ops, rows), rows, batch.tokens)
            y = latents.up.apply(ops, y)
            if latents.shared is not None:
                y = latents.shared.down.add_to(ops, y, latents.shared.hidden(ops, rows))
            return residual.add(ops, x, y)
        if residual.plain:
            return ops.experts(self.experts, x, b, None, batch.tokens)
        return residual.add(ops, x, ops.experts(self.experts, None, b, None, batch.tokens))


def load_feed_forward(loader: Loader, blk: str, config: DenseConfig) -> FeedForward:
    """Load the tensors ``ffn_gate``, ``ffn_up`` and ``ffn_down``.  Some files have gate and up in one tensor, ``ffn_up`` or
    ``ffn_gate_up``."""
    n_ff, n_embd, gate = config.n_ff, loader.config.n_embd, None
    if config.activation.gated:
        fused = "ffn_up" if loader.has(blk + "ffn_up.weight") else "ffn_gate_up"
        separate = loader.has(blk + "ffn_gate.weight")
        gate, up = loader.linears(blk, ("ffn_gate", "ffn_up"), "" if separate else fused, (n_ff, n_ff), n_embd)
    else:
        up = loader.linear(blk + "ffn_up", n_ff, n_embd)
    down = loader.linear(blk + "ffn_down", n_embd, n_ff)
    return FeedForward(gate, up, down, config.activation, config.sparsity)


def load_mixture(loader: Loader, blk: str, config: ExpertsConfig) -> Mixture:
    """Load a mixture of experts from the tensors that :func:`load_experts` lists and, if it has latents, ``ffn_latent_down``
    and ``ffn_latent_up``."""
    experts, n_latent, n_embd = load_experts(loader, blk, config), config.n_latent, loader.config.n_embd
    if not n_latent:
        return Mixture(experts)
    shared = None
    if experts.shared is not None:
        gate, up, down = (None if matrix is None else Linear(matrix) for matrix in experts.shared)
        assert up is not None and down is not None
        shared = FeedForward(gate, up, down, experts.common)
    down, up = (
        loader.linear(blk + "ffn_latent_down", n_latent, n_embd),
        loader.linear(blk + "ffn_latent_up", n_embd, n_latent),
    )
    return Mixture(replace(experts, shared=None), Latents(down, up, shared))


def load_experts(loader: Loader, blk: str, config: ExpertsConfig) -> Experts[Array, Matrix]:
    """Load the tensors of a mixture of experts.

    These are ``ffn_gate_inp`` (the router), ``ffn_gate_exps``, ``ffn_up_exps`` and ``ffn_down_exps``.  Some files have gate
    and up in one tensor, ``ffn_gate_up_exps``.  The tensors of the shared network end with ``_shexp``.  ``exp_probs_b`` is
    the bias for the selection, and ``ffn_gate_tid2eid`` is a table of the experts of each token.
    """
    e, width = config, config.n_latent or loader.config.n_embd
    gate, up = gate_up_experts(loader, blk, e)
    return Experts(
        e.n_expert,
        e.n_used,
        gate=gate,
        up=up,
        down=loader.matrix(blk + "ffn_down_exps.weight", width, e.n_ff, e.n_expert),
        activation=e.activation,
        shared_activation=e.shared_activation,
        shared_gated=e.shared_gated,
        gating=e.gating,
        normalized=e.normalized,
        weight_scale=e.weight_scale * (0.5 if e.averaged else 1.0),
        weighs_inputs=e.weighs_inputs,
        n_group=e.n_group,
        n_group_used=e.n_group_used,
        group_best=e.group_best,
        gate_bias=loader.optional(blk + "ffn_gate_exps.bias", e.n_expert, e.n_ff),
        up_bias=loader.optional(blk + "ffn_up_exps.bias", e.n_expert, e.n_ff),
        down_bias=loader.optional(blk + "ffn_down_exps.bias", e.n_expert, width),
        gate_scale=loader.optional(blk + "ffn_gate_exps.scale", e.n_expert),
        up_scale=loader.optional(blk + "ffn_up_exps.scale", e.n_expert),
        down_scale=loader.optional(blk + "ffn_down_exps.scale", e.n_expert),
        **choice_of(loader, blk, e),
    )


def choice_of(loader: Loader, blk: str, e: ExpertsConfig) -> dict[str, Any]:
    """Load the fields of :class:`Experts` that the choice of experts and the shared network need: the router, biases of the
    choice, the table of experts, and the shared network."""
    n_embd, shared = loader.config.n_embd, None
    router = [loader.array(blk + "ffn_gate_inp.weight", e.n_expert, n_embd)]
    if e.n_ff_shared:
        if e.averaged:
            router.append(np.zeros(n_embd, np.float32))  # sigmoid(0) = 1 / 2
        elif e.shared_gated:
            router.append(loader.array(blk + "ffn_gate_inp_shexp.weight", n_embd))
        gated = (e.shared_activation or e.activation).gated
        shared = (
            loader.matrix(blk + "ffn_gate_shexp.weight", e.n_ff_shared, n_embd) if gated else None,
            loader.matrix(blk + "ffn_up_shexp.weight", e.n_ff_shared, n_embd),
            loader.matrix(blk + "ffn_down_shexp.weight", n_embd, e.n_ff_shared),
        )
    return {
        "router": loader.ops.weight(
            # A choice needs the logits of all experts.
            replace(join_rows(blk + "ffn_gate_inp.weight", *router), heads=UNDIVIDED)
        ),
        "router_bias": loader.optional(blk + "ffn_gate_inp.bias", e.n_expert),
        "selection_bias": loader.optional(blk + "exp_probs_b.bias", e.n_expert),
        "given": loader.integers(blk + "ffn_gate_tid2eid.weight", loader.config.n_vocab, e.n_used, end=e.n_expert),
        "shared": shared,
    }


def gate_up_experts(loader: Loader, blk: str, e: ExpertsConfig) -> tuple[Matrix | None, Matrix]:
    """Load the gate and up matrices of all experts, [n_expert * n_ff, n_embd or n_latent] each; the gate is None if the
    activation has none.  Files have them in two tensors, or in one tensor with gate and up of each expert stacked."""
    n_embd, both = e.n_latent or loader.config.n_embd, blk + "ffn_gate_up_exps.weight"
    if not e.activation.gated:
        return None, loader.matrix(blk + "ffn_up_exps.weight", e.n_ff, n_embd, e.n_expert)
    if loader.has(both):
        weight = loader.weight(both, 2 * e.n_ff, n_embd, e.n_expert)
        gate, up = (loader.ops.weight(half) for half in weight.halves(2 * e.n_ff))
        return gate, up
    gate, up = (loader.matrix(f"{blk}ffn_{name}_exps.weight", e.n_ff, n_embd, e.n_expert) for name in ("gate", "up"))
    return gate, up
