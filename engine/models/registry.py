"""The registry of all architectures that the engine supports, and the functions that build a model from a file."""

from dataclasses import replace

import numpy as np

from engine.cache.types import F16, Types
from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.models.architecture import Architecture
from engine.models.base import Model
from engine.models.config import ASSISTANT, DFLASH, EAGLE3, ModelConfig
from engine.models.dflash import DFlash, load_dflash
from engine.models.dflash_config import with_dflash
from engine.models.eagle3 import load_eagle3, with_eagle3
from engine.models.families import (
    apertus,
    arcee,
    bailingmoe,
    bailingmoe2,
    bert,
    cohere,
    deepseek2,
    deepseek4,
    deepseek32,
    dots1,
    ernie4_5,
    exaone4,
    falcon_h1,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm4,
    glm4moe,
    gpt2,
    gpt_oss,
    granite,
    hunyuan,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    mimo2,
    minimax_m2,
    mistral3,
    nemotron_h,
    olmo2,
    phi3,
    qwen,
    qwen3next,
    qwen35,
    seed_oss,
    smollm3,
    step35,
)
from engine.models.families.deepseek4 import drafting_layer
from engine.models.families.gemma4_config import read as read_gemma4
from engine.models.kinds import check_kind, check_towers, unsupported
from engine.models.metadata import Metadata
from engine.models.mtp import MTP, kind_of_network, load_mtp
from engine.models.placement import Placement
from engine.models.streams_mtp import load_streams_mtp
from engine.ops.operations import Ops

FAMILIES = (
    llama,
    llama4,
    qwen,
    qwen35,
    qwen3next,
    gemma2,
    gemma3,
    gemma3n,
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
    lfm2,
    nemotron_h,
    falcon_h1,
    gpt2,
    cohere,
    gpt_oss,
    glm4,
    glm4moe,
    dots1,
    bailingmoe,
    bailingmoe2,
    minimax_m2,
    mimo2,
    step35,
    deepseek2,
    kimi_linear,
    deepseek32,
    deepseek4,
    bert,
)
"""The modules of the families, in the order of the book's table."""

ARCHITECTURES: dict[str, Architecture] = {a.name: a for family in FAMILIES for a in family.ARCHITECTURES}
"""Every architecture by its name in files."""

DS4 = "mtp.0.e_proj.weight"
"""A tensor that only the separate layers of ds4 have."""


def read_config(gguf: GGUF) -> ModelConfig:
    """The configuration of a file.

    Raises ModelError if the file is not a model or has an architecture that the engine does not support, and GGUFError for
    invalid values.
    """
    check_kind(gguf)
    name = gguf.require("general.architecture", "str")
    if name == ASSISTANT:
        raise ModelError(
            f"{gguf.path}: a {ASSISTANT} only drafts for a gemma4 model; give it as the draft model (draft_model=...)."
        )
    if name in (EAGLE3, DFLASH):
        raise ModelError(
            f"{gguf.path}: the network {name} only drafts for its model; give it as the draft model (draft_model=...)."
        )
    if name not in ARCHITECTURES:
        raise unsupported(gguf, name, tuple(ARCHITECTURES))
    check_towers(gguf)
    if is_mtp(gguf):
        raise ModelError(
            f"{gguf.path} is a layer that only drafts for a {name} model; give it as the draft model (draft_model=...)."
        )
    entry = ARCHITECTURES[name]
    return entry.read(Metadata(gguf, name, entry.n_mtp))


def read_assistant(gguf: GGUF) -> ModelConfig:
    """The configuration of a file with the architecture :data:`engine.models.config.ASSISTANT`.

    Raises ModelError or GGUFError for invalid values.
    """
    return read_gemma4(Metadata(gguf, ASSISTANT))


def is_mtp(gguf: GGUF) -> bool:
    """Whether a file contains only a layer that drafts for a model.

    In files from llama.cpp, the layer is numbered after the layers of the model.  Files from ds4, for deepseek4 models, have
    different tensor names.
    """
    architecture, tensors = gguf.metadata.get("general.architecture"), gguf.tensors
    if DS4 in tensors or kind_of_network(gguf):
        return True
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES or not ARCHITECTURES[architecture].drafts:
        return False
    drafts = any(name.endswith(".nextn.eh_proj.weight") for name in tensors)
    return drafts and not any(name.startswith("blk.0.") for name in tensors)


