"""The registry: every architecture that the engine runs, and how a file becomes a model."""

from dataclasses import replace

import numpy as np

from engine.cache.types import F16, F32, Types
from engine.checks import shown
from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.models.architecture import Architecture
from engine.models.base import Model
from engine.models.config import ASSISTANT, CompressedConfig, LayerConfig, ModelConfig
from engine.models.families import (
    apertus,
    arcee,
    deepseek2,
    deepseek4,
    ernie4_5,
    exaone4,
    gemma3,
    gemma4,
    glm4moe,
    gpt_oss,
    granite,
    hunyuan,
    llama,
    minimax_m2,
    mistral3,
    olmo2,
    phi3,
    qwen,
    qwen3next,
    qwen35,
    seed_oss,
    smollm3,
)
from engine.models.families.deepseek4 import drafting_layer
from engine.models.families.gemma4_config import read as read_gemma4
from engine.models.metadata import Metadata
from engine.ops import Ops

FAMILIES = (
    llama,
    qwen,
    qwen35,
    qwen3next,
    gemma3,
    gemma4,
    mistral3,
    phi3,
    granite,
    smollm3,
    olmo2,
    exaone4,
    ernie4_5,
    hunyuan,
    seed_oss,
    arcee,
    apertus,
    gpt_oss,
    glm4moe,
    minimax_m2,
    deepseek2,
    deepseek4,
)
"""The modules of the families, in the order of the book's table."""

ARCHITECTURES: dict[str, Architecture] = {a.name: a for family in FAMILIES for a in family.ARCHITECTURES}
"""Every architecture by its name in files."""


def read_config(gguf: GGUF) -> ModelConfig:
    """The configuration of a file.  Raises ModelError for an architecture that this engine cannot run, and GGUFError for
    invalid values."""
    name = gguf.require("general.architecture", "str")
    if name == ASSISTANT:
        raise ModelError(f"{gguf.path}: a {ASSISTANT} only drafts for a gemma4 model; give it with --draft-model.")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{gguf.path}: architecture {shown(name)!r} is not supported; this engine runs {', '.join(ARCHITECTURES)}."
        )
    if is_mtp(gguf):
        raise ModelError(f"{gguf.path} is a layer that only drafts for a {name} model; give it with --draft-model.")
    entry = ARCHITECTURES[name]
    return entry.read(Metadata(gguf, name, drafts=entry.drafts == "MTP"))


def read_assistant(gguf: GGUF) -> ModelConfig:
    """The configuration of a file of architecture :data:`engine.models.config.ASSISTANT`.  Raises ModelError or GGUFError for
    invalid values."""
    return read_gemma4(Metadata(gguf, ASSISTANT))


def is_mtp(gguf: GGUF) -> bool:
    """Whether a file has nothing but the layer that drafts for a deepseek4 model: that of llama.cpp, which is numbered after
    the layers of the model, or that of ds4, which has names of its own."""
    architecture, tensors = gguf.metadata.get("general.architecture"), gguf.tensors
    if not isinstance(architecture, str) or architecture != "deepseek4":
        return "mtp.0.e_proj.weight" in tensors
    alone = "blk.0.attn_norm.weight" not in tensors and any(name.endswith(".nextn.eh_proj.weight") for name in tensors)
    return alone or "mtp.0.e_proj.weight" in tensors


def with_mtp(config: ModelConfig, gguf: GGUF, layer: GGUF) -> ModelConfig:
    """The configuration of a model with the layer of another file (``is_mtp``), which drafts for it.  Raises ModelError if
    the model is of another architecture."""
    if config.architecture != "deepseek4":
        raise ModelError(f"{layer.path} drafts for deepseek4 models, and {gguf.path} is {config.architecture}.")
    return replace(config, mtp=drafting_layer(Metadata(gguf, config.architecture)))


def build(
    config: ModelConfig,
    gguf: GGUF,
    ops: Ops,
    n_ctx: int,
    types: Types = F16,
    rewind: int = 1,
    n_sequences: int = 1,
    capacity: int = 0,
) -> Model:
    """Build the model of a checked file on a backend, with a cache of these ``types`` for ``n_sequences`` sequences of
    ``n_ctx`` positions, which share ``capacity`` positions (0: ``n_ctx`` for each), and whose recurrent layers can roll back
    ``rewind`` tokens.  Layers that the configuration does not mention are not loaded.  Raises ModelError if the tensors do
    not match the configuration."""
    sizes = n_ctx, types, rewind, n_sequences, capacity
    # What a damaged file makes of its numbers shows in the logits, which are checked, and not in a warning of NumPy.
    with np.errstate(all="ignore"):
        model = ARCHITECTURES[config.architecture].model(config, gguf, ops, *sizes)
    model.check_complete()
    return model


def with_rounding(config: ModelConfig, types: Types, gguf: GGUF) -> ModelConfig:
    """The configuration of a deepseek4 model that rounds what it stores as ds4 does.  Raises ModelError if that is not
    defined for the model or for the types of its cache."""
    option = "ds4's rounding (--ds4-rounding, ds4_rounding)"
    if config.architecture != "deepseek4":
        raise ModelError(
            f"{gguf.path}: {option} is defined for deepseek4 models only, and this is {config.architecture}."
        )
    if types != F32:
        raise ModelError(
            f"{gguf.path}: {option} needs the cache type f32, because compressed rows are rounded where they are stored; "
            "give --cache-type f32 (cache_type)."
        )
    for mixer in config.compressed:
        if mixer.indexer is not None and mixer.indexer.d & (mixer.indexer.d - 1):
            raise ModelError(
                f"{gguf.path}: {option} needs an indexer whose keys have a power of two of elements, not {mixer.indexer.d}."
            )

    def rounded(layer: LayerConfig) -> LayerConfig:
        assert isinstance(layer.mixer, CompressedConfig)
        return replace(layer, mixer=replace(layer.mixer, rounded=True))

    mtp = None if config.mtp is None else rounded(config.mtp)
    return replace(config, layers=tuple(map(rounded, config.layers)), mtp=mtp)


def without_mtp(config: ModelConfig) -> ModelConfig:
    """A copy of the configuration without the layer that drafts."""
    return replace(config, mtp=None)
