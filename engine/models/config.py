"""From metadata to a frozen description of the model.

Every number here has been read with its exact type and range; that it agrees with the shapes of the tensors is checked
where each tensor is taken (``engine/models/weights.py``).  Keys and defaults are those of llama.cpp.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np

from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.gguf.header import shown

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "qwen35", "qwen35moe", "gemma4")

ASSISTANT = "gemma4-assistant"
"""What drafts for a gemma4 model, and cannot run alone."""

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
class DeltaNetConfig:
    """Sizes of gated delta nets: n_k heads of queries and keys and n_v of values, of ``state_size`` each; ``n_conv``: taps of
    the convolution."""

    n_k: int
    n_v: int
    state_size: int
    n_conv: int

    @property
    def n_channels(self) -> int:
        """Channels of the convolution: q, k, v."""
        return (2 * self.n_k + self.n_v) * self.state_size


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of a mixture: a row uses n_used of n_expert networks of width n_ff, and one of n_ff_shared if that is not 0."""

    n_expert: int
    n_used: int
    n_ff: int
    n_ff_shared: int


@dataclass(frozen=True)
class ModelConfig:
    """What the forward pass needs to know.  Sizes are counts of elements; ``sliding[il]`` says whether layer il sees
    only ``window`` positions, ``recurrent[il]`` whether it is a delta net; ``rope_sliding`` is the rotation of sliding
    layers. ``n_mtp``: layers behind the n_layer of the trunk that draft tokens (multi-token prediction), of the
    ``n_mtp_in_file``.

    gemma4: sliding layers have ``n_head_kv_sliding`` heads of keys of ``d_sliding`` elements (0: as the others); layers from
    ``n_kv_layer`` on have no keys and values of their own and a feed-forward network of ``n_ff_tail``; ``n_per_layer``: width
    of per-layer embeddings (0: none).  ``n_embd_out``: of an assistant, the width of the model that it drafts for.
    """

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
    recurrent: tuple[bool, ...] = ()
    delta_net: DeltaNetConfig | None = None
    experts: ExpertsConfig | None = None
    n_mtp: int = 0
    n_mtp_in_file: int = 0
    n_head_kv_sliding: int = 0
    d_sliding: int = 0
    n_kv_layer: int = 0
    n_ff_tail: int = 0
    n_per_layer: int = 0
    n_embd_out: int = 0

    def heads(self, il: int) -> tuple[int, int, int]:
        """(n_head_kv, d_k, d_v) of layer il."""
        if il < self.n_layer and self.sliding[il] and self.d_sliding:
            return self.n_head_kv_sliding, self.d_sliding, self.d_sliding
        return self.n_head_kv, self.d_k, self.d_v

    def memory(self, il: int) -> int:
        """The layer whose keys and values layer il reads: its own, or those of the last layer of its kind that has some."""
        if il < self.n_kv_layer or il >= self.n_layer:
            return il
        return self.n_kv_layer - (2 if self.sliding[il] else 1)


def read_config(gguf: GGUF) -> ModelConfig:
    """The configuration of a file; ModelError for an architecture this engine cannot run, GGUFError for bad values."""
    architecture = gguf.require("general.architecture", "str")
    if architecture == ASSISTANT:
        raise ModelError(f"{gguf.path}: a {ASSISTANT} only drafts for a gemma4 model; give it with --draft-model.")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{gguf.path}: architecture {shown(architecture)!r} is not supported; "
            f"this engine runs {', '.join(ARCHITECTURES)}."
        )
    if architecture == "gemma4":
        from engine.models.gemma4_config import read_gemma4

        return read_gemma4(gguf, architecture)
    a = architecture
    mixture, hybrid = a in ("qwen3moe", "qwen35moe"), a in ("qwen35", "qwen35moe")
    n_expert = gguf.get(f"{a}.expert_count", "int", 0, 0, MAX_DIMENSION)
    if n_expert and not mixture:
        raise ModelError(f"{gguf.path}: {a} models with experts are not supported; use a dense {a} model.")
    n_blocks = gguf.require(f"{a}.block_count", "int", 1, MAX_LAYERS)
    n_mtp = gguf.get(f"{a}.nextn_predict_layers", "int", 0, 0, n_blocks - 1) if hybrid else 0
    if n_mtp > 1:
        gguf.refuse(f"{a}.nextn_predict_layers", f"is {n_mtp}, and drafts by at most one layer are supported")
    n_layer = n_blocks - n_mtp
    n_embd = gguf.require(f"{a}.embedding_length", "int", 1, MAX_DIMENSION)
    n_head = _uniform(gguf, f"{a}.attention.head_count", None, n_blocks)
    n_head_kv = _uniform(gguf, f"{a}.attention.head_count_kv", n_head, n_blocks)
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
    rope = _read_rope(gguf, a, d_k, n_ctx_train, partial=hybrid)
    if hybrid:
        _check_sections(gguf, a, rope.n_rot)
        if d_v != d_k:
            gguf.refuse(f"{a}.attention.value_length", f"is {d_v}, but the gates of {a} are as long as its keys, {d_k}")
    # The 27B of Gemma 3 scales its queries by the width per head of the residual stream (llama.cpp, gemma3.cpp).
    per_head = n_embd // n_head if a == "gemma3" and n_layer == 62 else d_k
    return ModelConfig(
        architecture=a,
        name=gguf.get("general.name", "str", gguf.path.stem),
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=0 if mixture else _uniform(gguf, f"{a}.feed_forward_length", None, n_blocks),
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
        recurrent=_recurrent_layers(gguf, a, n_layer) if hybrid else (False,) * n_layer,
        delta_net=_read_delta_net(gguf, a) if hybrid else None,
        experts=_read_experts(gguf, a) if mixture else None,
        n_mtp=n_mtp if f"blk.{n_layer}.nextn.eh_proj.weight" in gguf.tensors else 0,
        n_mtp_in_file=n_mtp,
        n_kv_layer=n_layer,
    )


