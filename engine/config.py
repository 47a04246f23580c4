"""From metadata to a frozen description of the model.

Every number here has been read with its exact type and range; that it agrees with the shapes of the tensors is checked
where each tensor is taken (``engine/weights.py``).  Keys and defaults are those of llama.cpp.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np

from engine.errors import ModelError
from engine.gguf import GGUF
from engine.gguf_header import shown

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

MAX_DIMENSION = 1 << 20
MAX_LAYERS = 1024


@dataclass(frozen=True)
class RopeConfig:
    """Rotation of one kind of layer: ``n_rot`` dimensions, frequency base, linear scale (1 / factor), and the
    frequency correction of YaRN (Peng et al. 2023) where ``yarn_ctx`` (the original context) is not 0."""

    n_rot: int
    base: float
    scale: float = 1.0
    yarn_ctx: int = 0
    attn_factor: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """What the forward pass needs to know.  Sizes are counts of elements; ``sliding[il]`` says whether layer il sees
    only ``window`` positions; ``rope_sliding`` is the rotation of those layers."""

    architecture: str
    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    d_k: int
    d_v: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    rope: RopeConfig
    rope_sliding: RopeConfig
    window: int
    sliding: tuple[bool, ...]
    attention_scale: float
    embedding_scale: float
    final_softcap: float


def read_config(gguf: GGUF) -> ModelConfig:
    """The configuration of a file; ModelError for an architecture this engine cannot run, GGUFError for bad values."""
    architecture = gguf.require("general.architecture", "str")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{gguf.path}: architecture {shown(architecture)!r} is not supported; "
            f"this engine runs {', '.join(ARCHITECTURES)}."
        )
    a = architecture
    if gguf.get(f"{a}.expert_count", "int", 0, 0, MAX_DIMENSION):
        raise ModelError(f"{gguf.path}: mixtures of experts are not supported; use a dense {a} model.")
    n_layer = gguf.require(f"{a}.block_count", "int", 1, MAX_LAYERS)
    n_embd = gguf.require(f"{a}.embedding_length", "int", 1, MAX_DIMENSION)
    n_head = _uniform(gguf, f"{a}.attention.head_count", None, n_layer)
    n_head_kv = _uniform(gguf, f"{a}.attention.head_count_kv", n_head, n_layer)
    if n_head % n_head_kv:
        gguf.refuse(f"{a}.attention.head_count_kv", f"is {n_head_kv}, which does not divide the {n_head} query heads")
    if f"{a}.attention.key_length" not in gguf.metadata and n_embd % n_head:
        gguf.refuse(f"{a}.attention.head_count", f"is {n_head}, which does not divide the embedding length {n_embd}")
    d_k = gguf.get(f"{a}.attention.key_length", "int", n_embd // n_head, 1, 4096)
    d_v = gguf.get(f"{a}.attention.value_length", "int", n_embd // n_head, 1, 4096)
    n_ctx_train = gguf.require(f"{a}.context_length", "int", 1, 1 << 30)
    window, sliding, rope_base_sliding = 0, (False,) * n_layer, 0.0
    if a == "gemma3":
        window = gguf.get("gemma3.attention.sliding_window", "int", 0, 0, 1 << 30)
        rope_base_sliding = gguf.get("gemma3.rope.freq_base_swa", "f32", 10000.0, 1.0, 1e12)
        sliding = _sliding_layers(gguf, n_layer) if window else sliding
    rope = _read_rope(gguf, a, d_k, n_ctx_train)
    # The 27B of Gemma 3 scales its queries by the width per head of the residual stream (llama.cpp, gemma3.cpp).
    per_head = n_embd // n_head if a == "gemma3" and n_layer == 62 else d_k
    return ModelConfig(
        architecture=a,
        name=gguf.get("general.name", "str", gguf.path.stem),
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=_uniform(gguf, f"{a}.feed_forward_length", None, n_layer),
        n_head=n_head,
        n_head_kv=n_head_kv,
        d_k=d_k,
        d_v=d_v,
        n_vocab=_n_vocab(gguf, a),
        n_ctx_train=n_ctx_train,
        norm_eps=gguf.require(f"{a}.attention.layer_norm_rms_epsilon", "f32", 0.0, 1.0),
        rope=rope,
        rope_sliding=RopeConfig(rope.n_rot, rope_base_sliding) if any(sliding) else rope,
        window=window,
        sliding=sliding,
        attention_scale=1.0 / per_head**0.5,
        embedding_scale=float(np.sqrt(np.float32(n_embd))) if a == "gemma3" else 1.0,
        final_softcap=gguf.get(f"{a}.final_logit_softcapping", "f32", 0.0, 0.0, 1e6) if a == "gemma3" else 0.0,
    )


def _uniform(gguf: GGUF, key: str, default: int | None, n_layer: int) -> int:
    """A count that may be given once or per layer; per-layer values must all be equal."""
    if key not in gguf.metadata and default is not None:
        return default
    if gguf.kinds.get(key, "").endswith("[]"):
        values = gguf.require(key, "int[]", 1, MAX_DIMENSION)
        if len(values) < n_layer:
            gguf.refuse(key, f"has {len(values)} elements for {n_layer} layers: convert the model again")
        if int(values.min()) != int(values.max()):
            raise ModelError(f"{gguf.path}: {key} differs from layer to layer, which is not supported.")
        return int(values[0])
    return gguf.require(key, "int", 1, MAX_DIMENSION)


def _n_vocab(gguf: GGUF, a: str) -> int:
    """Rows of the output: the length of the token list, or vocab_size where a file has no tokenizer."""
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None:
        return len(gguf.require("tokenizer.ggml.tokens", "str[]"))
    return gguf.require(f"{a}.vocab_size", "int", 1, 1 << 24)


def _sliding_layers(gguf: GGUF, n_layer: int) -> tuple[bool, ...]:
    """Which layers slide: every n-th is global (n = 6 unless given), or a list of booleans."""
    key = "gemma3.attention.sliding_window_pattern"
    if gguf.kinds.get(key) == "bool[]":
        values = gguf.require(key, "bool[]")
        if len(values) < n_layer:
            gguf.refuse(key, f"has {len(values)} elements for {n_layer} layers: convert the model again")
        return tuple(bool(v) for v in values[:n_layer])
    pattern = gguf.get(key, "int", 6, 1, MAX_LAYERS)
    return tuple(il % pattern < pattern - 1 for il in range(n_layer))


def _read_rope(gguf: GGUF, a: str, d_k: int, n_ctx_train: int) -> RopeConfig:
    n_rot = gguf.get(f"{a}.rope.dimension_count", "int", d_k, 2, 4096)
    if n_rot != d_k:
        gguf.refuse(f"{a}.rope.dimension_count", f"is {n_rot}, but {a} rotates whole heads of {d_k}")
    if n_rot % 2:
        gguf.refuse(f"{a}.rope.dimension_count", f"is {n_rot}, an odd number")
    base = gguf.get(f"{a}.rope.freq_base", "f32", 10000.0, 1.0, 1e12)
    kind = gguf.get(f"{a}.rope.scaling.type", "str", "linear")
    factor = gguf.get(f"{a}.rope.scaling.factor", "f32", cast(float, 0.0), 0.0, 1e6)
    factor = factor or gguf.get(f"{a}.rope.scale_linear", "f32", 1.0, 0.0, 1e6) or 1.0
    if kind == "none":
        return RopeConfig(n_rot, base)
    if kind == "linear":
        return RopeConfig(n_rot, base, 1.0 / factor)
    if kind != "yarn":
        raise ModelError(f"{gguf.path}: rope scaling {shown(kind)!r} is not supported; use none, linear or yarn.")
    if base <= 1.0:
        gguf.refuse(f"{a}.rope.freq_base", f"is {base}, which yarn cannot scale: convert the model again")
    return RopeConfig(
        n_rot,
        base,
        1.0 / factor,
        gguf.get(f"{a}.rope.scaling.original_context_length", "int", n_ctx_train, 1, 1 << 30),
        gguf.get(f"{a}.rope.scaling.attn_factor", "f32", 1.0, 0.0, 1e3),
    )