def with_mtp(config: ModelConfig, gguf: GGUF, layer: GGUF) -> ModelConfig:
    """A copy of the configuration with the layer that drafts from another file, for which :func:`is_mtp` is true.

    It replaces a layer that drafts in the file of the model.  Raises ModelError if the layer belongs to another model.
    """
    if kind := kind_of_network(layer):
        return {EAGLE3: with_eagle3, DFLASH: with_dflash}[kind](config, gguf, layer)
    name = "deepseek4" if DS4 in layer.tensors else layer.require("general.architecture", "str")
    drafts = f"{layer.path} drafts for {name} models"
    if config.architecture != name:
        raise ModelError(f"{drafts}, and {gguf.path} is {config.architecture}.")
    config = replace(config, mtp_apart=True, mtp_problem="")
    if name == "deepseek4":
        return replace(config, mtp=(drafting_layer(Metadata(gguf, name)),))
    own = ARCHITECTURES[name].read(Metadata(layer, name, ARCHITECTURES[name].n_mtp))
    if not own.mtp:
        raise ModelError(f"{layer.path} cannot draft: {own.mtp_problem}.")
    if own.n_embd != config.n_embd:
        raise ModelError(f"{drafts} with embeddings of {own.n_embd}, and {gguf.path} has {config.n_embd}.")
    if own.n_layer != config.n_layer:
        raise ModelError(f"{drafts} of {own.n_layer} layers, and {gguf.path} has {config.n_layer}.")
    return replace(config, mtp=own.mtp)


def build(
    config: ModelConfig,
    gguf: GGUF,
    ops: Ops | Placement,
    n_ctx: int,
    types: Types = F16,
    rewind: int = 1,
    n_sequences: int = 1,
    capacity: int = 0,
    prompt_rows: int = 0,
    budget: int = 0,
) -> Model:
    """Build the model of a checked file on a backend.  Layers that are not in the configuration are not loaded.

    ops: the backend, or the backends of all parts.
    n_ctx: the maximum number of positions of a sequence.
    types: the element types of keys and values.
    rewind: the number of tokens that recurrent layers can always roll back.
    n_sequences: the number of sequences in the cache.
    capacity: the number of positions that all sequences share; 0: ``n_ctx`` for each sequence.
    prompt_rows: the maximum number of rows in a pass that reads a prompt; 0: the maximum of the backend.
    budget: the number of positions of a prompt that layers without a window keep; 0: all.

    Raises ModelError if the tensors do not match the configuration.
    """
    sizes = n_ctx, types, rewind, n_sequences, capacity, prompt_rows, budget
    placement = ops if isinstance(ops, Placement) else Placement.whole(config, ops)
    # Numbers of a damaged file may overflow.  The logits are checked for this, so warnings of NumPy are not needed.
    with np.errstate(all="ignore"):
        model = ARCHITECTURES[config.architecture].model(config, gguf, placement, *sizes)
    if not model.config.mtp or model.config.mtp_apart:
        drafting = model.config.drafting
        model.ignore(*(name for name in gguf.tensors if name.startswith(drafting)))
    model.check_complete()
    return model


def load_layer_that_drafts(model: Model, layer: GGUF) -> MTP | DFlash:
    """Load the layer that drafts from another file.  :func:`with_mtp` must have added it to the configuration of the model.

    Raises ModelError if the tensors do not match the model.
    """
    if kind := kind_of_network(layer):
        return load_eagle3(model, layer) if kind == EAGLE3 else load_dflash(model, layer)
    return load_mtp(model, layer) if model.config.streams is None else load_streams_mtp(model, layer)


def can_be_shared(config: ModelConfig) -> bool:
    """Whether several devices can share the layers of a model of this architecture (``engine/models/sharing.py``)."""
    return ARCHITECTURES[config.architecture].model.can_be_shared


def without_mtp(config: ModelConfig) -> ModelConfig:
    """A copy of the configuration without the layer that drafts."""
    return replace(config, mtp=(), mtp_problem="")
