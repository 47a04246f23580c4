"""The arithmetic of the engine in one file of NumPy, with the same bits: python examples/law.py

One token at a time goes through a model of the architecture llama or qwen3, with weights in Q4_K, Q6_K, Q8_0 and F32 and a
cache in float16.  The result does not depend on how an implementation divides its work, so this one does not divide it.  Only
the reader of files comes from the engine.  Arrays are float32 unless a comment says otherwise, and all numbers are finite.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.gguf.file import GGUF, GGUFTensor, read_gguf

Array = np.ndarray[Any, Any]
f32, f64, i32, u64 = np.float32, np.float64, np.int32, np.uint64

# --- one rounding ----------------------------------------------------------------------------------------------


def fma(a: Array, b: Array | np.floating[Any], c: Array | np.floating[Any]) -> Array:
    """a * b + c, rounded once.

    The product of two float32 is exact in float64.  The sum is not, but what it lost is known exactly (Knuth's two-sum).  If
    it lost something, a sum whose last bit is 0 is replaced by its neighbour on the side of the exact sum, whose last bit is
    1.  It then never looks like a number halfway between two float32 when the exact sum is none, so converting it gives the
    float32 nearest to the exact sum.
    """
    product = np.multiply(a, b, dtype=f64)
    total = np.asarray(product + c)
    added = total - product
    lost = (product - (total - added)) + (c - added)
    bits = total.view(np.int64)
    # One step of the bits, away from zero if what was lost has the sign of the sum; 0 if nothing was lost.
    odd = bits + (~bits & 1) * np.sign(lost * total).astype(np.int64)
    return odd.view(f64).astype(f32)


def horner(x: Array, *coefficients: float) -> Array:
    """A polynomial in x, highest power first, with one fma for each further coefficient."""
    p = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        p = fma(p, x, f32(coefficient))
    return p


def fold(lanes: Array) -> Array:
    """The sums of the last axis, whose size is a power of two: lane j plus lane j + half, until one lane is left."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


# --- functions -------------------------------------------------------------------------------------------------

ROUND = f32(1.5 * 2**23)  # added to a small number, it leaves the nearest integer in the low bits, ties to even
LN2_HI, LN2_LO = f32(0.693359375), f32(-2.12194440e-4)  # ln 2 = their sum; n * LN2_HI is exact


@np.errstate(invalid="ignore")  # -inf, which stands for nothing at all, has the power 0
def exp(x: Array) -> Array:
    """e**x = 2**n e**r with x = n ln 2 + r; 0 below -87, infinite above 88.72283."""
    t = fma(x, f32(1.4426950408889634), ROUND)
    n = t - ROUND
    r = fma(n, -LN2_LO, fma(n, -LN2_HI, x))
    p = horner(r, 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
    p = fma(p, r * r, r) + f32(1)
    y = (p.view(i32) + ((t.view(i32) - ROUND.view(i32)) << 23)).view(f32)  # n is added to the exponent
    return np.where(x < f32(-87), f32(0), np.where(x > f32(88.72283), f32(np.inf), y))


def log(x: Array) -> Array:
    """log x = e ln 2 + log m with x = 2**e m, sqrt(1/2) <= m < sqrt(2), for positive normal x."""
    bits = x.view(i32)
    e, m = (bits >> 23) - 126, ((bits & 0x7FFFFF) | 0x3F000000).view(f32)
    small = m < f32(0.70710678118654752440)
    e, m = np.where(small, e - 1, e), np.where(small, m + m, m)
    s, n = m - f32(1), e.astype(f32)
    z = s * s
    first = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1)
    p = horner(s, *first, -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1) * s
    p = fma(z, f32(-0.5), fma(p, z, n * LN2_LO))
    return fma(n, LN2_HI, s + p)


def log1p(x: Array) -> Array:
    """log(1 + x) = log(u) x / (u - 1) with u = 1 + x rounded; x where u is 1."""
    u = f32(1) + x
    d = np.where(u == 1, f32(1), u - f32(1))
    return np.where(u == 1, x, log(u) * (x / d))


def swiglu(g: Array, u: Array) -> Array:
    """silu(g) u = g / (1 + e**-g) u."""
    return g / (f32(1) + exp(-g)) * u


# --- weights ---------------------------------------------------------------------------------------------------


def float_of(bytes_: Array) -> Array:
    """The float16 in two bytes, uint8 [..., 2], as float32."""
    return np.ascontiguousarray(bytes_).view(np.float16)[..., 0].astype(f32)


def q8_0(b: Array) -> tuple[Array, ...]:
    """Blocks of 32: d, then 32 signed bytes q; weight = d q."""
    return float_of(b[..., :2]), np.ascontiguousarray(b[..., 2:]).view(np.int8).astype(f64)


def q6_k(b: Array) -> tuple[Array, ...]:
    """Blocks of 256: low nibbles, high pairs of bits, a signed scale s for each 16, d; weight = d s (q - 32)."""
    low, high = b[..., :128].reshape(*b.shape[:-1], 2, 2, 32), b[..., 128:192].reshape(*b.shape[:-1], 2, 1, 32)
    q = np.concatenate([low & 15, low >> 4], axis=-2) | (high >> np.array([[0], [2], [4], [6]], np.uint8) & 3) << 4
    s = np.ascontiguousarray(b[..., 192:208]).view(np.int8).astype(f64)
    w = s[..., None] * (q.reshape(*b.shape[:-1], 16, 16).astype(f64) - 32)
    return float_of(b[..., 208:]), w.reshape(*b.shape[:-1], 256)


def q4_k(b: Array) -> tuple[Array, ...]:
    """Blocks of 256: d, e, eight scales s and minimums m of six bits, nibbles q; weight = d s q - e m, for each 32."""
    t = b[..., 4:16]
    first, second, rest = t[..., :4], t[..., 4:8], t[..., 8:]
    s = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=-1).astype(f64)
    m = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=-1).astype(f64)
    bytes_ = b[..., 16:].reshape(*b.shape[:-1], 4, 32)
    q = np.stack([bytes_ & 15, bytes_ >> 4], axis=-2).reshape(*b.shape[:-1], 8, 32)
    return float_of(b[..., :2]), (s[..., None] * q).reshape(*b.shape[:-1], 256), -float_of(b[..., 2:4]), m


