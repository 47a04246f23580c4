"""The metadata of gemma4 models and of their assistants (keys and defaults of llama.cpp, ``src/models/gemma4.cpp``)."""

from typing import Any

import numpy as np

from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.models.config import ASSISTANT, ExpertsConfig, ModelConfig, RopeConfig
from engine.models.metadata import MAX_DIMENSION, MAX_LAYERS, flags, n_vocab, read_rope

SOFTCAP = 30.0
"""The bound on logits if the file does not specify one."""


def read_gemma4(gguf: GGUF, a: str) -> ModelConfig:
    """The configuration of a file of architecture ``a``: "gemma4" or :data:`engine.models.config.ASSISTANT`."""
    assistant = a == ASSISTANT
    n_layer = gguf.require(f"{a}.block_count", "int", 1, MAX_LAYERS)
    n_embd = gguf.require(f"{a}.embedding_length", "int", 1, MAX_DIMENSION)
    sliding = flags(gguf, f"{a}.attention.sliding_window_pattern", n_layer)
    window = gguf.require(f"{a}.attention.sliding_window", "int", 1, 1 << 30)
    d = _width(gguf, a, "", 0)
    d_sliding = _width(gguf, a, "_swa", d)
    n_head = _by_kind(gguf, f"{a}.attention.head_count", sliding)
    if n_head[0] != n_head[1]:
        raise ModelError(f"{gguf.path}: {a}.attention.head_count differs from layer to layer, which is not supported.")
    n_head_kv = _by_kind(gguf, f"{a}.attention.head_count_kv", sliding, n_head[0])
    for n in n_head_kv:
        if n_head[0] % n:
            gguf.refuse(f"{a}.attention.head_count_kv", f"is {n}, which does not divide the {n_head[0]} query heads")
    # An assistant has no keys and values, whatever this value is.
    shared = 0 if assistant else gguf.get(f"{a}.attention.shared_kv_layers", "int", 0, 0, n_layer)
    n_kv_layer = n_layer - shared
    if shared and (n_kv_layer < 2 or not sliding[n_kv_layer - 2] or sliding[n_kv_layer - 1]):
        gguf.refuse(
            f"{a}.attention.shared_kv_layers",
            f"is {shared}, but the last two layers before those must be one that slides and one that does not",
        )
    n_ff, n_ff_tail = _feed_forward(gguf, a, n_layer, n_kv_layer)
    n_ctx_train = gguf.require(f"{a}.context_length", "int", 1, 1 << 30)
    rope = read_rope(gguf, a, d, n_ctx_train, partial=True)
    n_rot_sliding = gguf.get(f"{a}.rope.dimension_count_swa", "int", min(rope.n_rot, d_sliding), 2, 4096)
    if n_rot_sliding > d_sliding or n_rot_sliding % 2:
        gguf.refuse(f"{a}.rope.dimension_count_swa", f"is {n_rot_sliding}, for heads of {d_sliding}")
    base_sliding = gguf.get(f"{a}.rope.freq_base_swa", "f32", 10000.0, 1.0, 1e12)
    n_per_layer = 0
    if not assistant:
        n_per_layer = gguf.require(f"{a}.embedding_length_per_layer_input", "int", 0, MAX_DIMENSION)
    n_expert = gguf.get(f"{a}.expert_count", "int", 0, 0, 1024)
    if assistant and n_expert:
        raise ModelError(f"{gguf.path}: an assistant with experts is not supported.")
    return ModelConfig(
        architecture=a,
        name=gguf.get("general.name", "str", gguf.path.stem),
        n_layer=n_layer,
        n_embd=n_embd,
        n_ff=n_ff,
        n_head=n_head[0],
        n_head_kv=n_head_kv[1],
        d_k=d,
        d_v=d,
        n_vocab=n_vocab(gguf, a),
        n_ctx_train=n_ctx_train,
        norm_eps=gguf.require(f"{a}.attention.layer_norm_rms_epsilon", "f32", 0.0, 1.0),
        rope=rope,
        rope_sliding=RopeConfig(n_rot_sliding, base_sliding),
        window=window,
        sliding=sliding,
        attention_scale=1.0,
        embedding_scale=float(np.sqrt(np.float32(n_embd))),
        final_softcap=0.0 if assistant else gguf.get(f"{a}.final_logit_softcapping", "f32", SOFTCAP, 0.0, 1e6),
        recurrent=(False,) * n_layer,
        experts=_read_experts(gguf, a, n_expert) if n_expert else None,
        n_head_kv_sliding=n_head_kv[0],
        d_sliding=d_sliding,
        n_kv_layer=n_kv_layer,
        n_ff_tail=n_ff_tail,
        n_per_layer=n_per_layer,
        n_embd_out=gguf.require(f"{a}.embedding_length_out", "int", 1, MAX_DIMENSION) if assistant else 0,
    )


