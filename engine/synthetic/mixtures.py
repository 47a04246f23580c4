"""Shapes of mixtures whose tensors are not those of Llama or Qwen: gpt-oss, GLM 4.5, Step 3.5 and Llama 4."""

from collections.abc import Iterator
from dataclasses import dataclass

from gguf import GGMLQuantizationType as T

from engine.models.network_config import ExpertsConfig
from engine.synthetic.shape import N_VOCAB_TINY, Shape, Value


@dataclass(frozen=True)
class GptOssShape(Shape):
    """gpt-oss: every other layer slides; matrices have biases, heads have sinks, and experts are MXFP4."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        e, mix = self.n_embd, self.experts
        assert mix is not None
        q, kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        yield "token_embd.weight", (self.n_vocab, e)
        for layer in range(self.n_layer):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (e,)
            for name, rows, columns in (("q", q, e), ("k", kv, e), ("v", kv, e), ("output", e, q)):
                yield f"{block}attn_{name}.weight", (rows, columns)
                yield f"{block}attn_{name}.bias", (rows,)
            yield block + "attn_sinks.weight", (self.n_head,)
            yield block + "post_attention_norm.weight", (e,)
            yield block + "ffn_gate_inp.weight", (mix.n_expert, e)
            yield block + "ffn_gate_inp.bias", (mix.n_expert,)
            for name, rows, columns in (("gate", mix.n_ff, e), ("up", mix.n_ff, e), ("down", e, mix.n_ff)):
                yield f"{block}ffn_{name}_exps.weight", (mix.n_expert, rows, columns)
                yield f"{block}ffn_{name}_exps.bias", (mix.n_expert, rows)
        yield "output_norm.weight", (e,)
        yield "output.weight", (self.n_vocab, e)

    def metadata(self) -> dict[str, Value]:
        """YaRN from 4096 positions to 32 times as many."""
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        }

    def format_of(self, part: str, main: T) -> T | None:
        """Experts are MXFP4 in every file."""
        return T.MXFP4 if part.endswith("_exps") else None


@dataclass(frozen=True)
class Glm4MoeShape(Shape):
    """GLM 4.5: the first layer is dense; the others have a sigmoid router and a shared network without a gate; the layer
    after the trunk drafts."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        e, mix = self.n_embd, self.experts
        assert mix is not None
        q, kv = self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        yield "token_embd.weight", (self.n_vocab, e)
        for layer in range(self.n_block):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (e,)
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                yield f"{block}attn_{name}.weight", (rows, e)
                yield f"{block}attn_{name}.bias", (rows,)
            yield block + "attn_output.weight", (e, q)
            yield block + "post_attention_norm.weight", (e,)
            if layer == 0:
                yield from self._feed_forward(block)
            else:
                yield from _biased_mixture(block, e, mix)
            if layer >= self.n_layer:
                yield from self._nextn(block)
        yield "output_norm.weight", (e,)
        yield "output.weight", (self.n_vocab, e)

    def metadata(self) -> dict[str, Value]:
        """The router, and which layers are dense or draft."""
        return {
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.0,
            "nextn_predict_layers": self.n_mtp,
        }


@dataclass(frozen=True)
class Step35Shape(Shape):
    """Step 3.5: every fourth layer, beginning with the first one, has no window and ``n_head`` heads; the others have one,
    and ``n_head_sliding`` heads.  Each head has a gate.  The first ``n_dense`` layers are dense, like layers that draft."""

    n_head_sliding: int = 0
    n_dense: int = 0

    @property
    def sliding(self) -> list[bool]:
        """For each layer of the file, whether it has a window."""
        return [il < self.n_layer and il % 4 != 0 for il in range(self.n_block)]

    @property
    def head_counts(self) -> list[int]:
        """The number of heads of each layer of the file."""
        return [self.n_head_sliding if slides else self.n_head for slides in self.sliding]

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        e, d, mix = self.n_embd, self.head_dim, self.experts
        assert mix is not None
        yield "token_embd.weight", (self.n_vocab, e)
        for layer, n_head in enumerate(self.head_counts):
            block, kv = f"blk.{layer}.", self.n_head_kv * d
            yield block + "attn_norm.weight", (e,)
            for name, rows in (("q", n_head * d), ("k", kv), ("v", kv), ("gate", n_head)):
                yield f"{block}attn_{name}.weight", (rows, e)
            yield block + "attn_q_norm.weight", (d,)
            yield block + "attn_k_norm.weight", (d,)
            yield block + "attn_output.weight", (e, n_head * d)
            yield block + "ffn_norm.weight", (e,)
            if layer < self.n_dense or layer >= self.n_layer:
                yield from self._feed_forward(block)
            else:
                yield from _biased_mixture(block, e, mix)
            if layer >= self.n_layer:
                yield from self._nextn(block)
                yield block + "nextn.shared_head_head.weight", (self.n_vocab, e)
        yield "output_norm.weight", (e,)
        yield "output.weight", (self.n_vocab, e)

    def metadata(self) -> dict[str, Value]:
        """The router, windows, limits of the last two layers, and which layers are dense or draft."""
        assert self.experts is not None
        limited = [self.n_layer - 2 <= il < self.n_layer for il in range(self.n_block)]
        return {
            "attention.sliding_window_pattern": self.sliding,
            "rope.freq_base_swa": 10000.0,
            "leading_dense_block_count": self.n_dense,
            "expert_shared_feed_forward_length": self.experts.n_ff,
            "expert_weights_norm": True,
            "expert_weights_scale": 3.0,
            "swiglu_clamp_exp": [7.0 * limit for limit in limited],
            "swiglu_clamp_shexp": [16.0 * limit for limit in limited],
            "nextn_predict_layers": self.n_mtp,
        }


