"""Sizes of models and the formats of their matrices: the contents of a GGUF file of a given name and quantization.

Sizes are those of the models' published ``config.json`` files; the rules for formats are those of llama.cpp
(``llama-quant.cpp``).
"""

import re

from gguf import GGMLQuantizationType as T

from engine.errors import UsageError
from engine.gguf.quants import FORMATS
from engine.models.delta_net_config import DeltaNetConfig
from engine.models.network_config import ExpertsConfig
from engine.synthetic.altup import ALTUPS
from engine.synthetic.convolutions import CONVOLUTIONS
from engine.synthetic.deepseek4 import DEEPSEEK4
from engine.synthetic.dflash import DFLASHES
from engine.synthetic.eagle3 import EAGLE3S
from engine.synthetic.kda import KDAS
from engine.synthetic.latents import LATENTS
from engine.synthetic.mamba import MAMBAS
from engine.synthetic.mixtures import MIXTURES
from engine.synthetic.parallel import PARALLEL
from engine.synthetic.shape import N_VOCAB_TINY, TABLE, Gemma4Shape, Shape


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
    return (
        _SHAPES | MIXTURES | LATENTS | CONVOLUTIONS | MAMBAS | KDAS | ALTUPS | PARALLEL | DEEPSEEK4 | EAGLE3S | DFLASHES
    )


def parse_shape(text: str) -> tuple[str, str]:
    """Parse ``NAME:QUANT`` (``NAME`` alone means Q4_K_M) into names that exist; raises UsageError otherwise."""
    name, _, quant = text.partition(":")
    quant = quant.upper() or "Q4_K_M"
    if name not in shapes():
        raise UsageError(f"there is no shape {name!r}; use one of {', '.join(shapes())}.")
    if quant not in quants():
        raise UsageError(f"there is no quantization {quant!r}; use one of {', '.join(quants())}.")
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

# Small matrices that stay float32: the router of experts, and convolutions.
_FLOAT = ("ffn_gate_inp", "ssm_conv1d", *(f"ssm_conv1d_{part}" for part in "qkv"), "shortconv.conv")

# The replacement of a 256-wide format when the row length is not a multiple of 256.
_FALLBACK = {
    **dict.fromkeys((T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ4_XS), T.IQ4_NL),
    **dict.fromkeys((T.TQ1_0, T.TQ2_0), T.Q4_0),
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
    if name.endswith(TABLE):
        return T.I32
    match = re.fullmatch(r"(?:blk\.(\d+)|mtp\.0)\.([\w.]+)\.weight", name)
    layer, part = (int(match[1] or 0), match[2]) if match else (0, "")
    fixed = shape.format_of(part or name.removesuffix(".weight"), main) if FORMATS[main].quantized else None
    if fixed is not None and columns % FORMATS[fixed].block == 0:
        return fixed
    if part in _FLOAT or name.endswith(".bias"):
        return T.F32
    if name == "per_layer_model_proj.weight":  # keeps the format it was trained in
        return T.BF16 if FORMATS[main].quantized else main
    kind = main
    if name == "output.weight" or (shape.tied and name in ("token_embd.weight", "per_layer_token_embd.weight")):
        kind = head
    elif more and part == "attn_v":
        owners = shape.has_values
        kind = T.Q6_K if use_more_bits(sum(owners[:layer]), sum(owners)) else main
    elif more and re.fullmatch(r"attn_qkv|ffn_down(_exps|_shexp)?", part):
        kind = T.Q6_K if use_more_bits(layer, shape.n_block) else main
    if quant in _MIXES and shape.experts and shape.experts.n_expert == 8:  # they cost little beside so many
        if part in ("attn_k", "attn_v", "attn_qkv"):
            kind = T.Q8_0
        elif part == "attn_output" and quant == "Q4_K_M":
            kind = T.Q5_K
    if columns % FORMATS[kind].block:
        kind = _FALLBACK.get(kind, T.F16)
    return kind if columns % FORMATS[kind].block == 0 else T.F16
