"""Small random models, twice: as a checkpoint of ``transformers`` and as the GGUF file that the checkpoint converts to.

The weights come from raw PCG64 bits, which NumPy keeps the same in all its versions, so that a golden file needs to
hold logits only.  The conversion follows llama.cpp's ``convert_hf_to_gguf.py``: names by gguf-py's own map, rows of q
and k permuted for llama, 1 added to gemma3's norms, Llama 3's context extension as the tensor ``rope_freqs``.
"""

import hashlib
import math
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.synthetic import vocabulary

N_VOCAB = 289
N_CTX = 512
EPS = 1e-5

LENGTHS = (1, 70, 300)
"""Tokens of the three prompts: alone, more than a chunk of attention, more than two batches of rows."""

POSITIONS = ((0,), (15, 69), (63, 127, 128, 299))
"""Which logits of each prompt are kept: ends, and both sides of the edges of chunks and batches."""


@dataclass(frozen=True)
class Case:
    """A model.  ``rope_scaling`` is in the words of ``transformers``; ``bias`` gives llama biases on q, k, v and the
    output of attention (qwen2 always has those of q, k, v); ``window``, ``pattern`` (every n-th layer is global),
    ``rope_base_sliding`` and ``softcap`` are gemma3's."""

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


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_LINEAR = {"rope_type": "linear", "factor": 8.0}

CASES = {
    case.name: case
    for case in (
        Case("llama", "llama", 3, 144, 9, 3, 16, 208, 1e4, tied=False, rope_scaling=_LLAMA3),
        Case("llama-bias", "llama", 2, 100, 5, 1, 20, 136, 5e4, bias=True),
        Case("qwen2", "qwen2", 3, 80, 5, 1, 16, 112, 1e5, tied=False, bias=True),
        Case("qwen3", "qwen3", 3, 64, 9, 3, 40, 160, 1e6),
        Case("qwen3-yarn", "qwen3", 2, 96, 3, 1, 64, 160, 1e4, rope_scaling=_YARN),
        Case("gemma3", "gemma3", 8, 80, 5, 1, 32, 136, 1e5, window=24, rope_scaling=_LINEAR),
        Case("gemma3-softcap", "gemma3", 3, 72, 6, 2, 80, 96, 1e6, window=70, pattern=2, softcap=4.0),
    )
}


# --- the checkpoint --------------------------------------------------------------------------------------------


def _bits(case: Case, label: str) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence([zlib.crc32(case.name.encode()), zlib.crc32(label.encode())]))


def _uniform(case: Case, label: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> np.ndarray:
    """float32, uniform with this mean and standard deviation; the same bits on every machine."""
    n = math.prod(shape)
    raw = _bits(case, label).random_raw((n + 1) // 2).view(np.int32)[:n]
    return (np.float32(mean) + raw.astype(np.float32) * np.float32(std * math.sqrt(3) / 2**31)).reshape(shape)


def checkpoint(case: Case) -> dict[str, np.ndarray]:
    """Weights by their names in ``transformers``: float32, matrices [outputs, inputs] of variance 1 / inputs, norms
    around 1 (gemma3 stores what is added to 1)."""
    e, q, kv = case.n_embd, case.n_head * case.head_dim, case.n_head_kv * case.head_dim
    gemma = case.architecture == "gemma3"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (N_VOCAB, e), "model.norm.weight": (e,)}
    if not case.tied:
        shapes["lm_head.weight"] = (N_VOCAB, e)
    for il in range(case.n_layer):
        layer = f"model.layers.{il}."
        matrices = {f"self_attn.{name}": rows for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))}
        for name, rows in (matrices | {"mlp.gate_proj": case.n_ff, "mlp.up_proj": case.n_ff}).items():
            shapes[f"{layer}{name}.weight"] = (rows, e)
        shapes[f"{layer}self_attn.o_proj.weight"] = (e, q)
        shapes[f"{layer}mlp.down_proj.weight"] = (e, case.n_ff)
        if case.bias:
            shapes |= {f"{layer}{name}.bias": (rows,) for name, rows in matrices.items()}
        if case.bias and case.architecture == "llama":
            shapes[f"{layer}self_attn.o_proj.bias"] = (e,)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
        shapes |= {f"{layer}{name}.weight": (e,) for name in norms}
        if case.architecture in ("qwen3", "gemma3"):
            shapes |= {f"{layer}self_attn.{name}.weight": (case.head_dim,) for name in ("q_norm", "k_norm")}
    weights = {}
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            weights[name] = _uniform(case, name, shape, 0.3, 0.0 if gemma else 1.0)
        else:
            weights[name] = _uniform(case, name, shape, 0.5 if name.endswith("bias") else 1 / math.sqrt(shape[1]))
    return weights