@dataclass(frozen=True)
class Llama4Shape(Shape):
    """Llama 4: three of four layers see frames of ``window`` positions and rotate; the last of every ``step`` layers is a
    mixture with a shared network.  The factor of queries changes every ``tuned`` positions."""

    step: int = 1
    tuned: int = 8192

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        e, d, mix = self.n_embd, self.head_dim, self.experts
        assert mix is not None
        yield "token_embd.weight", (self.n_vocab, e)
        if self.rope_factor:
            yield "rope_freqs.weight", (d // 2,)
        for layer in range(self.n_layer):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (e,)
            for name, rows in (("q", self.n_head * d), ("k", self.n_head_kv * d), ("v", self.n_head_kv * d)):
                yield f"{block}attn_{name}.weight", (rows, e)
            yield block + "attn_output.weight", (e, self.n_head * d)
            yield block + "ffn_norm.weight", (e,)
            if (layer + 1) % self.step:
                yield from self._feed_forward(block)
            else:
                yield block + "ffn_gate_inp.weight", (mix.n_expert, e)
                yield from _experts(block, e, mix)
        yield "output_norm.weight", (e,)
        yield "output.weight", (self.n_vocab, e)

    def metadata(self) -> dict[str, Value]:
        """Which layers are mixtures, and the factor of queries."""
        return {"interleave_moe_layer_step": self.step, "attention.temperature_length": self.tuned}


def _biased_mixture(block: str, e: int, mix: ExpertsConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A mixture whose choice has a bias, with a shared network as wide as an expert and without a gate."""
    yield block + "ffn_gate_inp.weight", (mix.n_expert, e)
    yield block + "exp_probs_b.bias", (mix.n_expert,)
    yield from _experts(block, e, mix)


def _experts(block: str, e: int, mix: ExpertsConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Experts, and a shared network as wide as one of them."""
    for name, rows, columns in (("gate", mix.n_ff, e), ("up", mix.n_ff, e), ("down", e, mix.n_ff)):
        yield f"{block}ffn_{name}_exps.weight", (mix.n_expert, rows, columns)
        yield f"{block}ffn_{name}_shexp.weight", (rows, columns)


# Layers, width, heads, KV heads, head size, feed-forward, vocabulary, context, RoPE base, epsilon.
# fmt: off
MIXTURES: dict[str, Shape] = {
    "gpt-oss-20b": GptOssShape(
        "gpt-oss", 24, 2880, 64, 8, 64, 0, 201088, 131072, 1.5e5, 1e-5, tied=False, window=128,
        experts=ExpertsConfig(32, 4, 2880),
    ),
    "gpt-oss-120b": GptOssShape(
        "gpt-oss", 36, 2880, 64, 8, 64, 0, 201088, 131072, 1.5e5, 1e-5, tied=False, window=128,
        experts=ExpertsConfig(128, 4, 2880),
    ),
    "glm-4.5-air": Glm4MoeShape(
        "glm4moe", 46, 4096, 96, 8, 128, 10944, 151552, 131072, 1e6, 1e-5, tied=False, n_rot=64, n_mtp=1,
        experts=ExpertsConfig(128, 8, 1408),
    ),
    "step-3.5-flash": Step35Shape(
        "step35", 45, 4096, 64, 8, 128, 11264, 128896, 65536, 5e6, 1e-5, tied=False, window=512, n_mtp=3,
        experts=ExpertsConfig(288, 8, 1280), n_head_sliding=96, n_dense=3,
    ),
    "llama4-scout": Llama4Shape(
        "llama4", 48, 5120, 40, 8, 128, 16384, 202048, 10485760, 5e5, 1e-5, tied=False, window=8192, rope_factor=16,
        experts=ExpertsConfig(16, 1, 8192),
    ),
    # Widths that are multiples of 32 only, a window that a short prompt exceeds, and five experts.
    "tiny-gpt-oss": GptOssShape(
        "gpt-oss", 4, 288, 9, 3, 64, 0, N_VOCAB_TINY, 512, 1e4, 1e-5, tied=False, window=32,
        experts=ExpertsConfig(5, 2, 160),
    ),
    "tiny-glm4moe": Glm4MoeShape(
        "glm4moe", 3, 256, 9, 3, 64, 512, N_VOCAB_TINY, 512, 1e5, 1e-5, tied=False, n_rot=32, n_mtp=1,
        experts=ExpertsConfig(7, 3, 256),
    ),
    "tiny-step35": Step35Shape(
        "step35", 3, 256, 3, 1, 64, 512, N_VOCAB_TINY, 512, 1e5, 1e-5, tied=False, window=32, n_mtp=3,
        experts=ExpertsConfig(7, 3, 256), n_head_sliding=5, n_dense=1,
    ),
    "tiny-llama4": Llama4Shape(
        "llama4", 5, 256, 5, 1, 64, 512, N_VOCAB_TINY, 512, 1e5, 1e-5, tied=False, window=32, rope_factor=8, rope_n_ctx=64,
        experts=ExpertsConfig(7, 2, 256), step=2, tuned=40,
    ),
}
# fmt: on
