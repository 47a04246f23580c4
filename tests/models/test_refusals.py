"""Files that the engine must not run: one sentence names what it lacks.

The files are the small models of ``tests/oracle`` with something added, changed or left out, as users meet it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.devices import open_device
from engine.errors import EngineError
from engine.gguf.file import read_gguf
from engine.models.registry import build, read_config, without_mtp
from tests.oracle.families import Family
from tests.oracle.models import CASES


@dataclass(frozen=True)
class Change:
    """A change of the model ``case``: keys and tensors (by shape) to add or replace, tensors to rename (to "": to leave out)
    and what the refusal says after the path."""

    case: str
    told: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    architecture: str = ""


CHANGES = {
    "architecture": Change(
        "gpt-oss", "architecture 'rwkv7' is not supported; this engine runs llama, ", architecture="rwkv7"
    ),
    "architecture with a relative": Change(
        "gpt-oss",
        "architecture 'jamba' is not supported; the nearest that runs is qwen35, and this engine runs llama, ",
        architecture="jamba",
    ),
    "a name of Ollama": Change(
        "gpt-oss",
        "was made by Ollama in a form of its own, with the architecture 'gptoss': take a GGUF file of this model that "
        "llama.cpp's converter has made, in which it is 'gpt-oss'.",
        architecture="gptoss",
    ),
    "vision": Change(
        "mistral3",
        "was made by Ollama in a form of its own, with tensors for images or sound in the file of the text (mm.0.weight): "
        "take a GGUF file of this model that llama.cpp's converter has made.",
        tensors={"v.blk.0.attn_q.weight": (8, 8), "mm.0.weight": (8, 8), "v.patch_embd.weight": (8, 8)},
    ),
    "adapter": Change(
        "granite",
        "tensors that a plain granite model does not have: blk.0.attn_q.weight.lora_a; this variant is not supported.",
        tensors={"blk.0.attn_q.weight.lora_a": (4, 8)},
    ),
    "mamba": Change(
        "granite",
        "tensors that a plain granite model does not have: blk.1.ssm_in.weight; this variant is not supported.",
        tensors={"blk.1.ssm_in.weight": (8, 8)},
    ),
    "bias of a convolution": Change(
        "lfm2",
        "tensors that a plain lfm2 model does not have: blk.0.shortconv.conv.bias; this variant is not supported.",
        tensors={"blk.0.shortconv.conv.bias": (96,)},
    ),
    "one norm for all heads": Change(
        "command-r",
        "tensor blk.0.attn_q_norm.weight has shape [16] where the metadata requires [5, 16]; the file is inconsistent.",
        tensors={"blk.0.attn_q_norm.weight": (16,), "blk.0.attn_k_norm.weight": (16,)},
    ),
    "positions that no layer has selected": Change(
        "glm-dsa-shared",
        "attention.indexer.types at byte",
        keys={"attention.indexer.types": [False, True, True, True, True]},
    ),
    "an indexer without a rank of queries": Change(
        "deepseek32",
        "is missing, and the queries of an indexer need it: convert the model again",
        keys={"attention.q_lora_rank": 0},
    ),
    "short keys of an indexer": Change(
        "deepseek32", "is 8, fewer than the 16 dimensions that are rotated", keys={"attention.indexer.key_length": 8}
    ),
    "no window": Change("cohere2", "is 0, outside 1", keys={"attention.sliding_window": 0}),
    "frames": Change(
        "llama4",
        "is 24, and frames of a power of two positions are supported",
        keys={"attention.sliding_window": 24},
    ),
    "taps": Change("lfm2", "is 1, outside 2", keys={"shortconv.l_cache": 1}),
    "other taps": Change(
        "lfm2moe",
        "tensor blk.0.shortconv.conv.weight has shape [80, 4] where the metadata requires [80, 3]; the file is "
        "inconsistent.",
        keys={"shortconv.l_cache": 3},
    ),
    "rows of a state": Change(
        "granitehybrid", "is 48, and multiples of 32 up to 256 are supported", keys={"ssm.state_size": 48}
    ),
    "odd heads": Change(
        "granitehybrid",
        "is 3, and an even number that divides the 192 elements is supported",
        keys={"ssm.time_step_rank": 3},
    ),
    "narrow heads": Change(
        "granitehybrid", "is 192, and heads of a multiple of 16 elements are supported", keys={"ssm.time_step_rank": 16}
    ),
    "groups of heads": Change("granitehybrid", "is 3, which does not divide the 4 heads", keys={"ssm.group_count": 3}),
    "experts of another width": Change(
        "nemotron_h_moe",
        "tensor blk.4.ffn_up_exps.weight has shape [7, 40, 80] where the metadata requires [7, 24, 80]; the file is "
        "inconsistent.",
        keys={"expert_feed_forward_length": [0, 40, 0, 0, 24]},
    ),
    "too many experts of a block": Change(
        "nemotron_h_moe", "is 8, and at most 7 are supported", keys={"expert_used_count": [0, 3, 0, 0, 8]}
    ),
    "other channels": Change(
        "granitehybrid",
        "tensor blk.0.ssm_in.weight has shape [516, 96] where the metadata requires [452, 96]; the file is inconsistent.",
        keys={"ssm.state_size": 32},
    ),
    "wide heads": Change(
        "kimi-linear", "is 160, and heads of 32, 64, 96 or 128 are supported", keys={"kda.head_dim": 160}
    ),
    "heads that are not aligned": Change(
        "kimi-linear", "is 6, and multiples of 4 up to 1024 are supported", keys={"attention.head_count": 6}
    ),
    "other taps of three convolutions": Change(
        "kimi-linear",
        "tensor blk.0.ssm_conv1d_q.weight has shape [1, 256, 1, 4] where the metadata requires [256, 3]; the file is "
        "inconsistent.",
        keys={"ssm.conv_kernel": 3},
    ),
    "gates of full rank": Change(
        "kimi-linear",
        "tensors that a plain kimi-linear model does not have: blk.0.ssm_g.weight; this variant is not supported.",
        tensors={"blk.0.ssm_g.weight": (256, 88)},
    ),
    "attention without heads": Change(
        "smollm3", "is 0, which does not divide the 5 query heads", keys={"attention.head_count_kv": 0}
    ),
    "other numbers of streams": Change("gemma3n", ": is 2, and 4 is supported", keys={"altup.num_inputs": 2}),
    "another active stream": Change("gemma3n", ": is 1, and 0 is supported", keys={"altup.active_idx": 1}),
    "sparsity of too few layers": Change(
        "gemma3n",
        "has 1 elements for 9 layers: convert the model again",
        keys={"activation_sparsity_scale": [1.5]},
    ),
    "a tail without a layer of each kind": Change(
        "gemma3n", "is 4, but the last two layers before those must be one", keys={"attention.shared_kv_layers": 4}
    ),
    "no low-rank residual": Change(
        "gemma3n",
        "tensor blk.0.laurel_l.weight is missing; the file is incomplete or of another architecture.",
        renamed={"blk.0.laurel_l.weight": ""},
    ),
    "scale of a router": Change(
        "glm4moe",
        "tensors that a plain glm4moe model does not have: blk.1.ffn_gate_inp.scale; this variant is not supported.",
        tensors={"blk.1.ffn_gate_inp.scale": (1,)},
    ),
    "a layer that drafts": Change(
        "glm4moe",
        "tensors that a plain glm4moe model does not have: blk.3.attn_sinks.weight; this variant is not supported; leave out "
        "the layers that draft (mtp=False).",
        tensors={"blk.3.attn_sinks.weight": (6,)},
    ),
    "scale of a shared network": Change(
        "glm4moe",
        "tensors that a plain glm4moe model does not have: blk.1.ffn_up_shexp.scale; this variant is not supported.",
        tensors={"blk.1.ffn_up_shexp.scale": (1,)},
    ),
    "sinks": Change(
        "smollm3",
        "tensors that a plain smollm3 model does not have: blk.0.attn_sinks.weight; this variant is not supported.",
        tensors={"blk.0.attn_sinks.weight": (4,)},
    ),
    "no sinks": Change(
        "gpt-oss",
        "tensor blk.1.attn_sinks.weight is missing; the file is incomplete or of another architecture.",
        renamed={"blk.1.attn_sinks.weight": ""},
    ),
    "early conversion": Change(
        "qwen3next",
        "tensor blk.0.ssm_in.weight is of an early conversion; convert the model again.",
        renamed={"blk.0.attn_qkv.weight": "blk.0.ssm_in.weight", "blk.0.attn_gate.weight": ""},
    ),
    "rope scaling": Change(
        "gpt-oss",
        "rope scaling 'dynamic' is not supported; use none, linear, yarn or longrope.",
        keys={"rope.scaling.type": "dynamic"},
    ),
    "router": Change(
        "glm4moe", "routers of kind 3 (glm4moe.expert_gating_func) are not supported.", keys={"expert_gating_func": 3}
    ),
    "layers that draft": Change(
        "glm4moe",
        "is 2, but of 9 layers, layer 3 drafts: convert the model again",
        keys={"nextn_predict_layers": 2, "block_count": 9},
    ),
    "looking ahead": Change(
        "smollm3",
        "is false: a model that looks ahead, as for embeddings, cannot generate text",
        keys={"attention.causal": False},
    ),
    "three sections": Change(
        "qwen3vl", "is [8, 4, 4], but must be four counts", keys={"rope.dimension_sections": [8, 4, 4]}
    ),
    "a negative section": Change(
        "qwen2vl", "is [9, 4, -1, 0], but must be four counts", keys={"rope.dimension_sections": [9, 4, -1, 0]}
    ),
    "a fourth section": Change(
        "qwen3vlmoe",
        "is [4, 4, 3, 1], but the last count must be 0",
        keys={"rope.dimension_sections": [4, 4, 3, 1]},
    ),
    "a parameter per layer": Change(
        "apertus", "has 1 elements instead of 3: convert the model again", keys={"xielu.alpha_p": [1.0]}
    ),
}


class Changed(Family):
    """A model whose file has some tensors under other names."""

    renamed: Mapping[str, str] = {}

    def tensors(self) -> dict[str, np.ndarray]:
        renamed = {self.renamed.get(name, name): value for name, value in super().tensors().items()}
        return {name: value for name, value in renamed.items() if name}


def write(change: Change, path: Path) -> Path:
    case = CASES[change.case]
    assert isinstance(case, Family)
    extra = {name: np.ones(shape, np.float32) for name, shape in change.tensors.items()}
    changed = replace(
        case,
        metadata={**case.metadata, **change.keys},
        extra={**case.extra, **extra},
        architecture=change.architecture or case.architecture,
    )
    made = Changed(**vars(changed))
    object.__setattr__(made, "renamed", change.renamed)
    return made.write_gguf(path)


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_lacking_is_named(name: str, tmp_path: Path) -> None:
    change = CHANGES[name]
    path = write(change, tmp_path / "model.gguf")
    with pytest.raises(EngineError) as caught:
        engine.load(path, n_ctx=64)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert change.told in said
    assert "\n" not in said


def test_a_layer_that_drafts_is_left_out(tmp_path: Path) -> None:
    path = write(CHANGES["a layer that drafts"], tmp_path / "model.gguf")
    gguf = read_gguf(path)
    assert build(without_mtp(read_config(gguf)), gguf, open_device("cpu"), 64).drafter is None


def test_scales_of_activations_change_nothing(tmp_path: Path) -> None:
    """NVFP4 files have them for hardware that multiplies 4 bits by 4 bits."""
    plain = engine.load(write(Change("smollm3", ""), tmp_path / "plain.gguf"), n_ctx=64, cache_type="f32")
    tensors = {"blk.0.attn_q.input_scale": (1,), "blk.1.ffn_down.input_scale": (1,)}
    scaled = engine.load(
        write(Change("smollm3", "", tensors=tensors), tmp_path / "scaled.gguf"), n_ctx=64, cache_type="f32"
    )
    assert np.array_equal(plain.logits([1, 2, 3]), scaled.logits([1, 2, 3]))