def prompts(case: Case) -> list[np.ndarray]:
    """Token ids int64 [n] of each prompt, any token of the vocabulary."""
    return [(_bits(case, f"prompt {n}").random_raw(n) % N_VOCAB).astype(np.int64) for n in LENGTHS]


def fingerprint(case: Case) -> str:
    """SHA-256 of weights and prompts: differs when golden logits belong to another model."""
    digest = hashlib.sha256()
    for name, weight in checkpoint(case).items():
        digest.update(name.encode() + weight.astype("<f4").tobytes())
    for prompt in prompts(case):
        digest.update(prompt.astype("<i8").tobytes())
    return digest.hexdigest()


# --- the GGUF file ---------------------------------------------------------------------------------------------


def _permuted(weight: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of q or k reordered within each head from rotated pairs (i, i + n/2) to (2i, 2i + 1)."""
    split = weight.reshape(n_head, 2, weight.shape[0] // n_head // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def _rope_freqs(case: Case) -> np.ndarray:
    """float32 [head_dim / 2]: what Llama 3.1 divides each frequency by (its reference code, ``apply_scaling``)."""
    scaling = case.rope_scaling
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    factors = []
    for i in range(0, case.head_dim, 2):
        wavelength = 2 * math.pi * case.rope_base ** (i / case.head_dim)
        turns = scaling["original_max_position_embeddings"] / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def _tensors(case: Case) -> dict[str, np.ndarray]:
    """The checkpoint under GGUF names and conventions."""
    arch = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}[case.architecture]
    names = gguf.get_tensor_name_map(arch, case.n_layer)
    tensors = {}
    for name, weight in checkpoint(case).items():
        converted = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert converted is not None, f"gguf-py has no name for {name}"
        if case.architecture == "llama" and ".q_proj." in name:
            weight = _permuted(weight, case.n_head)
        if case.architecture == "llama" and ".k_proj." in name:
            weight = _permuted(weight, case.n_head_kv)
        if case.architecture == "gemma3" and name.endswith("norm.weight"):
            weight = weight + np.float32(1)
        tensors[converted] = weight
    if case.rope_scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _rope_freqs(case)
    return tensors


def write_gguf(case: Case, path: Path) -> Path:
    """The model as a GGUF file of float32 tensors, with a vocabulary of bytes."""
    writer = gguf.GGUFWriter(path, case.architecture)
    writer.add_name(f"Random {case.name}")
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(case.n_embd)
    writer.add_block_count(case.n_layer)
    writer.add_feed_forward_length(case.n_ff)
    writer.add_head_count(case.n_head)
    writer.add_head_count_kv(case.n_head_kv)
    if case.head_dim * case.n_head != case.n_embd:
        writer.add_key_length(case.head_dim)
        writer.add_value_length(case.head_dim)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(case.rope_base)
    kind = case.rope_scaling.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(case.rope_scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(case.rope_scaling["original_max_position_embeddings"])
    if case.window:
        writer.add_sliding_window(case.window)
        if case.pattern != 6:
            writer.add_sliding_window_pattern(case.pattern)
        if case.rope_base_sliding != 10000.0:
            writer.add_float32(f"{case.architecture}.rope.freq_base_swa", case.rope_base_sliding)
    if case.softcap:
        writer.add_final_logit_softcapping(case.softcap)
    tokens, types, merges = vocabulary(N_VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    for name, tensor in _tensors(case).items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
