"""The forward pass of each architecture."""

from dataclasses import replace

from engine.cache.types import F16, Types
from engine.gguf.file import GGUF
from engine.models.base import Model
from engine.models.config import ModelConfig
from engine.models.gemma3 import Gemma3
from engine.models.gemma4 import Gemma4
from engine.models.llama import Llama
from engine.models.qwen35 import Qwen35
from engine.ops import Ops

FAMILIES: dict[str, type[Model]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3moe"), Llama),
    **dict.fromkeys(("qwen35", "qwen35moe"), Qwen35),
    "gemma3": Gemma3,
    "gemma4": Gemma4,
}


def build(config: ModelConfig, gguf: GGUF, ops: Ops, n_ctx: int, types: Types = F16, slots: int = 2) -> Model:
    """Build the model of a checked file on a backend, with a cache of ``n_ctx`` positions of these ``types`` and with
    ``slots`` states of recurrent layers.  Layers that the configuration does not mention are not loaded.  Raises ModelError
    if the tensors do not match the configuration."""
    model = FAMILIES[config.architecture](config, gguf, ops, n_ctx, types, slots)
    model.check_complete()
    return model


def without_mtp(config: ModelConfig) -> ModelConfig:
    """A copy of the configuration without the layer that drafts."""
    return replace(config, n_mtp=0)