def _recurrent_layers(gguf: GGUF, a: str, n_layer: int) -> tuple[bool, ...]:
    """Which layers are delta nets: all but every n-th (n = 4 unless given), or a list of booleans."""
    key = f"{a}.attention.recurrent_layers"
    if key in gguf.metadata:
        return _flags(gguf, key, n_layer)
    interval = gguf.get(f"{a}.full_attention_interval", "int", 4, 1, MAX_LAYERS)
    return tuple((il + 1) % interval != 0 for il in range(n_layer))


def _read_delta_net(gguf: GGUF, a: str) -> DeltaNetConfig:
    n_k = gguf.require(f"{a}.ssm.group_count", "int", 1, 4096)
    n_v = gguf.require(f"{a}.ssm.time_step_rank", "int", 1, 4096)
    d = gguf.require(f"{a}.ssm.state_size", "int", 1, 4096)
    if n_v % n_k:
        gguf.refuse(f"{a}.ssm.time_step_rank", f"is {n_v}, not a multiple of the {n_k} heads of ssm.group_count")
    if d % 32 or d > 128:
        gguf.refuse(f"{a}.ssm.state_size", f"is {d}, and heads of 32, 64, 96 or 128 are supported")
    inner = gguf.require(f"{a}.ssm.inner_size", "int", 1, MAX_DIMENSION)
    if inner != n_v * d:
        gguf.refuse(f"{a}.ssm.inner_size", f"is {inner}, but {n_v} heads of {d} have {n_v * d} elements")
    return DeltaNetConfig(n_k, n_v, d, gguf.require(f"{a}.ssm.conv_kernel", "int", 2, 8))


def _read_experts(gguf: GGUF, a: str) -> ExpertsConfig:
    n_expert = gguf.require(f"{a}.expert_count", "int", 1, 1024)
    n_used = gguf.require(f"{a}.expert_used_count", "int", 1, min(n_expert, 32))
    whole = f"{a}.feed_forward_length"
    n_ff = 0 if gguf.kinds.get(whole, "").endswith("[]") else gguf.get(whole, "int", 0, 0, MAX_DIMENSION)
    for key in ("expert_group_count", "expert_group_used_count"):
        if gguf.get(f"{a}.{key}", "int", 0, 0, MAX_DIMENSION) > 1:
            raise ModelError(f"{gguf.path}: experts in groups ({a}.{key}) are not supported.")

    def width(key: str, fallback: int) -> int:
        if f"{a}.{key}" in gguf.metadata or fallback < 1:
            return gguf.require(f"{a}.{key}", "int", 1, MAX_DIMENSION)
        return fallback

    shared = width("expert_shared_feed_forward_length", n_ff) if a == "qwen35moe" else 0
    return ExpertsConfig(n_expert, n_used, width("expert_feed_forward_length", n_ff // n_used), shared)


def _check_sections(gguf: GGUF, a: str, n_rot: int) -> None:
    """In text all streams of positions but the last are the same, so sections do not show as long as no pair uses the
    last."""
    key = f"{a}.rope.dimension_sections"
    values = [int(v) for v in gguf.require(key, "int[]")]
    if len(values) != 4 or min(values) < 0 or sum(values) == 0:
        gguf.refuse(key, "must be four counts, as [11, 11, 10, 0]: convert the model again")
    for i in range(n_rot // 2):
        k = i % sum(values)
        if k >= 3 * values[k % 3]:
            gguf.refuse(key, f"is {values}, which leaves pair {i} without a position in text: convert the model again")


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


def _flags(gguf: GGUF, key: str, n_layer: int) -> tuple[bool, ...]:
    """A boolean per layer."""
    values = gguf.require(key, "bool[]")
    if len(values) < n_layer:
        gguf.refuse(key, f"has {len(values)} elements for {n_layer} layers: convert the model again")
    return tuple(bool(v) for v in values[:n_layer])


def _sliding_layers(gguf: GGUF, n_layer: int) -> tuple[bool, ...]:
    """Which layers slide: every n-th is global (n = 6 unless given), or a list of booleans."""
    key = "gemma3.attention.sliding_window_pattern"
    if gguf.kinds.get(key) == "bool[]":
        return _flags(gguf, key, n_layer)
    pattern = gguf.get(key, "int", 6, 1, MAX_LAYERS)
    return tuple(il % pattern < pattern - 1 for il in range(n_layer))


def _read_rope(gguf: GGUF, a: str, d_k: int, n_ctx_train: int, partial: bool) -> RopeConfig:
    n_rot = gguf.get(f"{a}.rope.dimension_count", "int", d_k, 2, 4096)
    if n_rot > d_k or (n_rot != d_k and not partial):
        most = "at most" if partial else "whole"
        gguf.refuse(f"{a}.rope.dimension_count", f"is {n_rot}, but {a} rotates {most} heads of {d_k}")
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
