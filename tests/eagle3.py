"""Random networks of EAGLE-3, and the target and network in float64, from llama.cpp's ``llama.cpp`` and ``eagle3.cpp``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.gguf.file import read_gguf
from tests.families import rewritten
from tests.oracle.shared import finish, llama3_factors, uniform

Tensors = dict[str, np.ndarray]


@dataclass
class Network:
    """The sizes of a network.  n_draft: rows of its output, 0: those of the target's vocabulary, with the target's output;
    own_embedding: whether it has an embedding of its own; lends_output: whether the target's output is used."""

    target_width: int
    n_vocab: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    taps: tuple[int, ...]
    n_draft: int = 0
    own_embedding: bool = False
    lends_output: bool = False
    normed_sum: bool = False
    norm_before_fc: bool = False
    llama3: bool = False
    scale: int = 8
    base: float = 10000.0
    eps: float = 1e-5
    name: str = "eagle3"
    changes: Tensors = field(default_factory=dict)

    def tensors(self) -> Tensors:
        """float32, and the tokens of the output's rows, int64."""
        e, q, kv = self.n_embd, self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (e, len(self.taps) * self.target_width),
            "blk.0.attn_q.weight": (q, 2 * e),
            "blk.0.attn_k.weight": (kv, 2 * e),
            "blk.0.attn_v.weight": (kv, 2 * e),
            "blk.0.attn_output.weight": (e, q),
            "blk.0.ffn_gate.weight": (self.n_ff, e),
            "blk.0.ffn_up.weight": (self.n_ff, e),
            "blk.0.ffn_down.weight": (e, self.n_ff),
            **{f"blk.0.{name}.weight": (e,) for name in ("attn_norm", "attn_norm_2", "ffn_norm")},
            "output_norm.weight": (e,),
        }
        if not self.lends_output:
            shapes["output.weight"] = (self.n_draft or self.n_vocab, e)
        if self.own_embedding:
            shapes["token_embd.weight"] = (self.n_vocab, e)
        if self.norm_before_fc:
            shapes["enc.output_norm.weight"] = (len(self.taps) * self.target_width,)
        found = {
            name: uniform(self.name, name, shape, 0.3 if len(shape) == 1 else shape[-1] ** -0.5, float(len(shape) == 1))
            for name, shape in shapes.items()
        }
        if self.n_draft:
            rng = np.random.default_rng(self.n_draft)
            found["d2t"] = np.sort(rng.permutation(self.n_vocab)[: self.n_draft]).astype(np.int64)
        if self.llama3:
            found["rope_freqs.weight"] = llama3_factors(self.scaling, self.base, self.head_dim)
        return found | self.changes

    @property
    def scaling(self) -> dict[str, Any]:
        """Llama 3's scaling of frequencies."""
        return {
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "factor": self.scale,
            "original_max_position_embeddings": 64,
        }

    def write(self, path: Path, **keys: Any) -> Path:
        """The file as llama.cpp's conversion writes it; keys: other values of its keys."""
        writer = gguf.GGUFWriter(path, "eagle3")
        numbers = {
            "block_count": 1,
            "context_length": 512,
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.freq_base": self.base,
            "rope.dimension_count": self.head_dim,
            "attention.layer_norm_rms_epsilon": self.eps,
            "target_hidden_size": self.target_width,
            "target_layers": list(self.taps),
            "norm_before_residual": self.normed_sum,
            "norm_before_fc": self.norm_before_fc,
        }
        for key, value in (numbers | keys).items():
            kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            kinds.get(type(value), writer.add_array)(f"eagle3.{key}", value)
        return finish(writer, self.tensors(), path)


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    normed: np.ndarray = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
    return normed


