"""Kimi delta attention in one layer: weights and operations.

q, k, v = a Wq, a Wk, a Wv;  f = (a Wf_a) Wf_b;  z = (a Wg_a) Wg_b;  b = a Wbeta;  o = rms_norm(kda(q, k, v, f, b), ssm_norm)
* sigmoid(z), with a norm over each head;  the layer adds o Wo to the residual stream (``engine/cpu/kda.py``).
"""

from dataclasses import dataclass

import numpy as np

from engine.arrays import Array, Batch, Value
from engine.cache.mamba import MambaCache
from engine.models.kda_config import KDAConfig
from engine.models.linear import Linear, products
from engine.models.loader import Loader
from engine.models.mixer import Mixer
from engine.ops.kda import KDA
from engine.ops.operations import Ops

EPS = 1e-6
"""The epsilon in the lengths of queries and keys.  The published code has it as a constant, and files do not contain it."""


@dataclass
class KDAMixer(Mixer):
    """The weights of Kimi delta attention.

    inputs: the linear layers that compute q, k, v, b, and the narrow inputs of ``decays`` and ``gates``.
    decays: the linear layer that computes f.
    gates: the linear layer that computes z.
    net: the parameters of the convolutions and of the recurrence.
    norm: float32 [d], the weights of the norm of each head.
    norm_eps: the epsilon of this norm.
    """

    inputs: list[Linear]
    decays: Linear
    gates: Linear
    net: KDA[Array]
    norm: Array
    norm_eps: float

    def mix(self, ops: Ops, a: Value, memory: MambaCache[Array], batch: Batch[Array]) -> Value:
        """Store states and tokens in ``memory``, and compute the delta rule for the normalized rows a [rows, n_embd].

        Returns the result before the output layer, float32 [rows, n_head * d].
        """
        q, k, v, b, of_decays, of_gates = products(ops, a, self.inputs)
        o = ops.kda(self.net, q, k, v, self.decays.apply(ops, of_decays), b, memory, batch)
        return ops.gated_norm(o, self.norm, self.gates.apply(ops, of_gates), self.norm_eps, False)


def load_kda(loader: Loader, blk: str, config: KDAConfig) -> KDAMixer:
    """Load the tensors ``attn_q``, ``attn_k`` and ``attn_v``, or ``attn_qkv``; ``ssm_conv1d_q``, ``ssm_conv1d_k``,
    ``ssm_conv1d_v``, ``ssm_beta``, ``ssm_f_a``, ``ssm_f_b``, ``ssm_g_a``, ``ssm_g_b``, ``ssm_a``, ``ssm_dt``, ``ssm_norm``
    and ``attn_output``."""
    net, n_embd, inner = config, loader.config.n_embd, config.d_inner
    names, rows = ("attn_q", "attn_k", "attn_v"), {"ssm_beta": net.n_head, "ssm_f_a": net.d, "ssm_g_a": net.d}
    taps = [_without_ones(loader, f"{blk}ssm_conv1d_{part}.weight", inner, net.taps) for part in "qkv"]
    return KDAMixer(
        loader.linear(blk + "attn_output", n_embd, inner),
        [
            *loader.linears(blk, names, "attn_qkv", (inner,) * 3, n_embd),
            *(loader.linear(blk + name, n, n_embd) for name, n in rows.items()),
        ],
        loader.linear(blk + "ssm_f_b", inner, net.d),
        loader.linear(blk + "ssm_g_b", inner, net.d),
        KDA(
            *(net.n_head, net.d, net.taps, EPS),
            conv=loader.ops.upload(np.concatenate(taps)),
            a=loader.ops.upload(_without_ones(loader, blk + "ssm_a", net.n_head)),
            dt=loader.vector(blk + "ssm_dt.bias", inner),
        ),
        loader.vector(blk + "ssm_norm.weight", net.d),
        loader.config.norm_eps,
    )


def _without_ones(loader: Loader, name: str, *shape: int) -> np.ndarray:
    """Load a small tensor as float32 of this shape.  Files have it with further dimensions of 1, whose number differs."""

    def longer(sizes: tuple[int, ...]) -> list[int]:
        return [n for n in sizes if n != 1]

    given = loader.gguf.tensors[name].shape if loader.has(name) else shape
    return loader.array(name, *(given if longer(given) == longer(shape) else shape)).reshape(shape)
