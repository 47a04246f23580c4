"""Reading the metadata into an immutable description of the model.

Every number is read with its exact type and range.  Whether it matches the shapes of the tensors is checked where each
tensor is loaded (``engine/models/weights.py``).  Keys and defaults are those of llama.cpp.
"""

import numpy as np

from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.gguf.header import shown
from engine.models.config import ARCHITECTURES, ASSISTANT, DeltaNetConfig, ExpertsConfig, ModelConfig, RopeConfig
from engine.models.gemma4_config import read_gemma4
from engine.models.metadata import MAX_DIMENSION, MAX_LAYERS, flags, n_vocab, read_rope, uniform


def read_config(gguf: GGUF) -> ModelConfig:
    """The configuration of a file.  Raises ModelError for an architecture that this engine cannot run, and GGUFError for
    invalid values."""
    architecture = gguf.require("general.architecture", "str")
    if architecture == ASSISTANT:
        raise ModelError(f"{gguf.path}: a {ASSISTANT} only drafts for a gemma4 model; give it with --draft-model.")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{gguf.path}: architecture {shown(architecture)!r} is not supported; "
            f"this engine runs {', '.join(ARCHITECTURES)}."
        )
    if architecture == "gemma4":
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
    n_head = uniform(gguf, f"{a}.attention.head_count", None, n_blocks)
    n_head_kv = uniform(gguf, f"{a}.attention.head_count_kv", n_head, n_blocks)
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
    rope = read_rope(gguf, a, d_k, n_ctx_train, partial=hybrid)
    if hybrid:
        _check_sections(gguf, a, rope.n_rot)
        if d_v != d_k:
            gguf.refuse(f"{a}.attention.value_length", f"is {d_v}, but the gates of {a} are as long as its keys, {d_k}")
    # Gemma 3 27B scales queries by the width of the residual stream per head (llama.cpp, gemma3.cpp).
    per_head = n_embd // n_head if a == "gemma3" and n_layer == 62 else d_k
    return ModelConfig(
        architecture=a,
        name=gguf.get("general.name", "str", gguf.path.stem),
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=0 if mixture else uniform(gguf, f"{a}.feed_forward_length", None, n_blocks),
        n_head=n_head,
        n_head_kv=n_head_kv,
        d_k=d_k,
        d_v=d_v,
        n_vocab=n_vocab(gguf, a),
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
    """For each layer, whether it is a delta net.  The file gives n (default 4; every n-th layer is attention) or a list of
    booleans."""
    key = f"{a}.attention.recurrent_layers"
    if key in gguf.metadata:
        return flags(gguf, key, n_layer)
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
    """Refuse sections in which a pair uses the last stream of positions.  All other streams are equal for text, so other
    sections have no effect."""
    key = f"{a}.rope.dimension_sections"
    values = [int(v) for v in gguf.require(key, "int[]")]
    if len(values) != 4 or min(values) < 0 or sum(values) == 0:
        gguf.refuse(key, "must be four counts, as [11, 11, 10, 0]: convert the model again")
    for i in range(n_rot // 2):
        k = i % sum(values)
        if k >= 3 * values[k % 3]:
            gguf.refuse(key, f"is {values}, which leaves pair {i} without a position in text: convert the model again")


def _sliding_layers(gguf: GGUF, n_layer: int) -> tuple[bool, ...]:
    """For each layer, whether it slides.  The file gives n (default 6; every n-th layer is global) or a list of booleans."""
    key = "gemma3.attention.sliding_window_pattern"
    if gguf.kinds.get(key) == "bool[]":
        return flags(gguf, key, n_layer)
    pattern = gguf.get(key, "int", 6, 1, MAX_LAYERS)
    return tuple(il % pattern < pattern - 1 for il in range(n_layer))
