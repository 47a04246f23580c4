"""The gated delta net of one layer: weights and operations.

u, z = a Wqkv, a Wgate;  alpha, beta = a Walpha, a Wbeta;  o = rms_norm(delta_net(u, alpha, beta), ssm_norm) * silu(z), with a
norm over each value head;  the layer adds o Wout to the residual stream (``engine/cpu/delta_net.py``).
"""

from dataclasses import dataclass, replace

import numpy as np

from engine.arrays import Array, Batch, Value
from engine.cache.recurrent import RecurrentCache
from engine.errors import ModelError
from engine.models.delta_net_config import DeltaNetConfig
from engine.models.linear import Linear, products
from engine.models.loader import Loader
from engine.models.mixer import Mixer
from engine.models.weights import stacked
from engine.ops.delta_net import DeltaNet
from engine.ops.operations import Ops
from engine.ops.weight import Weight
from engine.shares import HeadRows


@dataclass
class Recurrent(Mixer):
    """The weights of a delta net.

    attn_qkv: the linear layer that computes q, k and v.
    attn_gate: the linear layer that computes the gates.
    ssm_alpha_beta: the linear layers that compute alpha and beta.  If their matrices have the same format, they are stacked
        into one matrix, which saves a launch.
    net: the parameters of the delta net.
    """

    attn_qkv: Linear
    attn_gate: Linear
    ssm_alpha_beta: list[Linear]
    net: DeltaNet[Array]

    def mix(self, ops: Ops, a: Value, memory: RecurrentCache[Array], batch: Batch[Array]) -> Value:
        """Store states and updates in ``memory``, and compute the gated delta rule for the normalized rows a [rows, n_embd].

        Returns the result before the output layer, float32 [rows, n_v * state_size].
        """
        u, z, *gates = products(ops, a, [self.attn_qkv, self.attn_gate, *self.ssm_alpha_beta])
        o = ops.delta_net(self.net, u, gates, memory, batch)
        return ops.gated_norm(o, self.net.norm, z, self.net.eps)


def load_recurrent(loader: Loader, blk: str, config: DeltaNetConfig) -> Recurrent:
    """Load the tensors ``attn_qkv``, ``attn_gate``, ``ssm_alpha`` and ``ssm_beta`` (or ``ssm_ba``), ``ssm_conv1d``,
    ``ssm_a``, ``ssm_dt``, ``ssm_norm`` and ``ssm_out``."""
    net, n_embd, d = config, loader.config.n_embd, config.state_size
    d_v = net.n_v * d
    values = tuple(n * d for n in net.value_segments)
    channels = HeadRows(net.n_k, (net.n_k * d, net.n_k * d, *values))
    if loader.has(old := blk + "ssm_in.weight"):
        raise ModelError(f"{loader.gguf.path}: tensor {old} is of an early conversion; convert the model again.")
    return Recurrent(
        loader.linear(blk + "ssm_out", n_embd, d_v),
        loader.linear(blk + "attn_qkv", net.n_channels, n_embd, channels),
        loader.linear(blk + "attn_gate", d_v, n_embd, HeadRows(net.n_k, values)),
        _alpha_beta(loader, blk, net),
        DeltaNet(
            *(net.n_k, net.n_v, net.state_size, net.n_conv, loader.config.norm_eps),
            grouped=net.grouped,
            conv1d=loader.vector(blk + "ssm_conv1d.weight", net.n_channels, net.n_conv),
            a=loader.vector(blk + "ssm_a", net.n_v),
            dt=loader.vector(blk + "ssm_dt.bias", net.n_v),
            norm=loader.vector(blk + "ssm_norm.weight", net.state_size),
        ),
    )


def _alpha_beta(loader: Loader, blk: str, net: DeltaNetConfig) -> list[Linear]:
    n_v, n_embd = net.n_v, loader.config.n_embd
    single = HeadRows(net.n_k, net.value_segments)
    double = HeadRows(net.n_k, net.value_segments * 2)
    if loader.has(blk + "ssm_ba.weight"):
        # For each key head, the rows of beta of its value heads, then those of alpha (Qwen3-Next).
        both = loader.weight(blk + "ssm_ba.weight", 2 * n_v, n_embd)
        rows = np.arange(2 * n_v).reshape(net.n_k, 2, n_v // net.n_k)
        order = np.concatenate([rows[:, 1].ravel(), rows[:, 0].ravel()])
        return [Linear(loader.ops.weight(replace(both.reordered(order), heads=double)))]
    weights: list[Weight] = [loader.weight(f"{blk}ssm_{name}.weight", n_v, n_embd) for name in ("alpha", "beta")]
    if weights[0].format == weights[1].format:
        weights = [stacked(f"{blk}ssm_alpha and ssm_beta", *weights)]
    heads = double if len(weights) == 1 else single
    return [Linear(loader.ops.weight(replace(weight, heads=heads))) for weight in weights]
