"""Metadata fields that several architectures share, each read with its exact type and range."""

from typing import cast

from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.gguf.header import shown
from engine.models.config import RopeConfig

MAX_DIMENSION = 1 << 20
MAX_LAYERS = 1024


def uniform(gguf: GGUF, key: str, default: int | None, n_layer: int) -> int:
    """A count that may be given once or per layer; values per layer must all be equal."""
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


def n_vocab(gguf: GGUF, a: str) -> int:
    """Rows of the output: the length of the token list, or vocab_size if the file has no tokenizer."""
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None:
        return len(gguf.require("tokenizer.ggml.tokens", "str[]"))
    return gguf.require(f"{a}.vocab_size", "int", 1, 1 << 24)


def flags(gguf: GGUF, key: str, n_layer: int) -> tuple[bool, ...]:
    """One boolean per layer."""
    values = gguf.require(key, "bool[]")
    if len(values) < n_layer:
        gguf.refuse(key, f"has {len(values)} elements for {n_layer} layers: convert the model again")
    return tuple(bool(v) for v in values[:n_layer])


def read_rope(gguf: GGUF, a: str, d_k: int, n_ctx_train: int, partial: bool) -> RopeConfig:
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
