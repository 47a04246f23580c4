"""Small random models, twice: as a checkpoint of ``transformers`` and as the GGUF file that the checkpoint converts to.

The weights come from raw PCG64 bits, which NumPy keeps the same in all its versions, so that a golden file needs to
hold logits only.  The conversion follows llama.cpp's ``convert_hf_to_gguf.py``: names by gguf-py's own map, rows of q
and k permuted for llama, 1 added to norms of gemma3 and qwen35, Llama 3's context extension as the tensor
``rope_freqs``, heads of values of a delta net in another order.  Gemma 4's weights are in ``gemma4.py``.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.models.delta_net_config import DeltaNetConfig
from engine.models.network_config import ExpertsConfig
from engine.synthetic.model import add_delta_net, add_widths
from engine.synthetic.shape import Gemma4Shape
from tests.oracle import gemma4
from tests.oracle.families import FAMILIES, Family
from tests.oracle.shared import (
    LENGTHS,
    N_CTX,
    N_VOCAB,
    POSITIONS,
    digest,
    finish,
    llama3_factors,
    permuted,
    random_prompts,
    uniform,
)

__all__ = [
    "CASES",
    "LENGTHS",
    "N_CTX",
    "N_VOCAB",
    "POSITIONS",
    "Case",
    "Family",
    "checkpoint",
    "fingerprint",
    "prompts",
    "write_gguf",
]


@dataclass(frozen=True)
class Case:
    """A model.  ``rope_scaling`` is in the words of ``transformers``; ``bias`` gives llama biases on q, k, v and the
    output of attention (qwen2 always has those of q, k, v); ``window``, ``pattern`` (every n-th layer is global),
    ``rope_base_sliding`` and ``softcap`` are gemma3's.

    ``experts`` of qwen3moe and qwen35moe; ``delta_net``, ``n_rot`` (rotated dimensions of a head, 0: all), ``pattern`` and
    ``conv_std`` (of the weights of the convolution) of qwen35 and qwen35moe, which have an MTP layer behind the n_layer.
    Their ``eps`` is the one that ``transformers`` writes into its L2 norm, whatever the configuration says.

    ``gemma4`` of that architecture, whose ``window`` and ``softcap`` are as gemma3's, and of its assistants, which draft for
    the case ``target``.
    """

    name: str
    architecture: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    rope_base: float
    tied: bool = True
    bias: bool = False
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    window: int = 0
    pattern: int = 6
    rope_base_sliding: float = 10000.0
    softcap: float = 0.0
    eps: float = 1e-5
    experts: ExpertsConfig | None = None
    delta_net: DeltaNetConfig | None = None
    n_rot: int = 0
    conv_std: float = 0.5
    gemma4: Gemma4Shape | None = None
    target: str = ""

    @property
    def n_mtp(self) -> int:
        """Layers behind the trunk that draft tokens."""
        return 1 if self.delta_net else 0

    @property
    def recurrent(self) -> list[bool]:
        """Which layers are gated delta nets; the last ones are not."""
        pattern = self.pattern if self.delta_net else 1
        return [(il + 1) % pattern != 0 for il in range(self.n_layer)] + [False] * self.n_mtp


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_LINEAR = {"rope_type": "linear", "factor": 8.0}

# fmt: off
CASES: dict[str, Case | Family] = {
    case.name: case
    for case in (
        Case("llama", "llama", 3, 144, 9, 3, 16, 208, 1e4, tied=False, rope_scaling=_LLAMA3),
        Case("llama-bias", "llama", 2, 100, 5, 1, 20, 136, 5e4, bias=True),
        Case("qwen2", "qwen2", 3, 80, 5, 1, 16, 112, 1e5, tied=False, bias=True),
        Case("qwen3", "qwen3", 3, 64, 9, 3, 40, 160, 1e6),
        Case("qwen3-yarn", "qwen3", 2, 96, 3, 1, 64, 160, 1e4, rope_scaling=_YARN),
        Case("gemma3", "gemma3", 8, 80, 5, 1, 32, 136, 1e5, window=24, rope_scaling=_LINEAR),
        Case("gemma3-softcap", "gemma3", 3, 72, 6, 2, 80, 96, 1e6, window=70, pattern=2, softcap=4.0),
        Case("qwen3moe", "qwen3moe", 3, 72, 6, 2, 32, 0, 1e5, tied=False, experts=ExpertsConfig(7, 3, 40, 0)),
        # Three value heads per key head; the trunk ends with a delta net.
        Case(
            "qwen35", "qwen35", 5, 72, 6, 2, 32, 136, 1e5, pattern=4, n_rot=8, eps=1e-6,
            delta_net=DeltaNetConfig(2, 6, 32, 4),
        ),
        # Small inputs to the L2 norms and to the norm of the result, so that each epsilon matters; other numbers of taps and
        # layers; the trunk ends with attention.
        Case(
            "qwen35moe", "qwen35moe", 4, 80, 5, 1, 48, 0, 1e6, tied=False, pattern=2, n_rot=24, eps=1e-6, conv_std=0.02,
            delta_net=DeltaNetConfig(3, 6, 64, 3), experts=ExpertsConfig(5, 2, 48, 56),
        ),
        # Keys that are also values, in global layers; a mixture in addition to the network of every layer; per-layer
        # embeddings, and a tail without keys and values.
        Case(
            "gemma4", "gemma4", 6, 80, 6, 1, 48, 136, 1e5, window=24, softcap=4.0,
            gemma4=Gemma4Shape(3, 32, 2, k_is_v=True),
        ),
        Case(
            "gemma4-moe", "gemma4", 4, 72, 6, 2, 40, 88, 1e6, window=70, softcap=30.0, eps=1e-6,
            gemma4=Gemma4Shape(2, 32, 3, k_is_v=True), experts=ExpertsConfig(7, 3, 40, 0),
        ),
        Case(
            "gemma4-e", "gemma4", 8, 64, 4, 2, 64, 96, 1e6, window=24, softcap=30.0,
            gemma4=Gemma4Shape(4, 32, 2, n_shared=4, wide_tail=True, n_per_layer=24),
        ),
        Case(
            "gemma4-assistant", "gemma4-assistant", 3, 56, 6, 1, 48, 104, 1e5, window=24, target="gemma4",
            gemma4=Gemma4Shape(3, 32, 2, n_shared=3, n_embd_out=80),
        ),
        Case(
            "gemma4-e-assistant", "gemma4-assistant", 2, 40, 2, 2, 64, 72, 1e6, window=24, target="gemma4-e",
            gemma4=Gemma4Shape(2, 32, 2, n_shared=2, n_embd_out=64),
        ),
    )
} | FAMILIES
# fmt: on


# --- the checkpoint --------------------------------------------------------------------------------------------


def checkpoint(case: Case | Family) -> dict[str, np.ndarray]:
    """Weights by their names in ``transformers`` (those of the MTP layer, which it does not have, as in Qwen's checkpoints):
    float32, matrices [.., outputs, inputs] of variance 1 / inputs, norms around 1 (gemma3, and qwen35 but for the norm in a
    delta net, store what is added to 1)."""
    if isinstance(case, Family):
        return case.checkpoint()
    if case.gemma4:
        shapes = gemma4.shapes(case, N_VOCAB)
        return {
            name: uniform(case.name, name, shape, *gemma4.spread(case, name, shape)) for name, shape in shapes.items()
        }
    e = case.n_embd
    shapes = {"model.embed_tokens.weight": (N_VOCAB, e), "model.norm.weight": (e,)}
    if not case.tied:
        shapes["lm_head.weight"] = (N_VOCAB, e)
    for il, recurrent in enumerate(case.recurrent):
        layer = f"model.layers.{il}." if il < case.n_layer else f"mtp.layers.{il - case.n_layer}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if case.architecture == "gemma3" else []
        parts: dict[str, tuple[int, ...]] = {f"{name}.weight": (e,) for name in norms}
        parts |= _delta_net(case) if recurrent else _attention(case)
        parts |= _mixture(case) if case.experts else _feed_forward("mlp.", e, case.n_ff)
        shapes |= {layer + name: shape for name, shape in parts.items()}
    if case.n_mtp:
        shapes["mtp.fc.weight"] = (e, 2 * e)
        shapes |= {f"mtp.{name}.weight": (e,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    return {name: _weight(case, name, shape) for name, shape in shapes.items()}


def _weight(case: Case, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if "norm" in name:
        added = case.architecture == "gemma3" or (case.delta_net and not name.endswith("linear_attn.norm.weight"))
        return uniform(case.name, name, shape, 0.3, 0.0 if added else 1.0)
    if name.endswith("A_log"):  # exp(A_log) from 0.1 to 8
        return uniform(case.name, name, shape, 1.26, math.log(0.9))
    if name.endswith("dt_bias"):
        return uniform(case.name, name, shape, 1.0, -3.0)
    if name.endswith("bias"):
        return uniform(case.name, name, shape, 0.5)
    return uniform(case.name, name, shape, case.conv_std if "conv1d" in name else 1 / math.sqrt(shape[-1]))


def _attention(case: Case) -> dict[str, tuple[int, ...]]:
    e, q, kv = case.n_embd, case.n_head * case.head_dim, case.n_head_kv * case.head_dim
    rows = {"self_attn.q_proj": 2 * q if case.delta_net else q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (n, e) for name, n in rows.items()}
    shapes["self_attn.o_proj.weight"] = (e, q)
    if case.bias:
        shapes |= {f"{name}.bias": (n,) for name, n in rows.items()}
    if case.bias and case.architecture == "llama":
        shapes["self_attn.o_proj.bias"] = (e,)
    if case.architecture not in ("llama", "qwen2"):
        shapes |= {f"self_attn.{name}.weight": (case.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def _delta_net(case: Case) -> dict[str, tuple[int, ...]]:
    e, net = case.n_embd, case.delta_net
    assert net is not None
    keys, values = net.n_k * net.state_size, net.n_v * net.state_size
    shapes = {
        "in_proj_qkv.weight": (2 * keys + values, e),
        "in_proj_z.weight": (values, e),
        "in_proj_b.weight": (net.n_v, e),
        "in_proj_a.weight": (net.n_v, e),
        "conv1d.weight": (2 * keys + values, 1, net.n_conv),
        "A_log": (net.n_v,),
        "dt_bias": (net.n_v,),
        "norm.weight": (net.state_size,),
        "out_proj.weight": (e, values),
    }
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _feed_forward(name: str, e: int, n_ff: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{name}gate_proj.weight": (n_ff, e),
        f"{name}up_proj.weight": (n_ff, e),
        f"{name}down_proj.weight": (e, n_ff),
    }


def _mixture(case: Case) -> dict[str, tuple[int, ...]]:
    e, mix = case.n_embd, case.experts
    assert mix is not None
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (mix.n_expert, e),
        "mlp.experts.gate_up_proj": (mix.n_expert, 2 * mix.n_ff, e),
        "mlp.experts.down_proj": (mix.n_expert, e, mix.n_ff),
    }
    if mix.n_ff_shared:
        shapes |= {"mlp.shared_expert_gate.weight": (1, e), **_feed_forward("mlp.shared_expert.", e, mix.n_ff_shared)}
    return shapes


def prompts(case: Case | Family) -> list[np.ndarray]:
    """Token ids int64 [n] of each prompt, any token of the vocabulary; an assistant's are those of its target."""
    return random_prompts(case.target or case.name)


def fingerprint(case: Case | Family) -> str:
    """SHA-256 of weights and prompts: differs when golden logits belong to another model, or another target."""
    start = fingerprint(CASES[case.target]).encode() if case.target else b""
    return digest(checkpoint(case), prompts(case), start)


# --- the GGUF file ---------------------------------------------------------------------------------------------


_MTP_NAMES = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}


