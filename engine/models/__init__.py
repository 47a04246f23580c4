"""Forward passes, one file per architecture family, written against the operations of a backend."""

from typing import Any

from engine.config import ModelConfig
from engine.gguf import GGUF
from engine.models.base import Model
from engine.models.gemma3 import Gemma3
from engine.models.llama import Llama

FAMILIES: dict[str, type[Model]] = {"llama": Llama, "qwen2": Llama, "qwen3": Llama, "gemma3": Gemma3}


def build(config: ModelConfig, gguf: GGUF, ops: Any, n_ctx: int, half: bool) -> Model:
    """The model of a checked file on a backend, with a cache for ``n_ctx`` positions (float16 if ``half``)."""
    model = FAMILIES[config.architecture](config, gguf, ops, n_ctx, half)
    model.check_complete()
    return model
