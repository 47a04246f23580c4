"""What a budget of positions keeps, and the logits after it, against a llama of two layers in float64."""

from pathlib import Path

import numpy as np

import engine
from engine.cache.thinning import kept_chunks
from engine.gguf.file import read_gguf
from engine.models.attention_config import AttentionConfig
from engine.synthetic.model import make_model

N, BUDGET, STEPS = 446, 256, 3
"""The last two steps are in a new page."""


class Llama:
    """A llama in float64, from its file: every key and value of each layer stays where it is, and a list of positions says
    which of them are seen."""

    def __init__(self, path: Path, n_layer: int, n_head: int, n_head_kv: int, d: int, base: float, eps: float) -> None:
        tensors = read_gguf(path).tensors
        self.w = {
            name: tensor.data.view(np.float32).reshape(tensor.shape).astype(np.float64)
            for name, tensor in tensors.items()
        }
        self.n_layer, self.n_head, self.n_head_kv, self.d, self.eps = n_layer, n_head, n_head_kv, d, eps
        factors = self.w.get("rope_freqs.weight", np.ones(d // 2))
        self.angle = base ** (-2 * np.arange(d // 2) / d) / factors
        self.keys: list[list[np.ndarray]] = [[] for _ in range(n_layer)]
        self.values: list[list[np.ndarray]] = [[] for _ in range(n_layer)]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + self.eps) * self.w[name]

    def rotated(self, x: np.ndarray, position: int) -> np.ndarray:
        cos, sin = np.cos(position * self.angle), np.sin(position * self.angle)
        a, b = x[:, 0::2], x[:, 1::2]
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)

    def read(self, token: int, position: int, seen: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits after a token that sees the positions ``seen`` and its own, and its weights, [layers * heads, seen + 1]."""
        x, weights = self.w["token_embd.weight"][token], []
        for il in range(self.n_layer):
            a = self.norm(x, f"blk.{il}.attn_norm.weight")
            q, k, v = (self.w[f"blk.{il}.attn_{name}.weight"] @ a for name in "qkv")
            q, k = (self.rotated(t.reshape(-1, self.d), position) for t in (q, k))
            self.keys[il].append(k)
            self.values[il].append(v.reshape(-1, self.d))
            at = [*seen, position]
            of = np.arange(self.n_head) // (self.n_head // self.n_head_kv)
            keys, values = (np.array(memory[il])[at][:, of] for memory in (self.keys, self.values))
            scores = np.einsum("hd,thd->ht", q, keys) / np.sqrt(self.d)
            p = np.exp(scores - scores.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            weights.append(p)
            x = x + self.w[f"blk.{il}.attn_output.weight"] @ np.einsum("ht,thd->hd", p, values).reshape(-1)
            b = self.norm(x, f"blk.{il}.ffn_norm.weight")
            gate, up = (self.w[f"blk.{il}.ffn_{name}.weight"] @ b for name in ("gate", "up"))
            x = x + self.w[f"blk.{il}.ffn_down.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        head = self.w.get("output.weight", self.w["token_embd.weight"])
        return head @ self.norm(x, "output_norm.weight"), np.concatenate(weights)


def test_against_float64(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m.gguf", "tiny-llama", "F32", seed=1)
    ids = np.random.default_rng(7).integers(0, 280, N).tolist()
    with engine.load(path, n_ctx=512, device="cpu", cache_type="f32", kv_budget=BUDGET) as llm:
        config, rows = llm.config, []
        answer = llm.generate(ids, max_tokens=STEPS + 1, temperature=0, ignore_eos=True, logprobs=1)
        next(answer)
        sequence = llm.slots[0].sequence
        (held,) = (sequence.pages(paging) for paging in llm.model.cache.pools)
        kept, masses = list(held), llm.model.masses(sequence)
        for _ in answer:
            pass
        rows = [entry.logprob for entry in answer.logprobs]
    mixer = config.layers[0].mixer
    assert isinstance(mixer, AttentionConfig) and mixer.rope is not None
    reference = Llama(path, config.n_layer, mixer.n_head, mixer.n_head_kv, mixer.d_k, mixer.rope.base, config.norm_eps)
    expected = np.zeros(7)
    for position, token in enumerate(ids):
        logits, weights = reference.read(token, position, list(range(position)))
        if position >= N - 64:
            for chunk in range(7):
                expected[chunk] += (weights[:, 64 * chunk : 64 * chunk + 64].sum(1) ** 2).sum()
    # The terms are rounded to 2^-17, 64 rows of all heads of all layers.
    assert np.abs(masses[:7] / 2**17 - expected).max() < 1e-3 * expected.max()
    stays = kept_chunks(np.round(expected * 2**17).astype(np.int64), N, BUDGET)
    assert stays[0] == 0 and stays[-2:] == [5, 6] and len(stays) == 4
    assert kept[:4] == stays
    # The third one is chosen by a clear margin.
    others = np.sort(expected[1:5])
    assert others[-1] - others[-2] > 1e-3 * expected.max()
    seen = [p for chunk in stays for p in range(64 * chunk, min(64 * chunk + 64, N))]
    for step, token in enumerate(answer.ids):
        logprob = logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert abs(rows[step] - logprob) < 1e-4
        logits, _ = reference.read(token, N + step, seen)
        seen.append(N + step)
    # All positions give other values.
    for memory in (*reference.keys, *reference.values):
        memory.pop()
    whole, _ = reference.read(answer.ids[-1], N + STEPS, list(range(N + STEPS)))
    assert np.abs(whole - logits).max() > 1e-2
