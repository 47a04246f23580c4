"""Shapes of models with latent attention: DeepSeek-V2-Lite and GLM-4.7-Flash, and small ones with an indexer."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.models.network_config import ExpertsConfig
from engine.synthetic.shape import N_VOCAB_TINY, Shape, Value


@dataclass(frozen=True)
class LatentShape(Shape):
    """deepseek2: the first layer is dense; the others have a shared network without a gate, as wide as ``n_shared`` experts.

    ``head_dim`` is the length of what is stored per position, rank + n_rot.  ``sigmoid``: the router's law is that of
    DeepSeek-V3 and GLM, else that of V2.  ``yarn``: the factor of the context's extension from 4096 positions; 0: none.
    ``index``: heads of the indexer, their size, and the positions that are chosen, of deepseek32 and glm-dsa; (0, 0, 0):
    none.  ``shared``: the number of last layers of the trunk of a glm-dsa that share the choice of the layer before them.
    """

    rank: int = 512
    n_nope: int = 128
    d_v: int = 128
    q_rank: int = 0
    n_shared: int = 1
    sigmoid: bool = True
    yarn: float = 0.0
    index: tuple[int, int, int] = (0, 0, 0)
    shared: int = 0

    @property
    def value_dim(self) -> int:
        """Elements of a value: a latent."""
        return self.rank

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        e = self.n_embd
        yield "token_embd.weight", (self.n_vocab, e)
        for layer in range(self.n_block):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (e,)
            yield from self._mixer(block, layer)
            if not self.n_layer - self.shared <= layer < self.n_layer:
                yield from self._indexer(block)
            yield block + "ffn_norm.weight", (e,)
            yield from self._feed_forward(block) if layer == 0 else self._mixture(block)
            if layer >= self.n_layer:
                yield from self._nextn(block)
        yield "output_norm.weight", (e,)
        yield "output.weight", (self.n_vocab, e)

    def _mixer(self, block: str, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The mixer of a layer: latent attention."""
        e, heads = self.n_embd, self.n_head
        q = heads * (self.n_nope + self.n_rot)
        if self.q_rank:
            yield block + "attn_q_a.weight", (self.q_rank, e)
            yield block + "attn_q_a_norm.weight", (self.q_rank,)
            yield block + "attn_q_b.weight", (q, self.q_rank)
        else:
            yield block + "attn_q.weight", (q, e)
        yield block + "attn_kv_a_mqa.weight", (self.head_dim, e)
        yield block + "attn_kv_a_norm.weight", (self.rank,)
        yield block + "attn_k_b.weight", (heads, self.rank, self.n_nope)
        yield block + "attn_v_b.weight", (heads, self.d_v, self.rank)
        yield block + "attn_output.weight", (e, heads * self.d_v)

    def _mixture(self, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        e, mix = self.n_embd, self.experts
        assert mix is not None
        yield block + "ffn_gate_inp.weight", (mix.n_expert, e)
        if self.sigmoid:
            yield block + "exp_probs_b.bias", (mix.n_expert,)
        for name, wide in (("gate", True), ("up", True), ("down", False)):
            n, shared = mix.n_ff, mix.n_ff * self.n_shared
            yield f"{block}ffn_{name}_exps.weight", (mix.n_expert, *((n, e) if wide else (e, n)))
            yield f"{block}ffn_{name}_shexp.weight", (shared, e) if wide else (e, shared)

    def _indexer(self, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        n, d, top_k = self.index
        if top_k:
            yield block + "indexer.attn_q_b.weight", (n * d, self.q_rank)
            yield block + "indexer.attn_k.weight", (d, self.n_embd)
            yield block + "indexer.k_norm.weight", (d,)
            yield block + "indexer.k_norm.bias", (d,)
            yield block + "indexer.proj.weight", (n, self.n_embd)

    def metadata(self) -> dict[str, Value]:
        """The sizes of heads, the router, the extension of the context, and which layers are dense or draft."""
        found: dict[str, Value] = {
            "attention.kv_lora_rank": self.rank,
            "attention.key_length_mla": self.n_nope + self.n_rot,
            "attention.value_length_mla": self.d_v,
            "leading_dense_block_count": 1,
            "expert_shared_count": self.n_shared,
            "expert_gating_func": 2 if self.sigmoid else 1,
            "expert_weights_norm": self.sigmoid,
            "expert_weights_scale": 1.8 if self.sigmoid else 1.0,
            "nextn_predict_layers": self.n_mtp,
        }
        if self.q_rank:
            found["attention.q_lora_rank"] = self.q_rank
        if self.index[2]:
            names = ("head_count", "key_length", "top_k")
            found |= {f"attention.indexer.{name}": n for name, n in zip(names, self.index, strict=True)}
        if self.shared:
            found["attention.indexer.types"] = [il < self.n_layer - self.shared for il in range(self.n_layer)]
        if self.yarn:
            found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": self.yarn}
            found |= {"rope.scaling.original_context_length": 4096, "rope.scaling.yarn_log_multiplier": 0.0707}
        return found


# Layers, width, heads, KV heads, what a position stores, feed-forward, vocabulary, context, RoPE base, epsilon.
# fmt: off
LATENTS: dict[str, Shape] = {
    "deepseek-v2-lite": LatentShape(
        "deepseek2", 27, 2048, 16, 1, 576, 10944, 102400, 163840, 1e4, 1e-6, tied=False, n_rot=64,
        experts=ExpertsConfig(64, 6, 1408), n_shared=2, sigmoid=False, yarn=40.0,
    ),
    "glm-4.7-flash": LatentShape(
        "deepseek2", 47, 2048, 20, 1, 576, 10240, 154880, 202752, 1e6, 1e-5, tied=False, n_rot=64, n_mtp=1,
        experts=ExpertsConfig(64, 4, 1536), n_nope=192, d_v=256, q_rank=768,
    ),
    # Three heads, seven experts, and latents of the queries.
    "tiny-deepseek2": LatentShape(
        "deepseek2", 3, 256, 3, 1, 96, 512, N_VOCAB_TINY, 512, 1e5, 1e-5, tied=False, n_rot=32, n_mtp=1,
        experts=ExpertsConfig(7, 3, 256), rank=64, n_nope=64, d_v=32, q_rank=128,
    ),
    # An indexer that leaves positions out of a short text.
    "tiny-deepseek32": LatentShape(
        "deepseek32", 3, 256, 3, 1, 96, 512, N_VOCAB_TINY, 512, 1e5, 1e-5, tied=False, n_rot=32, n_mtp=1,
        experts=ExpertsConfig(7, 3, 256), rank=64, n_nope=64, d_v=32, q_rank=128, index=(5, 64, 70),
    ),
    # The last two layers share a choice.
    "tiny-glm-dsa": LatentShape(
        "glm-dsa", 3, 256, 3, 1, 96, 512, N_VOCAB_TINY, 512, 1e5, 1e-5, tied=False, n_rot=32, n_mtp=1,
        experts=ExpertsConfig(7, 3, 256), rank=64, n_nope=64, d_v=32, q_rank=128, index=(5, 64, 70), shared=2,
    ),
}
# fmt: on
