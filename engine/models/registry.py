"""The registry: every architecture that the engine runs, and how a file becomes a model."""

from dataclasses import replace

import numpy as np

from engine.cache.types import F16, Types
from engine.errors import ModelError
from engine.gguf.file import GGUF
from engine.models.architecture import Architecture
from engine.models.base import Model
from engine.models.config import ASSISTANT, ModelConfig
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
from engine.models.kinds import check_kind, check_towers, unsupported
from engine.models.metadata import Metadata
from engine.models.mtp import MTP, load_mtp
from engine.models.streams_mtp import StreamsMTP
from engine.ops.operations import Ops

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

DS4 = "mtp.0.e_proj.weight"
"""A tensor that only ds4's files of layers have."""


def read_config(gguf: GGUF) -> ModelConfig:
    """The configuration of a file.  Raises ModelError for a file that is no model and for an architecture that this engine
    cannot run, and GGUFError for invalid values."""
    check_kind(gguf)
    name = gguf.require("general.architecture", "str")
    if name == ASSISTANT:
        raise ModelError(
            f"{gguf.path}: a {ASSISTANT} only drafts for a gemma4 model; give it as the draft model (draft_model=...)."
        )
    if name not in ARCHITECTURES:
        raise unsupported(gguf, name, tuple(ARCHITECTURES))
    check_towers(gguf)
    if is_mtp(gguf):
        raise ModelError(
            f"{gguf.path} is a layer that only drafts for a {name} model; give it as the draft model (draft_model=...)."
        )
    entry = ARCHITECTURES[name]
    return entry.read(Metadata(gguf, name, drafts=entry.drafts == "MTP"))


def read_assistant(gguf: GGUF) -> ModelConfig:
    """The configuration of a file of architecture :data:`engine.models.config.ASSISTANT`.  Raises ModelError or GGUFError for
    invalid values."""
    return read_gemma4(Metadata(gguf, ASSISTANT))


def is_mtp(gguf: GGUF) -> bool:
    """Whether a file has nothing but the layer that drafts for a model: that of llama.cpp, which is numbered after the layers
    of the model, or that of ds4 for deepseek4 models, which has names of its own."""
    architecture, tensors = gguf.metadata.get("general.architecture"), gguf.tensors
    if DS4 in tensors:
        return True
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES or not ARCHITECTURES[architecture].drafts:
        return False
    drafts = any(name.endswith(".nextn.eh_proj.weight") for name in tensors)
    return drafts and not any(name.startswith("blk.0.") for name in tensors)


def with_mtp(config: ModelConfig, gguf: GGUF, layer: GGUF) -> ModelConfig:
    """The configuration of a model with the layer of another file (``is_mtp``), which drafts in place of one in the model's
    own file.  Raises ModelError if it is the layer of another model."""
    name = "deepseek4" if DS4 in layer.tensors else layer.require("general.architecture", "str")
    drafts = f"{layer.path} drafts for {name} models"
    if config.architecture != name:
        raise ModelError(f"{drafts}, and {gguf.path} is {config.architecture}.")
    config = replace(config, mtp_apart=True, mtp_problem="")
    if name == "deepseek4":
        return replace(config, mtp=drafting_layer(Metadata(gguf, name)))
    own = ARCHITECTURES[name].read(Metadata(layer, name, drafts=True))
    if own.mtp is None:
        raise ModelError(f"{layer.path} cannot draft: {own.mtp_problem}.")
    if own.n_embd != config.n_embd:
        raise ModelError(f"{drafts} with embeddings of {own.n_embd}, and {gguf.path} has {config.n_embd}.")
    if own.n_layer != config.n_layer:
        raise ModelError(f"{drafts} of {own.n_layer} layers, and {gguf.path} has {config.n_layer}.")
    return replace(config, mtp=own.mtp)


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
    if model.config.mtp is None or model.config.mtp_apart:
        drafting = model.config.drafting
        model.ignore(*(name for name in gguf.tensors if name.startswith(drafting)))
    model.check_complete()
    return model


def load_layer_that_drafts(model: Model, layer: GGUF) -> MTP:
    """The layer of another file, which ``with_mtp`` has made a part of the model's configuration.  Raises ModelError if its
    tensors do not match the model."""
    return load_mtp(model, layer) if model.config.streams is None else StreamsMTP(model, layer)


def without_mtp(config: ModelConfig) -> ModelConfig:
    """A copy of the configuration without the layer that drafts."""
    return replace(config, mtp=None, mtp_problem="")