def _width(gguf: GGUF, a: str, kind: str, default: int) -> int:
    """The length of keys, which must equal that of values."""
    key, value = f"{a}.attention.key_length{kind}", f"{a}.attention.value_length{kind}"
    d = gguf.get(key, "int", default, 2, 4096) if default else gguf.require(key, "int", 2, 4096)
    if gguf.get(value, "int", d, 1, 4096) != d:
        gguf.refuse(value, f"is not {d}, the length of the keys: convert the model again")
    return d


def _per_layer(gguf: GGUF, key: str, n_layer: int, default: int = 0) -> list[int]:
    """A count for each layer, which may be given once for all layers."""
    if gguf.kinds.get(key, "").endswith("[]"):
        values: Any = gguf.require(key, "int[]", 1, MAX_DIMENSION)
        if len(values) < n_layer:
            gguf.refuse(key, f"has {len(values)} elements for {n_layer} layers: convert the model again")
        return [int(v) for v in values[:n_layer]]
    count = gguf.get(key, "int", default, 1, MAX_DIMENSION) if default else gguf.require(key, "int", 1, MAX_DIMENSION)
    return [count] * n_layer


def _by_kind(gguf: GGUF, key: str, sliding: tuple[bool, ...], default: int = 0) -> tuple[int, int]:
    """The counts of the sliding layers and of the other layers; a kind without layers gets the count of the other kind."""
    values = _per_layer(gguf, key, len(sliding), default)
    kinds = [{v for v, slides in zip(values, sliding, strict=True) if slides is kind} for kind in (True, False)]
    if max(map(len, kinds)) > 1:
        raise ModelError(f"{gguf.path}: {key} differs among layers of one kind, which is not supported.")
    first, second = (next(iter(kind), 0) for kind in kinds)
    return first or second, second or first


def _feed_forward(gguf: GGUF, a: str, n_layer: int, n_kv_layer: int) -> tuple[int, int]:
    """The widths of the networks of layers with keys and values of their own, and of layers without."""
    key = f"{a}.feed_forward_length"
    values = _per_layer(gguf, key, n_layer)
    own, tail = set(values[:n_kv_layer]), set(values[n_kv_layer:])
    if len(own) > 1 or len(tail) > 1:
        raise ModelError(f"{gguf.path}: {key} differs among layers of one kind, which is not supported.")
    n_ff = own.pop()
    return n_ff, tail.pop() if tail else n_ff


def _read_experts(gguf: GGUF, a: str, n_expert: int) -> ExpertsConfig:
    key = f"{a}.expert_feed_forward_length"
    widths = set(_per_layer(gguf, key, gguf.require(f"{a}.block_count", "int", 1, MAX_LAYERS)))
    if len(widths) > 1:
        raise ModelError(f"{gguf.path}: {key} differs from layer to layer, which is not supported.")
    n_used = gguf.require(f"{a}.expert_used_count", "int", 1, min(n_expert, 32))
    return ExpertsConfig(n_expert, n_used, widths.pop(), 0)
