"""What all small random models share: prompts, the source of their weights, and the vocabulary of their GGUF files."""

import hashlib
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.synthetic.model import vocabulary

N_VOCAB = 289
N_CTX = 512

LENGTHS = (1, 70, 300)
"""Tokens of the three prompts: alone, more than a chunk of attention, more than two batches of rows."""

POSITIONS = ((0,), (15, 69), (63, 127, 128, 299))
"""Which logits of each prompt are kept: ends, and both sides of the edges of chunks and batches."""


def _bits(name: str, label: str) -> np.random.PCG64:
    return np.random.PCG64(np.random.SeedSequence([zlib.crc32(name.encode()), zlib.crc32(label.encode())]))


def uniform(name: str, label: str, shape: tuple[int, ...], std: float, mean: float = 0.0) -> np.ndarray:
    """The weight ``label`` of the model ``name``: float32, uniform with this mean and standard deviation; the same bits
    on every machine."""
    n = math.prod(shape)
    raw = _bits(name, label).random_raw((n + 1) // 2).view(np.int32)[:n]
    return (np.float32(mean) + raw.astype(np.float32) * np.float32(std * math.sqrt(3) / 2**31)).reshape(shape)


def random_prompts(name: str) -> list[np.ndarray]:
    """Token ids int64 [n] of each prompt of the model ``name``, any token of the vocabulary."""
    return [(_bits(name, f"prompt {n}").random_raw(n) % N_VOCAB).astype(np.int64) for n in LENGTHS]


def digest(weights: Mapping[str, np.ndarray], prompts: list[np.ndarray], start: bytes = b"") -> str:
    """SHA-256 of ``start``, weights with their names, and prompts."""
    state = hashlib.sha256(start)
    for name, weight in sorted(weights.items()):
        state.update(name.encode() + weight.astype("<f4").tobytes())
    for prompt in prompts:
        state.update(prompt.astype("<i8").tobytes())
    return state.hexdigest()


def permuted(weight: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of q or k reordered within each head from rotated pairs (i, i + n/2) to (2i, 2i + 1)."""
    split = weight.reshape(n_head, 2, weight.shape[0] // n_head // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def llama3_factors(scaling: Mapping[str, Any], base: float, n_rot: int) -> np.ndarray:
    """float32 [n_rot / 2]: the divisors of Llama 3.1's frequencies (its reference code, ``apply_scaling``).
    ``scaling`` is in the words of ``transformers``."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    factors = []
    for i in range(0, n_rot, 2):
        wavelength = 2 * math.pi * base ** (i / n_rot)
        turns = scaling["original_max_position_embeddings"] / wavelength
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def finish(writer: gguf.GGUFWriter, tensors: Mapping[str, np.ndarray], path: Path) -> Path:
    """Adds a vocabulary of bytes and the tensors, and writes the file."""
    tokens, types, merges = vocabulary(N_VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
