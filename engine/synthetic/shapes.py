"""Sizes of models and the formats of their matrices: the contents of a GGUF file of a given name and quantization.

Sizes are those of the models' published ``config.json`` files; the rules for formats are those of llama.cpp
(``llama-quant.cpp``).
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from gguf import GGMLQuantizationType as T

from engine.errors import UsageError
from engine.gguf.quants import FORMATS
from engine.models.config import DeltaNetConfig, ExpertsConfig


@dataclass(frozen=True)
class Gemma4Shape:
    """The additional sizes of gemma4 and its assistants.  Every ``pattern``-th layer is global, with n_head_kv heads of
    head_dim; the others slide, with ``n_head_kv_sliding`` heads of ``head_dim_sliding``.  ``k_is_v``: global layers have no
    ``attn_v``.

    The last ``n_shared`` layers read the caches of earlier layers; ``wide_tail``: their feed-forward networks are twice
    as wide.  ``n_per_layer``: width of the embedding that each layer has of its own (0: none).  ``n_embd_out``: width of
    the model that an assistant drafts for (0: this is not an assistant).
    """

    pattern: int
    head_dim_sliding: int
    n_head_kv_sliding: int
    k_is_v: bool = False
    n_shared: int = 0
    wide_tail: bool = False
    n_per_layer: int = 0
    n_embd_out: int = 0

    def sliding(self, n_layer: int) -> tuple[bool, ...]:
        """For each layer, whether it slides."""
        return tuple((il + 1) % self.pattern != 0 for il in range(n_layer))

    def widths(self, n_layer: int, n_ff: int) -> tuple[int, ...]:
        """The width of each layer's feed-forward network."""
        return tuple(n_ff * (2 if self.wide_tail and il >= n_layer - self.n_shared else 1) for il in range(n_layer))

    def owns_values(self, n_layer: int) -> tuple[bool, ...]:
        """For each layer, whether it has an ``attn_v``."""
        return tuple(
            il < n_layer - self.n_shared and (slides or not self.k_is_v)
            for il, slides in enumerate(self.sliding(n_layer))
        )


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.  ``head_dim`` is the length of a key and of a value; ``window`` the sliding window of gemma3 and
    gemma4 (0: none); ``rope_factor`` the context extension of Llama 3.1 and later (0: none, and no ``rope_freqs`` tensor),
    over ``rope_n_ctx`` trained positions; ``n_rot`` the rotated dimensions of a head (0: all).

    ``experts``: the feed-forward networks are mixtures (``n_ff`` is then only a number in the metadata, 0: absent).
    ``delta_net``: all layers but every ``interval``-th are gated delta nets, and attention has gates.  ``n_mtp``: layers
    of attention that follow the n_layer of the trunk and draft tokens.  ``gemma4``: the model is of that architecture or an
    assistant of one; ``experts`` are then in addition to the network of n_ff.
    """

    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    rope_base: float
    eps: float
    tied: bool = True
    window: int = 0
    rope_factor: float = 0.0
    rope_n_ctx: int = 8192
    n_rot: int = 0
    experts: ExpertsConfig | None = None
    delta_net: DeltaNetConfig | None = None
    interval: int = 4
    n_mtp: int = 0
    gemma4: Gemma4Shape | None = None

    @property
    def n_block(self) -> int:
        """The number of layers in the file: those of the trunk and those that follow it."""
        return self.n_layer + self.n_mtp

    @property
    def recurrent(self) -> tuple[bool, ...]:
        """For each layer of the file, whether it is a gated delta net."""
        hybrid = self.delta_net is not None
        return tuple(hybrid and il < self.n_layer and (il + 1) % self.interval != 0 for il in range(self.n_block))

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape (NumPy order, outermost first) of every tensor, in the order of the file."""
        if self.gemma4:
            yield from _gemma4_tensors(self, self.gemma4)
            return
        yield "token_embd.weight", (self.n_vocab, self.n_embd)
        if self.rope_factor:
            yield "rope_freqs.weight", (self.head_dim // 2,)
        for layer, recurrent in enumerate(self.recurrent):
            block, e = f"blk.{layer}.", self.n_embd
            yield block + "attn_norm.weight", (e,)
            yield from self._delta_net(block) if recurrent else self._attention(block)
            if self.architecture == "gemma3" or self.delta_net:
                yield block + "post_attention_norm.weight", (e,)
            if not self.delta_net:
                yield block + "ffn_norm.weight", (e,)
            yield from self._mixture(block) if self.experts else self._feed_forward(block)
            if self.architecture == "gemma3":
                yield block + "post_ffw_norm.weight", (e,)
            if layer >= self.n_layer:
                yield block + "nextn.eh_proj.weight", (e, 2 * e)
                for name in ("enorm", "hnorm", "shared_head_norm"):
                    yield f"{block}nextn.{name}.weight", (e,)
        yield "output_norm.weight", (self.n_embd,)
        if not self.tied:
            yield "output.weight", (self.n_vocab, self.n_embd)

    def _attention(self, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        e, q, kv = self.n_embd, self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        gated = 2 if self.delta_net else 1  # each head's queries, then its gates
        for name, rows in (("attn_q", gated * q), ("attn_k", kv), ("attn_v", kv)):
            yield f"{block}{name}.weight", (rows, e)
            if self.architecture == "qwen2":
                yield f"{block}{name}.bias", (rows,)
        if self.architecture not in ("llama", "qwen2"):
            yield block + "attn_q_norm.weight", (self.head_dim,)
            yield block + "attn_k_norm.weight", (self.head_dim,)
        yield block + "attn_output.weight", (e, q)

    def _delta_net(self, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        e, net = self.n_embd, self.delta_net
        assert net is not None
        values = net.n_v * net.state_size
        yield block + "attn_qkv.weight", (net.n_channels, e)
        yield block + "attn_gate.weight", (values, e)
        yield block + "ssm_alpha.weight", (net.n_v, e)
        yield block + "ssm_beta.weight", (net.n_v, e)
        yield block + "ssm_conv1d.weight", (net.n_channels, net.n_conv)
        yield block + "ssm_a", (net.n_v,)
        yield block + "ssm_dt.bias", (net.n_v,)
        yield block + "ssm_norm.weight", (net.state_size,)
        yield block + "ssm_out.weight", (e, values)

    def _feed_forward(self, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield block + "ffn_gate.weight", (self.n_ff, self.n_embd)
        yield block + "ffn_up.weight", (self.n_ff, self.n_embd)
        yield block + "ffn_down.weight", (self.n_embd, self.n_ff)

    def _mixture(self, block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        e, mix = self.n_embd, self.experts
        assert mix is not None
        yield block + "ffn_gate_inp.weight", (mix.n_expert, e)
        yield block + "ffn_gate_exps.weight", (mix.n_expert, mix.n_ff, e)
        yield block + "ffn_up_exps.weight", (mix.n_expert, mix.n_ff, e)
        yield block + "ffn_down_exps.weight", (mix.n_expert, e, mix.n_ff)
        if mix.n_ff_shared:
            yield block + "ffn_gate_inp_shexp.weight", (e,)
            yield block + "ffn_gate_shexp.weight", (mix.n_ff_shared, e)
            yield block + "ffn_up_shexp.weight", (mix.n_ff_shared, e)
            yield block + "ffn_down_shexp.weight", (e, mix.n_ff_shared)

    @property
    def n_params(self) -> int:
        """The number of trained parameters: everything but ``rope_freqs``, which is computed."""
        return sum(math.prod(shape) for name, shape in self.tensors() if name != "rope_freqs.weight")


def _gemma4_tensors(shape: Shape, gemma: Gemma4Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    e, n_layer, per_layer = shape.n_embd, shape.n_layer, gemma.n_per_layer
    yield "token_embd.weight", (shape.n_vocab, e)
    yield "rope_freqs.weight", (shape.head_dim // 2,)
    if gemma.n_embd_out:
        yield "nextn.pre_projection.weight", (e, 2 * gemma.n_embd_out)
        yield "nextn.post_projection.weight", (gemma.n_embd_out, e)
    if per_layer:
        yield "per_layer_token_embd.weight", (shape.n_vocab, n_layer * per_layer)
        yield "per_layer_model_proj.weight", (n_layer * per_layer, e)
        yield "per_layer_proj_norm.weight", (per_layer,)
    layers = zip(gemma.sliding(n_layer), gemma.owns_values(n_layer), gemma.widths(n_layer, shape.n_ff), strict=True)
    for layer, (slides, owns_values, n_ff) in enumerate(layers):
        block = f"blk.{layer}."
        d = gemma.head_dim_sliding if slides else shape.head_dim
        kv = d * (gemma.n_head_kv_sliding if slides else shape.n_head_kv)
        yield block + "attn_norm.weight", (e,)
        yield block + "attn_q.weight", (shape.n_head * d, e)
        yield block + "attn_q_norm.weight", (d,)
        if layer < n_layer - gemma.n_shared:
            yield block + "attn_k.weight", (kv, e)
            yield block + "attn_k_norm.weight", (d,)
        if owns_values:
            yield block + "attn_v.weight", (kv, e)
        yield block + "attn_output.weight", (e, shape.n_head * d)
        yield block + "post_attention_norm.weight", (e,)
        yield block + "ffn_norm.weight", (e,)
        yield block + "ffn_gate.weight", (n_ff, e)
        yield block + "ffn_up.weight", (n_ff, e)
        yield block + "ffn_down.weight", (e, n_ff)
        yield block + "post_ffw_norm.weight", (e,)
        if shape.experts:
            yield from _gemma4_mixture(block, e, shape.experts)
        if per_layer:
            yield block + "inp_gate.weight", (per_layer, e)
            yield block + "proj.weight", (e, per_layer)
            yield block + "post_norm.weight", (e,)
        yield block + "layer_output_scale.weight", (1,)
    yield "output_norm.weight", (e,)


def _gemma4_mixture(block: str, e: int, mix: ExpertsConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield block + "ffn_gate_inp.weight", (mix.n_expert, e)
    yield block + "ffn_gate_inp.scale", (e,)
    yield block + "ffn_gate_up_exps.weight", (mix.n_expert, 2 * mix.n_ff, e)
    yield block + "ffn_down_exps.weight", (mix.n_expert, e, mix.n_ff)
    yield block + "ffn_down_exps.scale", (mix.n_expert,)
    for name in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"):
        yield f"{block}{name}.weight", (e,)


N_VOCAB_TINY = 289
"""Size of the smallest vocabulary that can write any text (``engine.synthetic.model.vocabulary``)."""


def _gemma4(
    size: str,
    n_layer: int,
    n_embd: int,
    n_head: int,
    n_head_kv: int,
    n_ff: int,
    gemma: Gemma4Shape,
    n_embd_assistant: int,
    n_ff_assistant: int,
    experts: ExpertsConfig | None = None,
) -> dict[str, Shape]:
    """A model of the gemma4 family, and its assistant: four layers, the last of which is global."""
    n_ctx, window = (131072, 512) if gemma.n_per_layer else (262144, 1024)
    rest = (262144, n_ctx, 1e6, 1e-6, True, window)
    target = Shape("gemma4", n_layer, n_embd, n_head, n_head_kv, 512, n_ff, *rest, experts=experts, gemma4=gemma)
    own = Gemma4Shape(4, gemma.head_dim_sliding, gemma.n_head_kv_sliding, n_shared=4, n_embd_out=n_embd)
    n_head = 4 if gemma.n_per_layer else n_head
    sizes = (4, n_embd_assistant, n_head, n_head_kv, 512, n_ff_assistant)
    assistant = Shape("gemma4-assistant", *sizes, *rest, gemma4=own)
    return {f"gemma4-{size}": target, f"gemma4-{size}-assistant": assistant}


# Layers, width, heads, KV heads, head size, feed-forward, vocabulary, context, RoPE base, epsilon.
# fmt: off
_SHAPES = {
    "smollm2-135m": Shape("llama", 30, 576, 9, 3, 64, 1536, 49152, 8192, 1e5, 1e-5),
    "llama3.2-1b": Shape("llama", 16, 2048, 32, 8, 64, 8192, 128256, 131072, 5e5, 1e-5, rope_factor=32),
    "llama3.1-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072, 5e5, 1e-5, tied=False, rope_factor=8),
    "qwen2.5-0.5b": Shape("qwen2", 24, 896, 14, 2, 64, 4864, 151936, 32768, 1e6, 1e-6),
    "qwen2.5-7b": Shape("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 32768, 1e6, 1e-6, tied=False),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 40960, 1e6, 1e-6),
    "qwen3-1.7b": Shape("qwen3", 28, 2048, 16, 8, 128, 6144, 151936, 40960, 1e6, 1e-6),
    "qwen3-4b": Shape("qwen3", 36, 2560, 32, 8, 128, 9728, 151936, 40960, 1e6, 1e-6),
    "qwen3-8b": Shape("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 40960, 1e6, 1e-6, tied=False),
    "gemma3-270m": Shape("gemma3", 18, 640, 4, 1, 256, 2048, 262144, 32768, 1e6, 1e-6, window=512),
    "gemma3-1b": Shape("gemma3", 26, 1152, 4, 1, 256, 6912, 262144, 32768, 1e6, 1e-6, window=512),
    "qwen3-30b-a3b": Shape(
        "qwen3moe", 48, 2048, 32, 4, 128, 6144, 151936, 40960, 1e6, 1e-6, tied=False,
        experts=ExpertsConfig(128, 8, 768, 0),
    ),
    "qwen3.6-27b": Shape(
        "qwen35", 64, 5120, 24, 4, 256, 17408, 248320, 262144, 1e7, 1e-6, tied=False, n_rot=64, n_mtp=1,
        delta_net=DeltaNetConfig(16, 48, 128, 4),
    ),
    "qwen3.6-35b-a3b": Shape(
        "qwen35moe", 40, 2048, 16, 2, 256, 0, 248320, 262144, 1e7, 1e-6, tied=False, n_rot=64, n_mtp=1,
        delta_net=DeltaNetConfig(16, 32, 128, 4), experts=ExpertsConfig(256, 8, 512, 512),
    ),
    **_gemma4("e2b", 35, 1536, 8, 1, 6144, Gemma4Shape(5, 256, 1, n_shared=20, wide_tail=True, n_per_layer=256), 256, 2048),
    **_gemma4("e4b", 42, 2560, 8, 2, 10240, Gemma4Shape(6, 256, 2, n_shared=18, n_per_layer=256), 256, 2048),
    **_gemma4("12b", 48, 3840, 16, 1, 15360, Gemma4Shape(6, 256, 8, k_is_v=True), 1024, 8192),
    **_gemma4("31b", 60, 5376, 32, 4, 21504, Gemma4Shape(6, 256, 16, k_is_v=True), 1024, 8192),
    **_gemma4(
        "26b-a4b", 30, 2816, 16, 2, 2112, Gemma4Shape(6, 256, 8, k_is_v=True), 1024, 8192, ExpertsConfig(128, 8, 704, 0),
    ),
    # Small and awkward, for tests: odd numbers of heads, layers and tokens, rows that are not a multiple of 256, heads
    # that do not add up to the width, and for gemma3 a window that a short prompt exceeds and a layer (5 of 7) without.
    "tiny-llama": Shape("llama", 3, 288, 9, 3, 32, 768, N_VOCAB_TINY, 512, 1e4, 1e-5, rope_factor=8, rope_n_ctx=64),
    "tiny-qwen2": Shape("qwen2", 3, 320, 5, 1, 64, 512, N_VOCAB_TINY, 512, 1e5, 1e-6, tied=False),
    "tiny-qwen3": Shape("qwen3", 3, 256, 3, 1, 128, 768, N_VOCAB_TINY, 512, 1e5, 1e-6),
    "tiny-gemma3": Shape("gemma3", 7, 256, 3, 1, 64, 512, N_VOCAB_TINY, 512, 1e5, 1e-6, window=32),
    # A number of experts that is not a power of two, and widths that are no multiple of 256; trunks that end with a delta
    # net or with attention, and have more heads of values than of keys.
    "tiny-qwen3moe": Shape(
        "qwen3moe", 3, 256, 3, 1, 64, 0, N_VOCAB_TINY, 512, 1e5, 1e-6,
        experts=ExpertsConfig(5, 2, 96, 0),
    ),
    "tiny-qwen35": Shape(
        "qwen35", 5, 288, 3, 1, 64, 512, N_VOCAB_TINY, 512, 1e5, 1e-6, tied=False, n_rot=32, n_mtp=1,
        delta_net=DeltaNetConfig(3, 6, 32, 4),
    ),
    "tiny-qwen35moe": Shape(
        "qwen35moe", 4, 256, 3, 1, 128, 0, N_VOCAB_TINY, 512, 1e5, 1e-6, n_rot=32, n_mtp=1,
        delta_net=DeltaNetConfig(2, 6, 64, 4), experts=ExpertsConfig(7, 3, 256, 160),
    ),
    # Global heads that are not a power of two; a mixture in layers with and without values of their own; a tail that reads
    # other layers' caches; assistants with their targets' heads and windows.
    "tiny-gemma4": Shape(
        "gemma4", 6, 256, 6, 1, 96, 512, N_VOCAB_TINY, 512, 1e6, 1e-6, window=32,
        gemma4=Gemma4Shape(3, 64, 2, k_is_v=True),
    ),
    "tiny-gemma4-moe": Shape(
        "gemma4", 4, 288, 3, 1, 128, 160, N_VOCAB_TINY, 512, 1e6, 1e-6, window=32, experts=ExpertsConfig(7, 3, 96, 0),
        gemma4=Gemma4Shape(2, 64, 3, k_is_v=True),
    ),
    "tiny-gemma4-e": Shape(
        "gemma4", 8, 288, 3, 1, 64, 256, N_VOCAB_TINY, 512, 1e6, 1e-6, window=32,
        gemma4=Gemma4Shape(4, 32, 1, n_shared=4, wide_tail=True, n_per_layer=64),
    ),
    "tiny-gemma4-assistant": Shape(
        "gemma4-assistant", 3, 160, 4, 1, 96, 256, N_VOCAB_TINY, 512, 1e6, 1e-6, window=32,
        gemma4=Gemma4Shape(3, 64, 2, n_shared=3, n_embd_out=256),
    ),
    "tiny-gemma4-e-assistant": Shape(
        "gemma4-assistant", 2, 96, 2, 1, 64, 160, N_VOCAB_TINY, 512, 1e6, 1e-6, window=32,
        gemma4=Gemma4Shape(2, 32, 1, n_shared=2, n_embd_out=288),
    ),
}
# fmt: on


def shapes() -> dict[str, Shape]:
    """Every named shape: published models, and ``tiny-<architecture>`` for tests."""
    return dict(_SHAPES)


def parse_shape(text: str) -> tuple[str, str]:
    """Parse ``NAME:QUANT`` (``NAME`` alone means Q4_K_M) into names that exist; raises UsageError otherwise."""
    name, _, quant = text.partition(":")
    quant = quant.upper() or "Q4_K_M"
    if name not in shapes():
        raise UsageError(f"There is no shape {name!r}; use one of {', '.join(shapes())}.")
    if quant not in quants():
        raise UsageError(f"There is no quantization {quant!r}; use one of {', '.join(quants())}.")
    return name, quant


# --- formats: which tensor gets which (llama-quant.cpp of llama.cpp) -------------------------------------------

# llama.cpp's file types: the formats of most matrices and of the output matrix, and whether some layers get Q6_K.
_MIXES = {
    "Q4_K_M": (T.Q4_K, T.Q6_K, True),
    "Q5_K_M": (T.Q5_K, T.Q6_K, True),
    "Q4_0": (T.Q4_0, T.Q6_K, False),
    "Q4_1": (T.Q4_1, T.Q6_K, False),
    "Q5_0": (T.Q5_0, T.Q6_K, False),
    "Q5_1": (T.Q5_1, T.Q6_K, False),
}

# Small matrices that stay float32: the router of experts, and the convolution of a delta net.
_FLOAT = ("ffn_gate_inp", "ssm_conv1d")

# The replacement of a 256-wide format when the row length is not a multiple of 256.
_FALLBACK = {
    T.IQ2_XXS: T.IQ4_NL,
    T.IQ4_XS: T.IQ4_NL,
    T.Q2_K: T.Q4_0,
    T.Q3_K: T.Q4_0,
    T.Q4_K: T.Q5_0,
    T.Q5_K: T.Q5_1,
    T.Q6_K: T.Q8_0,
}


def quants() -> list[str]:
    """Names of quantizations: llama.cpp's mixes, then the formats that can be used for every matrix."""
    return [*_MIXES, *(f.name for f in FORMATS.values() if f.name not in _MIXES)]


def use_more_bits(layer: int, n_layer: int) -> bool:
    """Whether a layer's ``attn_v`` (or ``attn_qkv``) and ``ffn_down`` get Q6_K in a ``_M`` mix: the first and last eighth of
    the layers in the file that have one, and every third between."""
    return layer < n_layer // 8 or layer >= 7 * n_layer // 8 or (layer - n_layer // 8) % 3 == 2


def tensor_type(shape: Shape, quant: str, name: str, columns: int) -> T:
    """The format of one matrix with rows of ``columns`` weights."""
    main, head, more = _MIXES.get(quant) or (T[quant], T[quant], False)
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    layer, part = (int(match[1]), match[2]) if match else (0, "")
    if part in _FLOAT:
        return T.F32
    if name == "per_layer_model_proj.weight":  # keeps the format it was trained in
        return T.BF16 if FORMATS[main].quantized else main
    kind = main
    if name == "output.weight" or (shape.tied and name in ("token_embd.weight", "per_layer_token_embd.weight")):
        kind = head
    elif more and part == "attn_v" and shape.gemma4:
        owners = shape.gemma4.owns_values(shape.n_layer)
        kind = T.Q6_K if use_more_bits(sum(owners[:layer]), sum(owners)) else main
    elif more and re.fullmatch(r"attn_v|attn_qkv|ffn_down(_exps|_shexp)?", part):
        kind = T.Q6_K if use_more_bits(layer, shape.n_block) else main
    if quant in _MIXES and shape.experts and shape.experts.n_expert == 8:  # they cost little beside so many
        if part in ("attn_k", "attn_v", "attn_qkv"):
            kind = T.Q8_0
        elif part == "attn_output" and quant == "Q4_K_M":
            kind = T.Q5_K
    if columns % FORMATS[kind].block:
        kind = _FALLBACK.get(kind, T.F16)
    return kind if columns % FORMATS[kind].block == 0 else T.F16
