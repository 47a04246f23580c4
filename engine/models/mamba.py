"""Mamba-2 in one layer: weights and operations.

z, u = a Win;  y = mamba(u) * silu(z), the convolution, the recurrence and the gate (``engine/cpu/mamba.py``);  the layer adds
rms_norm(y, ssm_norm) Wout to the residual stream, with a norm over each group of heads, or y Wout if there is no norm.
"""

from dataclasses import dataclass

import numpy as np

from engine.arrays import Array, Batch, Value
from engine.cache.mamba import MambaCache
from engine.models.linear import Linear, products
from engine.models.loader import Loader
from engine.models.mamba_config import MambaConfig
from engine.models.mixer import Mixer
from engine.ops.mamba import Mamba
from engine.ops.operations import Ops


@dataclass
class MambaMixer(Mixer):
    """The weights of a Mamba-2 layer.

    gate: the linear layer that computes the gates z.
    inputs: the linear layer that computes u, the inputs of the convolution and the steps.
    net: the parameters of the convolution and of the recurrence.
    norm: float32 [d_inner], the weights of the norm after the gate; None: there is no norm.
    norm_eps: the epsilon of this norm.
    """

    gate: Linear
    inputs: Linear
    net: Mamba[Array]
    norm: Array | None
    norm_eps: float

    def mix(self, ops: Ops, a: Value, memory: MambaCache[Array], batch: Batch[Array]) -> Value:
        """Store states and tokens in ``memory``, and compute the recurrence for the normalized rows a [rows, n_embd].

        Returns the result before the output layer, float32 [rows, d_inner].
        """
        z, u = products(ops, a, [self.gate, self.inputs])
        y = ops.mamba(self.net, u, z, memory, batch)
        if self.norm is None:
            return y
        if self.net.n_group > 1:
            return ops.grouped_norm(y, self.norm, self.net.n_group, self.norm_eps)
        return ops.rms_norm(y, self.norm, self.norm_eps)


def load_mamba(loader: Loader, blk: str, config: MambaConfig) -> MambaMixer:
    """Load the tensors ``ssm_in``, ``ssm_conv1d``, ``ssm_dt``, ``ssm_a``, ``ssm_d``, ``ssm_out`` and, if there is
    a norm, ``ssm_norm``."""
    net, n_embd, eps = config, loader.config.n_embd, loader.config.norm_eps
    names, sizes = ("ssm_in.gate", "ssm_in.inputs"), (net.d_inner, net.n_channels + net.n_head)
    gate, inputs = loader.linears(blk, names, "ssm_in", sizes, n_embd)
    bias = loader.optional(blk + "ssm_conv1d.bias", net.n_channels)
    norm, shape = None, (net.n_group, net.d_inner // net.n_group)
    if net.normed:
        norm = loader.vector(blk + "ssm_norm.weight", *shape).reshape(net.d_inner)
    return MambaMixer(
        loader.linear(blk + "ssm_out", n_embd, net.d_inner),
        gate,
        inputs,
        Mamba(
            *(net.n_head, net.d, net.n, net.n_group, net.taps),
            conv=loader.vector(blk + "ssm_conv1d.weight", net.n_channels, net.taps),
            conv_bias=loader.ops.upload(np.zeros(net.n_channels, np.float32)) if bias is None else bias,
            dt=loader.vector(blk + "ssm_dt.bias", net.n_head),
            a=loader.vector(blk + "ssm_a", net.n_head, 1).reshape(net.n_head),
            skip=loader.vector(blk + "ssm_d", net.n_head, 1).reshape(net.n_head),
        ),
        norm,
        eps,
    )
