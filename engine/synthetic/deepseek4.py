"""Shapes of DeepSeek-V4, and of its layer that drafts, with the formats of ds4's files."""

from collections.abc import Iterator
from dataclasses import dataclass

from gguf import GGMLQuantizationType as T

from engine.models.network_config import ExpertsConfig
from engine.synthetic.shape import N_VOCAB_TINY, Shape, Value

LARGE = 128
"""The ratio of layers that see all of their compressed rows."""

_FLOATS = ("_fn", "_compressor_kv", "_compressor_gate", "_ape", "indexer.proj", "indexer.attn_q_b", "ffn_gate_inp")
"""How the names of matrices end that ds4 stores in float16."""


@dataclass(frozen=True)
class DeepSeek4Shape(Shape):
    """DeepSeek-V4: the first two layers see a window, then those with an indexer and those of ``large`` tokens a row
    alternate; in the first ``n_hash`` layers a table gives the experts.

    n_q: the width from which queries are made; n_group, n_out: groups of the output, and the width of each.
    indexer: heads, their size, and the rows that are chosen.
    drafts: this is the file of the layer that drafts, in ds4's layout.
    """

    n_q: int = 1024
    n_group: int = 8
    n_out: int = 1024
    indexer: tuple[int, int, int] = (64, 128, 512)
    n_hash: int = 3
    large: int = LARGE
    drafts: bool = False

    @property
    def ratios(self) -> list[int]:
        """The ratio of each layer."""
        return [0 if il < 2 else self.large if il % 2 else 4 for il in range(self.n_layer)]

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        e = self.n_embd
        if self.drafts:
            for name in ("e_proj", "h_proj"):
                yield f"mtp.0.{name}.weight", (e, e)
            for name in ("enorm", "hnorm", "norm"):
                yield f"mtp.0.{name}.weight", (e,)
            yield from self._streams("mtp.0.hc_head", 4, 1)
            yield from self._layer("mtp.0.", 0, False)
            return
        yield "token_embd.weight", (self.n_vocab, e)
        for il, ratio in enumerate(self.ratios):
            yield from self._layer(f"blk.{il}.", ratio, il < self.n_hash)
        yield from self._streams("output_hc", 4, 1)
        yield "output_norm.weight", (e,)
        yield "output.weight", (self.n_vocab, e)

    def _streams(self, name: str, rows: int, n_scale: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}_fn.weight", (rows, 4 * self.n_embd)
        yield f"{name}_base.weight", (rows,)
        yield f"{name}_scale.weight", (n_scale,)

    def _layer(self, block: str, ratio: int, hashed: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        e, d, mix = self.n_embd, self.head_dim, self.experts
        n_index, d_index, _ = self.indexer
        assert mix is not None
        yield from self._streams(block + "hc_attn", 24, 3)
        yield block + "attn_norm.weight", (e,)
        yield block + "attn_q_a.weight", (self.n_q, e)
        yield block + "attn_q_a_norm.weight", (self.n_q,)
        yield block + "attn_q_b.weight", (self.n_head * d, self.n_q)
        yield block + "attn_kv.weight", (d, e)
        yield block + "attn_kv_a_norm.weight", (d,)
        yield block + "attn_sinks.weight", (self.n_head,)
        yield block + "attn_output_a.weight", (self.n_group * self.n_out, self.n_head * d // self.n_group)
        yield block + "attn_output_b.weight", (e, self.n_group * self.n_out)
        overlap = 2 if ratio == 4 else 1
        kinds = [("attn_compressor", d)] if ratio else []
        if ratio == 4:
            kinds.append(("indexer_compressor", d_index))
            yield block + "indexer.attn_q_b.weight", (n_index * d_index, self.n_q)
            yield block + "indexer.proj.weight", (n_index, e)
        for name, width in kinds:
            yield f"{block}{name}_kv.weight", (overlap * width, e)
            yield f"{block}{name}_gate.weight", (overlap * width, e)
            yield f"{block}{name}_ape.weight", (ratio, overlap * width)
            yield f"{block}{name}_norm.weight", (width,)
        yield from self._streams(block + "hc_ffn", 24, 3)
        yield block + "ffn_norm.weight", (e,)
        yield block + "ffn_gate_inp.weight", (mix.n_expert, e)
        if hashed:
            yield block + "ffn_gate_tid2eid.weight", (self.n_vocab, mix.n_used)
        else:
            yield block + "exp_probs_b.bias", (mix.n_expert,)
        for name, rows, columns in (("gate", mix.n_ff, e), ("up", mix.n_ff, e), ("down", e, mix.n_ff)):
            yield f"{block}ffn_{name}_exps.weight", (mix.n_expert, rows, columns)
            yield f"{block}ffn_{name}_shexp.weight", (rows, columns)

    def metadata(self) -> dict[str, Value]:
        """Attention, routers and hyper-connections; YaRN from a 16th of the context."""
        heads, width, top_k = self.indexer
        return {
            "embedding_length_out": 4 * self.n_embd,
            "attention.q_lora_rank": self.n_q,
            "attention.output_group_count": self.n_group,
            "attention.output_lora_rank": self.n_out,
            "attention.compress_ratios": self.ratios,
            "attention.compress_rope_freq_base": 160000.0,
            "attention.indexer.head_count": heads,
            "attention.indexer.key_length": width,
            "attention.indexer.top_k": top_k,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 16.0,
            "rope.scaling.original_context_length": self.n_ctx // 16,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "expert_shared_count": 1,
            "expert_gating_func": 4,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "hash_layer_count": self.n_hash,
            "swiglu_clamp_exp": [10.0] * self.n_layer,
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 20,
            "hyper_connection.epsilon": 1e-6,
        }

    def format_of(self, part: str, main: T) -> T | None:
        """ds4's formats: float16 for what mixes streams, compresses and routes, Q8_0 for the rest but the experts; IQ2_XXS
        has Q2_K where experts go down."""
        if part == "token_embd" or part.endswith(_FLOATS):
            return T.F16
        if not part.endswith("_exps"):
            return T.Q8_0
        return T.Q2_K if main == T.IQ2_XXS and part == "ffn_down_exps" else main


_FLASH = ("deepseek4", 43, 4096, 64, 1, 512, 0, 129280, 1048576, 1e4, 1e-6)
_TINY = ("deepseek4", 5, 128, 9, 1, 64, 0, N_VOCAB_TINY, 512, 1e4, 1e-6)

# fmt: off
DEEPSEEK4: dict[str, Shape] = {
    "deepseek-v4-flash": DeepSeek4Shape(
        *_FLASH, tied=False, window=128, n_rot=64, experts=ExpertsConfig(256, 6, 2048),
    ),
    "deepseek-v4-flash-mtp": DeepSeek4Shape(
        *_FLASH, tied=False, window=128, n_rot=64, experts=ExpertsConfig(256, 6, 2048), drafts=True,
    ),
    # A window that a short prompt exceeds, a choice of few rows, and blocks of eight tokens.
    "tiny-deepseek4": DeepSeek4Shape(
        *_TINY, tied=False, window=24, n_rot=16, experts=ExpertsConfig(7, 3, 256), n_q=64, n_group=3, n_out=32,
        indexer=(6, 32, 8), n_hash=2, large=8,
    ),
    "tiny-deepseek4-mtp": DeepSeek4Shape(
        *_TINY, tied=False, window=24, n_rot=16, experts=ExpertsConfig(7, 3, 256), n_q=64, n_group=3, n_out=32,
        indexer=(6, 32, 8), n_hash=2, large=8, drafts=True,
    ),
}
# fmt: on