def rotate(x: np.ndarray, positions: np.ndarray, base: float, factors: np.ndarray | float = 1.0) -> np.ndarray:
    """Pairs (2i, 2i + 1) of x [rows, heads, n]."""
    n = x.shape[-1]
    angles = positions[:, None] * base ** (-np.arange(0, n, 2) / n) / factors
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., ::2], x[..., 1::2]
    return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention of [rows, heads, n], with fewer heads of k and v: [rows, heads * n]."""
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("thd,shd->hts", q, np.repeat(k, group, axis=1)) / np.sqrt(q.shape[-1])
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, np.repeat(v, group, axis=1)).reshape(len(q), -1)


def network(x: np.ndarray, w: Tensors, blk: str) -> np.ndarray:
    """SwiGLU."""
    gate, up = x @ w[blk + "ffn_gate.weight"].T, x @ w[blk + "ffn_up.weight"].T
    return (gate / (1 + np.exp(-gate)) * up) @ w[blk + "ffn_down.weight"].T


@dataclass
class Target:
    """A llama model of float32 in float64."""

    path: Path

    def __post_init__(self) -> None:
        gguf_file = read_gguf(self.path)
        keys = {name.removeprefix("llama."): value for name, value in gguf_file.metadata.items()}
        self.n_layer, self.n_head = int(str(keys["block_count"])), int(str(keys["attention.head_count"]))
        self.n_head_kv = int(str(keys["attention.head_count_kv"]))
        self.base, self.eps = float(str(keys["rope.freq_base"])), float(str(keys["attention.layer_norm_rms_epsilon"]))
        self.w: Tensors = {
            name: tensor.data.view(np.float32).reshape(tensor.shape).astype(float)
            for name, tensor in gguf_file.tensors.items()
        }
        self.output = self.w.get("output.weight", self.w["token_embd.weight"])

    def inputs(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """The residual stream before each layer, and after the last one: [tokens, n_embd] each."""
        x, w, at = self.w["token_embd.weight"][list(tokens)], self.w, np.arange(len(tokens))
        factors = w.get("rope_freqs.weight", np.ones(1))
        found = []
        for il in range(self.n_layer):
            found.append(x)
            blk = f"blk.{il}."
            a = rms(x, w[blk + "attn_norm.weight"], self.eps)
            q, k, v = ((a @ w[f"{blk}attn_{n}.weight"].T).reshape(len(a), -1, a.shape[1] // self.n_head) for n in "qkv")
            q, k = rotate(q, at, self.base, factors), rotate(k, at, self.base, factors)
            x = x + attend(q, k, v) @ w[blk + "attn_output.weight"].T
            x = x + network(rms(x, w[blk + "ffn_norm.weight"], self.eps), w, blk)
        return [*found, x]


def drafts(target: Target, net: Network, tokens: Sequence[int], chain: Sequence[int]) -> list[np.ndarray]:
    """The logits of a chain of drafts after ``tokens``, of which the last one is the certain one: those after it, and those
    after each token of ``chain``.  As in ``speculative.cpp``, the pair of g of position P and the token of P + 1 is at P."""
    w = {name: weight.astype(float) for name, weight in net.tensors().items()}
    embedding = w.get("token_embd.weight", target.w["token_embd.weight"])
    streams = target.inputs(tokens[:-1])
    joined = np.concatenate([streams[il] for il in net.taps], axis=1)
    if net.norm_before_fc:
        joined = rms(joined, w["enc.output_norm.weight"], net.eps)
    g = joined @ w["fc.weight"].T
    known, found = list(tokens), []
    for token in [*chain, None]:
        e = rms(embedding[known[1:]], w["blk.0.attn_norm.weight"], net.eps)
        normed = rms(g, w["blk.0.attn_norm_2.weight"], net.eps)
        x, at = np.concatenate([e, normed], axis=1), np.arange(len(e))
        q, k, v = ((x @ w[f"blk.0.attn_{n}.weight"].T).reshape(len(x), -1, net.head_dim) for n in "qkv")
        factors = w.get("rope_freqs.weight", np.ones(1))
        o = attend(rotate(q, at, net.base, factors), rotate(k, at, net.base, factors), v)
        y = (normed if net.normed_sum else g) + o @ w["blk.0.attn_output.weight"].T
        y = y + network(rms(y, w["blk.0.ffn_norm.weight"], net.eps), w, "blk.0.")
        logits = rms(y[-1], w["output_norm.weight"], net.eps) @ w.get("output.weight", target.output).T
        if net.n_draft:
            logits, own = np.full(net.n_vocab, -np.inf), logits
            logits[net.tensors()["d2t"]] = own
        found.append(logits)
        if token is not None:
            known.append(token)
            g = np.concatenate([g, y[-1:]])
    return found


def agreeing(target: Path, folder: Path) -> tuple[Path, Path]:
    """A target and a network that often agree, since what follows a token depends mostly on the token: in the target,
    embeddings are large beside what layers add; in the network, attention passes the embedding of the token itself on."""

    def louder(tensors: Tensors) -> Tensors:
        return tensors | {"token_embd.weight": tensors["token_embd.weight"] * np.float32(3)}

    changed = rewritten(target, folder / "target.gguf", louder)
    w = Target(changed).w
    n_vocab, n = w["token_embd.weight"].shape
    net = Network(n, n_vocab, n, n // 32, n // 32, 32, 96, (0, 1, 2), lends_output="output.weight" not in w)
    own, eye = net.tensors(), np.eye(n, dtype=np.float32)
    itself = np.concatenate([eye, 0 * eye], axis=1)
    net.changes = {
        f"blk.0.attn_{name}.weight": itself * np.float32(factor) for name, factor in (("q", 3), ("k", 1), ("v", 1))
    }
    net.changes |= {"blk.0.attn_output.weight": eye, "output_norm.weight": w["output_norm.weight"].astype(np.float32)}
    net.changes["blk.0.attn_norm.weight"] = np.ones(n, np.float32)
    for name, factor in (("fc", 0.1), ("blk.0.ffn_down", 0.1)):
        net.changes[f"{name}.weight"] = own[f"{name}.weight"] * np.float32(factor)
    if not net.lends_output:
        net.changes["output.weight"] = w["output.weight"].astype(np.float32)
    return changed, net.write(folder / "network.gguf")
