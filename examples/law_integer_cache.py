"""The default cache with the bits of the engine: python examples/law_integer_cache.py

``examples/law.py`` has a cache in float16, which is the simplest one.  By default, the engine stores integers of 8 bits for
models with quantized weights, and of 12 bits for others (cache types i8 and i12).  This file has what differs: keys and
values are rotated and rounded to integers with a scale for each block of a head, and every sum of products is a sum of
integers, which has no order.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from law import Array, Layer, Model, State, answer, f32, f64, fma, fold, horner, i32, join, rms_norm
from law import rotate as rotate_positions

from engine.gguf.file import GGUF, read_gguf

LOG2_E, LN_2 = 1.4426950408889634, f32(0.6931471805599453)
ROUND = f32(1.5 * 2**23)
TINY = f32(2.0**-100)


def exp2(x: Array) -> Array:
    """2**x for x <= 0: 2**n times a polynomial in r, x = n + r; 0 below -125."""
    t = x + ROUND
    r = x - (t - ROUND)
    p = horner(r, 1.3269534102e-3, 9.6712922677e-3, 5.5507108569e-2, 2.4022246897e-1, 6.9314700365e-1, 1.0)
    power = ((t.view(i32) << 23) + f32(1).view(i32)).view(f32)
    return np.where(x < f32(-125), f32(0), p * power)


def rotate(x: Array) -> Array:
    """The blocks x [..., B] times the Hadamard matrix over sqrt(B): sums and differences of elements 1, 2, 4, ... apart."""
    n, h = x.shape[-1], 1
    while h < n:
        pairs = x.reshape(*x.shape[:-1], n // (2 * h), 2, h)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x, h = np.stack([a + b, a - b], axis=-2).reshape(x.shape), 2 * h
    return x * f32(1 / n**0.5)


def blocks(x: Array) -> Array:
    """Heads x [..., d] in blocks [..., d / B, B]; B is the largest power of two that divides d, but at most 128."""
    d = x.shape[-1]
    block = min(d & -d, 128)
    return x.reshape(*x.shape[:-1], d // block, block)


def largest(x: Array) -> Array:
    """The largest magnitude of each block, or 0 where it is below 2**-100."""
    most = np.abs(x).max(axis=-1)
    return np.where(most < TINY, f32(0), most)


def rounded(x: Array, factor: Array) -> Array:
    """The products with a factor for each block, rounded once to integers, ties to even."""
    return np.rint(np.multiply(x, factor[..., None], dtype=f64))


def store(x: Array, most: int) -> tuple[Array, Array]:
    """Heads x [kv, d] as rotated integers [kv, blocks, B] of at most ``most``, and scales that float16 can represent."""
    x = rotate(blocks(x))
    d = (largest(x) / f32(most)).astype(np.float16).astype(f32)
    limit, inverse = f32(most) * d, np.where(d == 0, f32(0), f32(1) / np.where(d == 0, f32(1), d))
    return rounded(np.clip(x, -limit[..., None], limit[..., None]), inverse), d


def query(x: Array, scale: float) -> tuple[Array, Array]:
    """Heads x [..., d] as rotated integers of at most 1023, with scales in float32; a score is a power of two."""
    x = rotate(blocks(x)) * f32(scale * LOG2_E)
    most = largest(x)
    return rounded(x, np.where(most == 0, f32(0), f32(1023) / np.where(most == 0, f32(1), most))), most / f32(1023)


def weighted(p: Array, scales: Array, values: Array) -> Array:
    """The sums of values [n, B] with weights p scales, [heads, n]: integers of at most 2047, and one power of two."""
    w = p * scales
    top = w.max(axis=-1, keepdims=True)
    exponent = (top.view(i32) >> 23) - 126  # 2**(exponent - 1) <= top < 2**exponent
    up, down = (np.ldexp(f32(1), sign * (11 - exponent)) for sign in (1, -1))
    integers = np.minimum(2047, np.rint(np.multiply(w, up, dtype=f64)))
    return np.where(top < TINY, f32(0), (integers @ values + 0.0).astype(f32) * down)


@dataclass
class Integers:
    """Keys or values: integers, float64 [kv, n, blocks, B], and their scales, float32 [kv, n, blocks]."""

    integers: Array
    scales: Array

    def append(self, x: Array, most: int) -> None:
        integers, scales = store(x, most)
        self.integers = np.concatenate([self.integers, integers[:, None]], axis=1)
        self.scales = np.concatenate([self.scales, scales[:, None]], axis=1)


def chunk_state(q: Array, dq: Array, keys: Integers, values: Integers, g: int, chunk: slice) -> State:
    """The state of a chunk of the head g of keys: queries q [heads, blocks, B] and their scales."""
    k, dk = keys.integers[g, chunk], keys.scales[g, chunk]
    scores = np.zeros((len(q), len(k)), f32)
    for b in range(k.shape[1]):
        scores = fma(dq[:, b, None] * dk[:, b], (q[:, b] @ k[:, b].T + 0.0).astype(f32), scores)
    top = scores.max(axis=-1)
    p = np.zeros((len(q), 64), f32)
    p[:, : len(k)] = exp2(scores - top[:, None])
    v, dv = values.integers[g, chunk], values.scales[g, chunk]
    o = [weighted(p[:, : len(k)], dv[:, b], v[:, b]) for b in range(v.shape[1])]
    return top * LN_2, fold(p), np.concatenate(o, axis=-1)


def attention(q: Array, dq: Array, keys: Integers, values: Integers, g: int) -> Array:
    """Attend with the queries of one head of keys to all of its keys and values; the result is still rotated."""
    n, width = keys.integers.shape[1], values.integers[0, 0].size
    zero = np.zeros((len(q), width), f32)
    total = nothing = zero[:, 0] - f32(np.inf), zero[:, 0], zero
    for group in range(0, n, 8 * 64):
        state = nothing
        for first in range(group, min(group + 8 * 64, n), 64):
            state = join(state, chunk_state(q, dq, keys, values, g, slice(first, min(first + 64, n))))
        total = join(total, state)
    return total[2] / total[1][:, None]


class IntegerCache(Model):
    """A model with a cache of the type i8 or i12."""

    def __init__(self, file: GGUF, bits: int = 8) -> None:
        super().__init__(file)
        self.most = 2 ** (bits - 1) - 1
        none: Any = [blocks(np.zeros((self.kv, 0, d))) for d in (self.d_k, self.d_v)]
        self.caches = {id(x): [Integers(a, a[..., 0].astype(f32)) for a in none] for x in self.layers}

    def heads_of(self, layer: Layer, q: Array, a: Array, cos: Array, sin: Array) -> Array:
        """The results of all heads, with the queries q."""
        w, norms = layer.matrices, layer.vectors
        q, k = q.reshape(self.heads, -1), w["attn_k"].times(a).reshape(self.kv, -1)
        if "attn_q_norm" in norms:
            q, k = rms_norm(q, norms["attn_q_norm"], self.eps), rms_norm(k, norms["attn_k_norm"], self.eps)
        q, k = (rotate_positions(x, cos, sin, self.halves) for x in (q, k))
        keys, values = self.caches[id(layer)]
        keys.append(k, self.most)
        values.append(w["attn_v"].times(a).reshape(self.kv, -1), self.most)
        integers, dq = query(q.reshape(self.kv, self.heads // self.kv, -1), 1 / self.d_k**0.5)
        out = np.stack([attention(integers[g], dq[g], keys, values, g) for g in range(self.kv)])
        return rotate(blocks(out)).reshape(-1)


def main() -> None:
    """Print what the bundled model writes after a prompt, greedily."""
    file = read_gguf(Path(__file__).parents[1] / "engine" / "data" / "pycoder-dense-Q4_K_M.gguf")
    tokens: Any = file.metadata["tokenizer.ggml.tokens"]
    prompt = [tokens.index(token) for token in ("def", "Ġadd", "(a", ",", "Ġb", "):")]
    text = "".join(tokens[i] for i in answer(IntegerCache(file), prompt, 12))
    print(repr(text.replace("Ġ", " ").replace("Ċ", "\n")))


if __name__ == "__main__":
    main()