def _tiled(case: Case, weight: np.ndarray, axis: int, first: int, size: int) -> np.ndarray:
    """Value heads, ``size`` elements of ``axis`` each and the first of them at ``first``, reordered from the order by key
    head (k r + j for the j-th of key head k) to j n_k + k."""
    net = case.delta_net
    assert net is not None
    order = np.arange(net.n_v).reshape(net.n_k, net.n_v // net.n_k).T.ravel()
    elements = (order[:, None] * size + np.arange(size)).ravel()
    return np.take(weight, np.concatenate([np.arange(first), first + elements]), axis)


def _converted(case: Case, name: str, weight: np.ndarray) -> np.ndarray:
    """The converted weight of a delta net."""
    net = case.delta_net
    assert net is not None
    d = net.state_size
    part = name.partition("linear_attn.")[2]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        weight = weight[:, 0] if weight.ndim == 3 else weight
        return _tiled(case, weight, 0, 2 * net.n_k * d, d)
    if part == "in_proj_z.weight":
        return _tiled(case, weight, 0, 0, d)
    if part == "out_proj.weight":
        return _tiled(case, weight, 1, 0, d)
    if part == "A_log":
        weight = -np.exp(weight.astype(np.float64)).astype(np.float32)
    return weight if part == "norm.weight" else _tiled(case, weight, 0, 0, 1)


def _tensors(case: Case) -> dict[str, np.ndarray]:
    """The checkpoint under GGUF names and conventions."""
    if case.gemma4:
        return gemma4.tensors(case, checkpoint(case))
    arch = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}[case.architecture]
    names = gguf.get_tensor_name_map(arch, case.n_layer + case.n_mtp)
    tensors = {}
    for name, weight in checkpoint(case).items():
        if name in _MTP_NAMES:
            tensors[f"blk.{case.n_layer}.{_MTP_NAMES[name]}"] = weight + np.float32(name != "mtp.fc.weight")
            continue
        parts = {name.replace("mtp.layers.0.", f"model.layers.{case.n_layer}."): weight}
        if "linear_attn." in name:
            parts = {name.replace("dt_bias", "dt_proj.bias"): _converted(case, name, weight)}
        elif name.endswith("gate_up_proj"):
            halves = zip(("gate_proj", "up_proj"), np.split(weight, 2, axis=1), strict=True)
            parts = {name.replace("gate_up_proj", half): rows for name in parts for half, rows in halves}
        elif name.endswith("shared_expert_gate.weight"):
            parts = dict.fromkeys(parts, weight[0])
        for part, value in parts.items():
            converted = names.get_name(part, try_suffixes=(".weight", ".bias"))
            assert converted is not None, f"gguf-py has no name for {part}"
            if case.architecture == "llama" and ".q_proj." in name:
                value = permuted(value, case.n_head)
            if case.architecture == "llama" and ".k_proj." in name:
                value = permuted(value, case.n_head_kv)
            if "norm" in name and (case.architecture == "gemma3" or (case.delta_net and "linear_attn." not in name)):
                value = value + np.float32(1)
            tensors[converted + (".weight" if "_exps" in converted else "")] = value
    if case.rope_scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(case.rope_scaling, case.rope_base, case.head_dim)
    return tensors


