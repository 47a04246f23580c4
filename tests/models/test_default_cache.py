"""The default element types of caches: a function of the file, and an option that takes precedence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

import engine
from engine.default_cache import default_types
from engine.gguf.file import GGUFTensor
from engine.models.registry import read_config
from engine.synthetic.model import make_model
from engine.synthetic.shapes import N_VOCAB_TINY, Shape
from tests.models.test_published import CONFIGS, file_of

LATENTS = {"deepseek2", "deepseek32", "glm-dsa", "deepseek4", "mistral4", "kimi-linear"}
EMBEDDINGS = {"bert", "gemma-embedding"}


def requantized(tensor: GGUFTensor, kind: str) -> GGUFTensor:
    """The matrix of a layer in another format; other tensors are as before."""
    if not tensor.name.startswith("blk.") or len(tensor.shape) < 2:
        return tensor
    block, size = GGML_QUANT_SIZES[number := GGMLQuantizationType[kind]]
    n_bytes = int(np.prod(tensor.shape, dtype=np.int64)) // block * size
    return replace(tensor, type=number, nbytes=n_bytes, data=np.broadcast_to(np.uint8(0), (n_bytes,)))


@pytest.mark.parametrize("name", CONFIGS)
def test_published_models(name: str) -> None:
    """Float weights and quantized ones, of every published configuration."""
    file = file_of(name)
    config = read_config(file)

    def default(kind: str) -> str:
        tensors = {name: requantized(tensor, kind) for name, tensor in file.tensors.items()}
        types = default_types(config, replace(file, tensors=tensors))
        assert types.k == types.v
        return types.k.name

    f16 = config.architecture in LATENTS | EMBEDDINGS
    assert [default(kind) for kind in ("BF16", "F16", "Q8_0", "Q4_0")] == (
        ["f16"] * 4 if f16 else ["i12", "i12", "i8", "i8"]
    )


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "m.gguf", "tiny-qwen3", "Q8_0")


def loaded(path: Path, **options: Any) -> engine.LLM:
    return engine.load(path, device="cpu", n_ctx=64, n_threads=1, **options)


def test_float_weights_and_heads_without_blocks(quantized: Path, tmp_path: Path) -> None:
    shape = Shape("llama", 1, 96, 2, 1, 48, 64, N_VOCAB_TINY, 1088, 1e4, 1e-5)
    odd = make_model(tmp_path / "odd.gguf", shape, "Q8_0")
    plain = make_model(tmp_path / "plain.gguf", "tiny-qwen3", "F32")
    assert [loaded(path).cache_types for path in (quantized, plain, odd)] == [
        (name, name) for name in ("i8", "i12", "f16")
    ]


def test_options_take_precedence(quantized: Path) -> None:
    found = [
        loaded(quantized, **options).cache_types
        for options in (
            {"cache_type": "f16"},
            {"cache_type_k": "q8_0"},
            {"cache_type": "i12"},
            {"cache_type_k": "i12", "cache_type_v": "i12"},
        )
    ]
    assert found == [("f16", "f16"), ("q8_0", "f16"), ("i12", "i12"), ("i12", "i12")]


def test_the_default_is_the_type_that_it_names(quantized: Path) -> None:
    """The bits are those of the type when it is given, and the fingerprint and the receipt name it."""
    ids = np.random.default_rng(0).integers(0, N_VOCAB_TINY, 40).tolist()
    default, given, other = loaded(quantized), loaded(quantized, cache_type="i8"), loaded(quantized, cache_type="f16")
    assert default.logits(ids).tobytes() == given.logits(ids).tobytes() != other.logits(ids).tobytes()
    assert default.fingerprint == given.fingerprint != other.fingerprint


def test_a_draft_model_has_its_own_default(quantized: Path, tmp_path: Path) -> None:
    draft = make_model(tmp_path / "draft.gguf", "tiny-qwen3", "F32", seed=1)
    llm = loaded(quantized, draft_model=draft)
    assert (llm.cache_types, llm.draft.llm.cache_types) == (("i8", "i8"), ("i12", "i12"))  # type: ignore[union-attr]
    llm = loaded(quantized, draft_model=draft, cache_type="f16")
    assert llm.draft.llm.cache_types == ("f16", "f16")  # type: ignore[union-attr]
