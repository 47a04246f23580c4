"""Gated delta nets with the bits of the engine: python examples/law_delta_net.py MODEL.gguf

Three of four layers of Qwen 3.5 have no keys and values.  They have a matrix M for each head.  Each token makes it forget,
corrects it and reads it: M = e M;  M = M + beta (v - M k) k^T;  out = M q.  The engine does not compute it in this way, but
in segments of 16 positions.  S is M before the segment, and the tokens since then are a list.  This file does the same, one
token at a time.  The rest of the model is ``examples/law.py``, except that attention has gates.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from law import Array, Layer, Model, choose, exp, f32, fma, fold, log1p, rms_norm, squares

from engine.gguf.file import read_gguf

SEGMENT = 16


def sigmoid(x: Array) -> Array:
    """1 / (1 + e**-x)."""
    return f32(1) / (f32(1) + exp(-x))


def silu(x: Array) -> Array:
    """x / (1 + e**-x)."""
    return x / (f32(1) + exp(-x))


def softplus(x: Array) -> Array:
    """log(1 + e**x), x itself above 20."""
    return np.where(x > f32(20), x, log1p(exp(np.minimum(x, f32(20)))))


def dot(a: Array, b: Array) -> Array:
    """The sums of a b over the last axis.  Chain c of 32 has the elements m with m % 32 = c; then fours, then halves."""
    a, b = np.broadcast_arrays(a, b)
    chains = np.zeros((*a.shape[:-1], 32), f32)
    for m in range(0, a.shape[-1], 32):
        chains = fma(a[..., m : m + 32], b[..., m : m + 32], chains)
    fours = chains.reshape(*a.shape[:-1], 8, 4)
    return fold((fours[..., 0] + fours[..., 2]) + (fours[..., 1] + fours[..., 3]))


class DeltaNet:
    """The memory of a layer: S [n_v, d, d]; keys [n_v, d], differences u [n_v, d] and decays e [n_v] of the tokens since the
    segment began; and the last inputs of the convolution."""

    def __init__(self, n_k: int, n_v: int, d: int, eps: np.float32, conv: Array, a: Array, dt: Array) -> None:
        self.n_k, self.n_v, self.d, self.eps, self.conv, self.a, self.dt = n_k, n_v, d, eps, conv, a, dt
        self.inputs = np.zeros((conv.shape[1], conv.shape[0]), f32)
        self.state = np.zeros((n_v, d, d), f32)
        self.keys: list[Array] = []
        self.deltas: list[Array] = []
        self.decays: list[Array] = []

    def step(self, x: Array, alpha: Array, beta: Array) -> Array:
        """The output [n_v, d] for one more token, whose channels x are queries, keys and values."""
        d, heads = self.d, np.arange(self.n_v) % self.n_k  # value head h has the queries and keys of head h % n_k
        self.inputs = np.concatenate([self.inputs[1:], x[None]])
        y = np.zeros_like(x)
        for tap, earlier in enumerate(self.inputs):  # the oldest first
            y = fma(earlier, self.conv[:, tap], y)
        y = silu(y).reshape(-1, d)
        r = f32(1) / np.sqrt(squares(y[: 2 * self.n_k]) + self.eps)
        q = (y[: self.n_k] * r[: self.n_k, None] * f32(1 / d**0.5))[heads]
        k, v = (y[self.n_k : 2 * self.n_k] * r[self.n_k :, None])[heads], y[2 * self.n_k :]
        self.keys.append(k)
        self.decays.append(exp(self.a * softplus(alpha + self.dt)))
        total = np.ones(self.n_v, f32)  # G: the product of all decays of the segment, the first one first
        for e in self.decays:
            total = total * e
        known = total[:, None] * dot(self.state, k[:, None])
        for key, u, left in zip(self.keys, self.deltas, self.left(), strict=False):
            known = fma((left * dot(key, k))[:, None], u, known)
        self.deltas.append((v - known) * sigmoid(beta)[:, None])
        out = total[:, None] * dot(self.state, q[:, None])
        for key, u, left in zip(self.keys, self.deltas, self.left(), strict=True):
            out = fma((left * dot(key, q))[:, None], u, out)
        if len(self.keys) == SEGMENT:
            self.state = self.state * total[:, None, None]
            for key, u, left in zip(self.keys, self.deltas, self.left(), strict=True):
                self.state = fma((left[:, None] * u)[..., None], key[:, None], self.state)
            self.keys, self.deltas, self.decays = [], [], []
        return out

    def left(self) -> list[Array]:
        """D: for each token, the product of the decays of those after it, a forward product and no quotient."""
        products = []
        for i in range(len(self.decays)):
            product = np.ones(self.n_v, f32)
            for e in self.decays[i + 1 :]:
                product = product * e
            products.append(product)
        return products


@dataclass
class Recurrent(Layer):
    """A layer with a delta net, and no keys and values."""

    net: DeltaNet


class Hybrid(Model):
    """A model of qwen35: delta nets, and attention with gates."""

    ARCHITECTURES = ("qwen35",)
    BEFORE_NETWORK = "post_attention_norm"

    def layer(self, il: int) -> Layer:
        """Read the weights of a layer."""
        blk = f"blk.{il}."
        if blk + "ssm_a" not in self.unread:
            return super().layer(il)
        norms = {name: self.vector(blk + name) for name in ("attn_norm", self.BEFORE_NETWORK, "ssm_norm")}
        names = ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_out", *self.NETWORK)
        n_k, n_v, d = (self.integer(f"ssm.{name}", 0) for name in ("group_count", "time_step_rank", "state_size"))
        a, dt = (self.unread.pop(blk + name).data.view(f32) for name in ("ssm_a", "ssm_dt.bias"))
        conv = self.vector(blk + "ssm_conv1d").reshape(-1, self.integer("ssm.conv_kernel", 0))
        weights, none = {name: self.matrix(blk + name) for name in names}, np.zeros((0, 0, 0), np.float16)
        return Recurrent(norms, weights, none, none, DeltaNet(n_k, n_v, d, self.eps, conv, a, dt))

    def attend(self, layer: Layer, a: Array, cos: Array, sin: Array) -> Array:
        """The delta net or the attention of a layer for the normalized row a."""
        if not isinstance(layer, Recurrent):
            return self.attend_gated(layer, a, cos, sin)
        w = layer.matrices
        out = layer.net.step(w["attn_qkv"].times(a), w["ssm_alpha"].times(a), w["ssm_beta"].times(a))
        gated = rms_norm(out, layer.vectors["ssm_norm"], self.eps) * silu(w["attn_gate"].times(a).reshape(out.shape))
        return w["ssm_out"].times(gated.reshape(-1))

    def attend_gated(self, layer: Layer, a: Array, cos: Array, sin: Array) -> Array:
        """Attention whose output is multiplied by sigmoid(g), with g after the query of each head."""
        w = layer.matrices
        q, g = w["attn_q"].times(a).reshape(self.heads, 2, -1).swapaxes(0, 1)
        return w["attn_output"].times(self.heads_of(layer, q, a, cos, sin) * sigmoid(g.reshape(-1)))


def main() -> None:
    """Print the tokens that follow the first token of a vocabulary."""
    if len(sys.argv) != 2:
        sys.exit("Name a file of qwen35: bitmirror synthetic --shape tiny-qwen35:Q8_0 -o tiny.gguf makes a small one.")
    model, ids = Hybrid(read_gguf(Path(sys.argv[1]))), [0]
    for _ in range(8):
        ids.append(choose(model.step(ids[-1]), len(ids)))
    print(*ids)


if __name__ == "__main__":
    main()
