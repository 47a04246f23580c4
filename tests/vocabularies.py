"""Tokenizers for tests: those of the reference models, and tiny ones made of a few tokens."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.gguf.file import read_gguf
from engine.text.bpe import byte_alphabet
from engine.text.tokenizer import Tokenizer
from tests.conftest import REPOSITORY, model_path, shared_model

BUNDLED = REPOSITORY / "engine" / "data" / "pycoder-dense-Q4_K_M.gguf"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def gguf_path(name: str) -> Path:
    """``bundled``, a name of the catalog, or a file of the reference models."""
    if name == "bundled":
        return BUNDLED
    return shared_model(name) if name.endswith(".gguf") else model_path(name)


@cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(read_gguf(gguf_path(name)))


def metadata(model: str, tokens: Mapping[str, int], **more: Any) -> dict[str, Any]:
    """Metadata with ``tokens`` (text to type, in the order of their ids); ``more`` without the common prefix."""
    given = {"model": model, "tokens": list(tokens), "token_type": np.array(list(tokens.values()), np.int32)} | more
    return {f"tokenizer.ggml.{key}": value for key, value in given.items() if value is not None}


def made(values: Mapping[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(SimpleNamespace(path=Path("tiny.gguf"), metadata=values))


def bpe_metadata(merges: Sequence[str], special: Mapping[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """A ``gpt2`` vocabulary of all bytes, what ``merges`` make of them, and ``special`` tokens."""
    tokens = dict.fromkeys(byte_alphabet().values(), NORMAL)
    tokens |= dict.fromkeys((merge.replace(" ", "") for merge in merges), NORMAL)
    return metadata("gpt2", tokens | dict(special or {}), merges=list(merges), **{"pre": "gpt-2"} | more)


def spm_metadata(scores: Mapping[str, float], special: Mapping[str, int] | None = None, **more: Any) -> dict[str, Any]:
    """A ``llama`` vocabulary of ``<unk> <s> </s>``, all bytes, the pieces of ``scores`` and ``special`` tokens."""
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL} | {f"<0x{b:02X}>": BYTE for b in range(256)}
    tokens |= dict.fromkeys(scores, NORMAL) | dict(special or {})
    array = np.array([scores.get(text, -1000.0) for text in tokens], np.float32)
    return metadata("llama", tokens, scores=array, **more)
