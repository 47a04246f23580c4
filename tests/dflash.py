"""Random networks of DFlash and DSpark, and their drafts in float64, written from llama.cpp's ``dflash.cpp``."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.eagle3 import Target, Tensors, network, rms
from tests.families import rewritten
from tests.oracle.shared import finish, uniform


@dataclass
class Network:
    """The sizes of a network.

    size: the key ``block_size``.
    rank: that of the Markov head, 0: there is none.
    judged: whether there is a confidence head.
    from_anchor: whether the row of the last sampled token predicts the token after it.
    windows: of each layer, 0: none.
    keys_are_values: whether there is no matrix of values.
    normed: whether results are normalized before they are added.
    scales: factors of the results of the layers.
    partial: how many pairs of a head are rotated, 0: all.
    n_draft: rows of the output, 0: those of the target's vocabulary.
    """

    n_vocab: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    taps: tuple[int, ...]
    n_layer: int = 2
    size: int = 8
    rank: int = 0
    judged: bool = False
    from_anchor: bool = True
    causal: bool = False
    windows: tuple[int, ...] = ()
    sinks: bool = False
    keys_are_values: bool = False
    normed: bool = False
    scales: tuple[float, ...] = ()
    n_draft: int = 0
    own_embedding: bool = False
    lends_output: bool = True
    gelu: bool = False
    attention_scale: float = 0.0
    value_scale: float = 0.0
    embedding_scale: float = 0.0
    partial: int = 0
    base: float = 10000.0
    eps: float = 1e-5
    name: str = "dflash"
    changes: Tensors = field(default_factory=dict)

    @property
    def mask(self) -> int:
        """The mask token."""
        return self.n_vocab - 1

    @property
    def first(self) -> int:
        """The first row of a block that predicts a draft."""
        return 0 if self.rank and self.from_anchor else 1

    def tensors(self) -> Tensors:
        """float32, and the tokens of the output's rows, int64."""
        e, q, kv = self.n_embd, self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (e, len(self.taps) * e),
            "enc.output_norm.weight": (e,),
            "output_norm.weight": (e,),
        }
        for il in range(self.n_layer):
            blk = f"blk.{il}."
            shapes |= {
                blk + "attn_q.weight": (q, e),
                blk + "attn_k.weight": (kv, e),
                blk + "attn_v.weight": (kv, e),
                blk + "attn_output.weight": (e, q),
                blk + "attn_q_norm.weight": (self.head_dim,),
                blk + "attn_k_norm.weight": (self.head_dim,),
                blk + "attn_norm.weight": (e,),
                blk + "ffn_norm.weight": (e,),
                blk + "ffn_gate.weight": (self.n_ff, e),
                blk + "ffn_up.weight": (self.n_ff, e),
                blk + "ffn_down.weight": (e, self.n_ff),
            }
            if self.keys_are_values:
                del shapes[blk + "attn_v.weight"]
            if self.sinks:
                shapes[blk + "attn_sinks.weight"] = (self.n_head,)
            if self.normed:
                shapes |= {f"{blk}{name}.weight": (e,) for name in ("post_attention_norm", "post_ffw_norm")}
        rows = self.n_draft or self.n_vocab
        if not self.lends_output:
            shapes["output.weight"] = (rows, e)
        if self.own_embedding:
            shapes["token_embd.weight"] = (self.n_vocab, e)
        if self.rank:
            shapes |= {"markov_w1.weight": (self.n_vocab, self.rank), "markov_w2.weight": (rows, self.rank)}
        if self.judged:
            shapes |= {"conf_proj.weight": (1, e + self.rank), "conf_proj.bias": (1,)}
        found = {
            name: uniform(self.name, name, shape, 0.3 if len(shape) == 1 else shape[-1] ** -0.5, float(len(shape) == 1))
            for name, shape in shapes.items()
        }
        for il, scale in enumerate(self.scales):
            found[f"blk.{il}.layer_output_scale.weight"] = np.full(1, scale, np.float32)
        if self.partial:
            found["rope_freqs.weight"] = self.factors.astype(np.float32)
        if self.n_draft:
            rng = np.random.default_rng(self.n_draft)
            found["d2t"] = np.sort(rng.permutation(self.n_vocab)[: self.n_draft]).astype(np.int64)
        return found | self.changes

    @property
    def factors(self) -> np.ndarray:
        """The divisors of the frequencies: [head_dim / 2]."""
        pairs = np.arange(self.head_dim // 2)
        return np.where(pairs < (self.partial or pairs.size), 1, 1e30)

    def write(self, path: Path, **keys: Any) -> Path:
        """The file as llama.cpp's conversion writes it; keys: other values of its keys, None: without the key."""
        writer = gguf.GGUFWriter(path, "dflash")
        numbers: dict[str, Any] = {
            "block_count": self.n_layer,
            "context_length": 512,
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "rope.freq_base": self.base,
            "attention.layer_norm_rms_epsilon": self.eps,
            "target_layers": list(self.taps),
            "block_size": self.size,
        }
        if self.rank:
            numbers |= {"sample_from_anchor": self.from_anchor, "has_confidence_head": self.judged}
        if self.causal:
            numbers["attention.causal"] = True
        if self.windows:
            numbers["attention.sliding_window"] = max(self.windows)
            numbers["attention.sliding_window_pattern"] = [bool(window) for window in self.windows]
        if self.gelu:
            numbers["hidden_activation"] = "gelu_pytorch_tanh"
        factors = {"attention.scale": self.attention_scale, "attention.value_scale": self.value_scale}
        factors["embedding_scale"] = self.embedding_scale
        numbers |= {key: value for key, value in factors.items() if value}
        for key, value in (numbers | keys).items():
            kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            if value is not None:
                kinds.get(type(value), writer.add_array)(f"dflash.{key}", value)
        writer.add_mask_token_id(self.mask)
        return finish(writer, self.tensors(), path)


def rotate(x: np.ndarray, positions: np.ndarray, net: Network) -> np.ndarray:
    """Pairs (i, i + n / 2) of x [rows, heads, n]."""
    n = x.shape[-1]
    angles = positions[:, None] * net.base ** (-np.arange(0, n, 2) / n) / net.factors
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., : n // 2], x[..., n // 2 :]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def geglu(x: np.ndarray, w: Tensors, blk: str) -> np.ndarray:
    """The network with the tanh approximation of GELU."""
    gate, up = x @ w[blk + "ffn_gate.weight"].T, x @ w[blk + "ffn_up.weight"].T
    gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return (gelu * up) @ w[blk + "ffn_down.weight"].T


@dataclass
class Block:
    """A block after ``tokens``, of which the last one is the certain one: its normalized outputs and its logits, of the rows
    that predict drafts."""

    net: Network
    certain: int
    outputs: np.ndarray
    logits: np.ndarray
    w: Tensors

    def draft(self, i: int, before: int) -> np.ndarray:
        """The logits of draft i, which follows the token ``before``; -inf for tokens that cannot be drafted."""
        logits = self.logits[i]
        if self.net.rank:
            logits = logits + self.w["markov_w2.weight"] @ self.w["markov_w1.weight"][before]
        if not self.net.n_draft:
            return logits
        found = np.full(self.net.n_vocab, -np.inf)
        found[self.net.tensors()["d2t"]] = logits
        return found

    def confidence(self, i: int, before: int) -> float:
        """The predicted probability that draft i is kept."""
        given = np.concatenate([self.outputs[i], self.w["markov_w1.weight"][before]])
        return float(1 / (1 + np.exp(-(self.w["conf_proj.weight"][0] @ given + self.w["conf_proj.bias"][0]))))


def block(target: Target, net: Network, tokens: Sequence[int], count: int) -> Block:
    """The block that drafts ``count`` tokens.

    A window begins for all rows where it begins for the last one that a row sees; in llama.cpp it begins for each row behind
    its own position, which is a few positions earlier.
    """
    w = {name: weight.astype(float) for name, weight in net.tensors().items()}
    embedding = w.get("token_embd.weight", target.w["token_embd.weight"])
    streams = target.inputs(tokens[:-1])
    joined = np.concatenate([streams[il] for il in net.taps], axis=1)
    g = rms(joined @ w["fc.weight"].T, w["enc.output_norm.weight"], net.eps)
    n, rows = len(tokens) - 1, count + net.first
    x = embedding[[tokens[-1]] + [net.mask] * (rows - 1)] * (net.embedding_scale or 1)
    at = np.arange(n + rows)
    last = at[n:] if net.causal else np.full(rows, n + rows - 1)
    scale = net.attention_scale or net.head_dim**-0.5
    for il in range(net.n_layer):
        blk, group = f"blk.{il}.", net.n_head // net.n_head_kv
        a = rms(x, w[blk + "attn_norm.weight"], net.eps)
        both = np.concatenate([g, a])
        q = (a @ w[blk + "attn_q.weight"].T).reshape(rows, -1, net.head_dim)
        k = (both @ w[blk + "attn_k.weight"].T).reshape(n + rows, -1, net.head_dim)
        if net.keys_are_values:
            v = rms(k, np.ones(net.head_dim), net.eps)
        else:
            v = (both @ w[blk + "attn_v.weight"].T).reshape(n + rows, -1, net.head_dim)
        q = rotate(rms(q, w[blk + "attn_q_norm.weight"], net.eps), at[n:], net)
        k = rotate(rms(k, w[blk + "attn_k_norm.weight"], net.eps), at, net)
        scores = np.einsum("thd,shd->hts", q, np.repeat(k, group, axis=1)) * scale
        window = net.windows[il] if net.windows else 0
        hidden = (at > last[:, None]) | ((at <= last[:, None] - window) if window else False)
        scores[:, hidden] = -np.inf
        if net.sinks:
            sinks = np.broadcast_to(w[blk + "attn_sinks.weight"][:, None, None], (net.n_head, rows, 1))
            scores = np.concatenate([scores, sinks], axis=2)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p = (p / p.sum(axis=-1, keepdims=True))[..., : n + rows]
        o = np.einsum("hts,shd->thd", p, np.repeat(v, group, axis=1)).reshape(rows, -1) * (net.value_scale or 1)
        o = o @ w[blk + "attn_output.weight"].T
        x = x + (rms(o, w[blk + "post_attention_norm.weight"], net.eps) if net.normed else o)
        b = rms(x, w[blk + "ffn_norm.weight"], net.eps)
        f = geglu(b, w, blk) if net.gelu else network(b, w, blk)
        x = x + (rms(f, w[blk + "post_ffw_norm.weight"], net.eps) if net.normed else f)
        x = x * (net.scales[il] if net.scales else 1)
    y = rms(x, w["output_norm.weight"], net.eps)
    head = w["output.weight"] if not net.lends_output else embedding if net.own_embedding else target.output
    return Block(net, tokens[-1], y[net.first :], (y @ head.T)[net.first :], w)


def agreeing(target: Path, folder: Path) -> tuple[Path, Path]:
    """A target and a network of DSpark that often agree, since what follows a token depends mostly on the token: in the
    target, embeddings are large beside what layers add; the Markov head computes the logits of the token before."""

    def louder(tensors: Tensors) -> Tensors:
        return tensors | {"token_embd.weight": tensors["token_embd.weight"] * np.float32(3)}

    changed = rewritten(target, folder / "target.gguf", louder)
    w = Target(changed).w
    embedding = w["token_embd.weight"]
    n_vocab, n = embedding.shape
    net = Network(n_vocab, n, n // 32, n // 32, 32, 96, (0, 1, 2), rank=n)
    passed_on = rms(embedding, w["output_norm.weight"], 1e-5).astype(np.float32)
    net.changes = {
        "markov_w1.weight": passed_on,
        "markov_w2.weight": w.get("output.weight", embedding).astype(np.float32),
    }
    net.changes["output_norm.weight"] = net.tensors()["output_norm.weight"] * np.float32(0.01)
    return changed, net.write(folder / "network.gguf")