FORMATS = {"Q8_0": (34, q8_0), "Q6_K": (210, q6_k), "Q4_K": (144, q4_k)}
"""Bytes of a block, and the function that unpacks blocks uint8 [..., bytes]: d, integers w, and perhaps -e and integers m."""


class Matrix:
    """A matrix of R rows of U blocks, also called units: d [U, R], integers w [U, R, unit] as float64, and perhaps dm [U, R]
    and integers m [U, R, 8]."""

    def __init__(self, tensor: GGUFTensor) -> None:
        if tensor.type.name not in FORMATS:
            raise ValueError(f"{tensor.name} is in {tensor.type.name}: this law has only {', '.join(FORMATS)} and F32.")
        size, unpack = FORMATS[tensor.type.name]
        d, w, *minimums = unpack(tensor.data.reshape(tensor.shape[0], -1, size))
        self.d, self.w = d.T.copy(), w.swapaxes(0, 1).copy()
        self.minimums = [x.swapaxes(0, 1).copy() for x in minimums]

    def row(self, r: int) -> Array:
        """The weights of a row: d w + dm m."""
        d, w = self.d[:, r, None], self.w[:, r].astype(f32)
        if not self.minimums:
            return (d * w).reshape(-1)
        dm, m = (x[:, r] for x in self.minimums)
        return fma(d, w, dm[:, None] * np.repeat(m, 32, axis=1).astype(f32)).reshape(-1)

    def times(self, x: Array) -> Array:
        """The product with a row of activations: exact integers in a unit, then chains of units."""
        units, _, unit = self.w.shape
        a, da = quantize(x.reshape(units, unit))
        value = self.d * integer_sums(self.w, a)
        if self.minimums:
            dm, m = self.minimums
            value = fma(dm, integer_sums(m, a.reshape(units, 8, 32).sum(axis=2)), value)
        length = -(-units // 8)  # eight chains of consecutive units; the last ones may be shorter, or empty
        total = np.zeros(value.shape[1], f32)
        for first in range(0, units, length):
            chain = np.zeros_like(total)
            for u in range(first, min(first + length, units)):
                chain = fma(da[u], value[u], chain)
            total = total + chain
        return total


def integer_sums(w: Array, a: Array) -> Array:
    """The sums over k of w[u, r, k] a[u, k], rounded once.  They are integers far below 2**53, for which float64 is exact in
    any order; the 0 that is added makes -0 the integer 0."""
    return ((w @ a[:, :, None])[..., 0] + 0.0).astype(f32)


def quantize(x: Array) -> tuple[Array, Array]:
    """Units of activations as integers of -127..127 (float64) and a scale: a = round(x 127 / most), ties to even."""
    most = np.abs(x).max(axis=1)
    zero = most < f32(2.0**-100)
    factor = np.where(zero, f32(0), f32(127) / np.where(zero, f32(1), most))
    return np.rint(np.multiply(x, factor[:, None], dtype=f64)), np.where(zero, f32(0), most) / f32(127)


class Floats:
    """A matrix in float32 [R, K]."""

    def __init__(self, tensor: GGUFTensor) -> None:
        self.w: Array = tensor.data.view(f32).reshape(tensor.shape)

    def row(self, r: int) -> Array:
        return self.w[r]

    def times(self, x: Array) -> Array:
        """The product with a row of activations: chain c of 32 has the columns k with k % 32 = c."""
        chains = np.zeros((self.w.shape[0], 32), f32)
        for k in range(0, x.size, 32):
            part = x[k : k + 32]
            chains[:, : part.size] = fma(self.w[:, k : k + 32], part, chains[:, : part.size])
        return fold(chains)


# --- norm, rotation, attention ---------------------------------------------------------------------------------


def squares(x: Array) -> Array:
    """The sums of x**2 over the last axis of size n.  Chain c has the elements i with i % width = c: the width is 256, or the
    least power of two that is not below n if that is less."""
    n = x.shape[-1]
    chains = np.zeros((*x.shape[:-1], min(256, 1 << (n - 1).bit_length())), f32)
    for k in range(0, n, chains.shape[-1]):
        part = x[..., k : k + chains.shape[-1]]
        chains[..., : part.shape[-1]] = fma(part, part, chains[..., : part.shape[-1]])
    return fold(chains)


def rms_norm(x: Array, weight: Array, eps: np.float32) -> Array:
    """(x r) weight, r = 1 / sqrt(sum(x**2) / n + eps), for the last axis."""
    r = f32(1) / np.sqrt(squares(x) / f32(x.shape[-1]) + eps)
    return x * r[..., None] * weight


def rotate(x: Array, cos: Array, sin: Array, halves: bool) -> Array:
    """Rotate the pairs (a, b) of each head x [heads, d]: elements half of the rotated ones apart, or else neighbours."""
    n, y = 2 * cos.size, x.copy()
    first, second = (slice(0, n // 2), slice(n // 2, n)) if halves else (slice(0, n, 2), slice(1, n, 2))
    a, b = x[:, first], x[:, second]
    y[:, first], y[:, second] = fma(a, cos, -(b * sin)), fma(a, sin, b * cos)
    return y


State = tuple[Array, Array, Array]
"""A part of a softmax: the largest score M, the sum L of e**(score - M), and the sum O of the values with these weights."""


def join(left: State, right: State) -> State:
    """The state of two parts, with the weights of both relative to the larger M."""
    top = np.maximum(left[0], right[0])
    a, b = exp(left[0] - top), exp(right[0] - top)
    return top, fma(left[1], a, b * right[1]), fma(left[2], a[..., None], b[..., None] * right[2])


def chunk_state(scores: Array, values: Array) -> State:
    """The state of a chunk of up to 64 positions: scores [kv, heads, n], values [kv, n, d]."""
    top = scores.max(axis=-1)
    weights = np.zeros((*scores.shape[:-1], 64), f32)
    weights[..., : scores.shape[-1]] = exp(scores - top[..., None])
    o = np.zeros((*top.shape, values.shape[-1]), f32)
    for j in range(values.shape[1]):
        o = fma(weights[..., j, None], values[:, None, j], o)
    return top, fold(weights), o


def attention(q: Array, keys: Array, values: Array) -> Array:
    """Attend with the scaled queries q [kv, heads, d] to all keys and values, float32 [kv, n, d]."""
    kv, heads, d = q.shape
    scores = np.zeros((kv, heads, keys.shape[1]), f32)
    for i in range(d):
        scores = fma(q[:, :, i, None], keys[:, None, :, i], scores)
    zero = np.zeros((kv, heads, values.shape[2]), f32)
    total = nothing = zero[..., 0] - f32(np.inf), zero[..., 0], zero
    for group in range(0, keys.shape[1], 8 * 64):  # chunks join in groups of eight, then the groups
        state = nothing
        for first in range(group, min(group + 8 * 64, keys.shape[1]), 64):
            state = join(state, chunk_state(scores[..., first : first + 64], values[:, first : first + 64]))
        total = join(total, state)
    return total[2] / total[1][..., None]


# --- the model -------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """The weights of a layer by the names of the file, and its keys and values, float16 [kv, positions, d]."""

    vectors: dict[str, Array]
    matrices: dict[str, Matrix | Floats]
    keys: Array
    values: Array


class Model:
    """A model, and what it has read: ``step`` adds a token."""

    ARCHITECTURES: tuple[str, ...] = ("llama", "qwen3")
    NETWORK: tuple[str, ...] = ("ffn_gate", "ffn_up", "ffn_down")
    BEFORE_NETWORK = "ffn_norm"
    MIXTURE = False

    def __init__(self, file: GGUF) -> None:
        self.file, self.unread = file, dict(file.tensors)
        self.architecture = architecture = file.require("general.architecture", "str")
        if architecture not in self.ARCHITECTURES or bool(self.integer("expert_count", 0)) != self.MIXTURE:
            kind = "mixtures of experts" if self.integer("expert_count", 0) else architecture
            raise ValueError(f"{file.path}: this law is that of {' and '.join(self.ARCHITECTURES)}, not of {kind}.")
        heads, width = self.integer("attention.head_count", 0), self.integer("embedding_length", 0)
        self.heads, self.kv, self.halves = (
            heads,
            self.integer("attention.head_count_kv", heads),
            architecture != "llama",
        )
        self.eps = f32(file.require(f"{architecture}.attention.layer_norm_rms_epsilon", "f32"))
        self.d_k, self.d_v = (self.integer(f"attention.{name}_length", width // heads) for name in ("key", "value"))
        self.scale = f32(1 / self.d_k**0.5)
        count = self.integer("block_count", 0) - self.integer(
            "nextn_predict_layers", 0
        )  # those that draft are not read
        self.unread = {name: tensor for name, tensor in self.unread.items() if not name.startswith(f"blk.{count}.")}
        self.layers = [self.layer(il) for il in range(count)]
        self.embedding, self.norm = self.matrix("token_embd"), self.vector("output_norm")
        self.output = self.matrix("output") if "output.weight" in self.unread else self.embedding
        n_rot, base = (
            self.integer("rope.dimension_count", self.d_k),
            file.get(f"{architecture}.rope.freq_base", "f32", 1e4),
        )
        self.frequencies: Array = np.array([base ** (-2.0 * i / n_rot) for i in range(n_rot // 2)])  # float64
        if "rope_freqs.weight" in self.unread:
            self.frequencies = self.frequencies / self.vector("rope_freqs").astype(f64)
        self.position = 0
        more = [*self.unread, *(key for key in file.metadata if key.startswith(f"{architecture}.rope.scal"))]
        if more:
            raise ValueError(f"{file.path}: this law does not say what {', '.join(more)} would do.")

    def integer(self, name: str, default: int) -> int:
        return self.file.get(f"{self.architecture}.{name}", "int", default)

    def vector(self, name: str) -> Array:
        return self.unread.pop(name + ".weight").data.view(f32)

    def matrix(self, name: str) -> Matrix | Floats:
        tensor = self.unread.pop(name + ".weight")
        return Floats(tensor) if tensor.type.name == "F32" else Matrix(tensor)

    def layer(self, il: int) -> Layer:
        """Read the weights of a layer, and begin its cache."""
        norms = ("attn_norm", self.BEFORE_NETWORK, *(("attn_q_norm", "attn_k_norm") if self.halves else ()))
        names = ("attn_q", "attn_k", "attn_v", "attn_output", *self.NETWORK)
        cache = np.zeros((self.kv, 0, self.d_k), np.float16), np.zeros((self.kv, 0, self.d_v), np.float16)
        vectors = {name: self.vector(f"blk.{il}.{name}") for name in norms}
        return Layer(vectors, {name: self.matrix(f"blk.{il}.{name}") for name in names}, *cache)

    def step(self, token: int) -> Array:
        """The logits after one more token."""
        angles = self.position * self.frequencies  # float64, and so are the functions; rounded once
        cos, sin = np.cos(angles).astype(f32), np.sin(angles).astype(f32)
        x = self.embedding.row(token)
        for layer in self.layers:
            x = x + self.attend(layer, rms_norm(x, layer.vectors["attn_norm"], self.eps), cos, sin)
            x = x + self.network(layer, rms_norm(x, layer.vectors[self.BEFORE_NETWORK], self.eps))
        self.position += 1
        return self.output.times(rms_norm(x, self.norm, self.eps))

    def network(self, layer: Layer, a: Array) -> Array:
        """The feed-forward network of a layer for the normalized row a."""
        w = layer.matrices
        return w["ffn_down"].times(swiglu(w["ffn_gate"].times(a), w["ffn_up"].times(a)))

    def attend(self, layer: Layer, a: Array, cos: Array, sin: Array) -> Array:
        """Store the key and the value of the normalized row a, and attend to all so far."""
        w = layer.matrices
        return w["attn_output"].times(self.heads_of(layer, w["attn_q"].times(a), a, cos, sin))

    def heads_of(self, layer: Layer, q: Array, a: Array, cos: Array, sin: Array) -> Array:
        """The results of all heads, with the queries q."""
        w, norms = layer.matrices, layer.vectors
        q, k = q.reshape(self.heads, -1), w["attn_k"].times(a).reshape(self.kv, -1)
        if "attn_q_norm" in norms:
            q, k = rms_norm(q, norms["attn_q_norm"], self.eps), rms_norm(k, norms["attn_k_norm"], self.eps)
        q, k = (rotate(x, cos, sin, self.halves) for x in (q, k))
        v = w["attn_v"].times(a).reshape(self.kv, -1)
        layer.keys = np.concatenate([layer.keys, k.astype(np.float16)[:, None]], axis=1)
        layer.values = np.concatenate([layer.values, v.astype(np.float16)[:, None]], axis=1)
        queries = (q * self.scale).reshape(self.kv, self.heads // self.kv, -1)
        return attention(queries, layer.keys.astype(f32), layer.values.astype(f32)).reshape(-1)


# --- the next token --------------------------------------------------------------------------------------------

GOLDEN = u64(0x9E3779B97F4A7C15)


def mix(z: Array) -> Array:
    """The finalizer of SplitMix64, modulo 2**64."""
    z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
    return z ^ (z >> u64(31))


def gumbel(seed: int, position: int, n: int) -> Array:
    """The noise -log(-log(1 - v)) of the tokens 0..n - 1; v in (0, 1) follows from seed, position and token."""
    key = mix(np.array([seed], u64) + np.array([position + 1], u64) * GOLDEN)
    bits = mix(key + np.arange(1, n + 1, dtype=u64) * GOLDEN) >> u64(32)
    v = np.minimum((bits | u64(1)).astype(f32) * f32(2.0**-32), f32(1 - 2.0**-24))
    return -log(-log1p(-v))


def choose(logits: Array, position: int, temperature: float = 0.0, seed: int = 0) -> int:
    """The token at a position, without filters: the largest logit, or logit / temperature + noise; ties to the lower id."""
    if temperature > 0:
        logits = logits / f32(temperature) + gumbel(seed, position, logits.size)
    return int(np.argmax(logits))


def answer(model: Model, ids: list[int], count: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
    """The ``count`` tokens that follow a prompt which is the first text of the model."""
    ids = list(ids)
    for token in ids[:-1]:
        model.step(token)
    for _ in range(count):
        ids.append(choose(model.step(ids[-1]), len(ids), temperature, seed))
    return ids[-count:]


def main() -> None:
    """Print what the bundled model writes after a prompt, greedily and with a seed."""
    file = read_gguf(Path(__file__).parents[1] / "engine" / "data" / "pycoder-dense-Q4_K_M.gguf")
    tokens: Any = file.metadata["tokenizer.ggml.tokens"]
    prompt = [tokens.index(token) for token in ("def", "Ġadd", "(a", ",", "Ġb", "):")]
    for temperature, seed in ((0.0, 0), (0.8, 7)):
        text = "".join(tokens[i] for i in answer(Model(file), prompt, 12, temperature, seed))
        print(repr(text.replace("Ġ", " ").replace("Ċ", "\n")))


if __name__ == "__main__":
    main()