def write_gguf(case: Case | Family, path: Path) -> Path:
    """The model as a GGUF file of float32 tensors, with a vocabulary of bytes."""
    if isinstance(case, Family):
        return case.write_gguf(path)
    writer = gguf.GGUFWriter(path, case.architecture)
    writer.add_name(f"Random {case.name}")
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(case.n_embd)
    writer.add_block_count(case.n_layer + case.n_mtp)
    add_widths(writer, case.gemma4, case.n_layer, case.n_head_kv, case.n_ff)
    writer.add_head_count(case.n_head)
    if case.head_dim * case.n_head != case.n_embd:
        writer.add_key_length(case.head_dim)
        writer.add_value_length(case.head_dim)
    writer.add_layer_norm_rms_eps(case.eps)
    writer.add_rope_freq_base(case.rope_base)
    kind = case.rope_scaling.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(case.rope_scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(case.rope_scaling["original_max_position_embeddings"])
    if case.window:
        writer.add_sliding_window(case.window)
        if case.pattern != 6 and not case.gemma4:
            writer.add_sliding_window_pattern(case.pattern)
        if case.rope_base_sliding != 10000.0:
            writer.add_float32(f"{case.architecture}.rope.freq_base_swa", case.rope_base_sliding)
    if case.softcap:
        writer.add_final_logit_softcapping(case.softcap)
    if case.experts:
        writer.add_expert_count(case.experts.n_expert)
        writer.add_expert_used_count(case.experts.n_used)
        writer.add_expert_feed_forward_length(case.experts.n_ff)
        if case.experts.n_ff_shared:
            writer.add_expert_shared_feed_forward_length(case.experts.n_ff_shared)
    if case.delta_net:
        writer.add_rope_dimension_count(case.n_rot)
        writer.add_nextn_predict_layers(case.n_mtp)
        add_delta_net(writer, case.delta_net, case.recurrent, case.n_rot)
    return finish(writer, _tensors(case), path)
