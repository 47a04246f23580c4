"""Files as converters write them: types of vectors, names and keys that our own small models do not have."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf.quants import dequantize, quantize

import engine
from engine.devices import open_device
from engine.gguf.file import read_gguf
from engine.models import loader
from engine.models.config import ModelConfig
from engine.models.latent_config import LatentConfig
from engine.models.registry import build, read_config
from engine.models.weights import load_vector
from tests.conftest import shared_path
from tests.oracle.models import CASES, Family, write_gguf
from tests.tiers import few

FIRST = (
    "llama-bias",
    "qwen35moe",
    "gemma4-e",
    "deepseek2-v3",
    "deepseek4",
    "gpt-oss",
    "phi3-long",
    "apertus",
    "qwen3next",
)
"""Small models that have every kind of vector: norms, biases, routers, convolutions, decays, scales, factors, sinks."""

OTHERS = [name for name in CASES if name not in FIRST and "assistant" not in name]


@contextmanager
def written_as(kind: T) -> Iterator[None]:
    """All tensors of floats that are written meanwhile get another type, unless it cannot hold them: Gemma 4 divides
    frequencies by 1e30."""
    add = gguf.GGUFWriter.add_tensor

    def converted(self: gguf.GGUFWriter, name: str, tensor: np.ndarray, *args: Any, **kwargs: Any) -> None:
        if tensor.dtype == np.float32 and np.abs(tensor).max() < np.finfo(np.float16).max:
            add(self, name, quantize(tensor, kind), raw_dtype=kind)
        else:
            add(self, name, tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", converted)
        yield


def copy(source: Path, path: Path, kind: T = T.BF16, **ids: int) -> Path:
    """The file with its matrices of BF16 in another type of floats, and further special ids."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub)
    for name, id in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", id)
    for tensor in reader.tensors:
        if tensor.tensor_type == T.BF16:
            writer.add_tensor(tensor.name, quantize(dequantize(tensor.data, T.BF16), kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [T.BF16, T.F16])
@pytest.mark.parametrize("name", few([*FIRST, *OTHERS], len(FIRST)))
def test_vectors_of_any_type_of_floats(name: str, kind: T, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole model is built, without running a kernel, and what it loads is what gguf's reader sees."""
    with written_as(kind):
        file = read_gguf(write_gguf(CASES[name], tmp_path / "model.gguf"))
    loaded: dict[str, np.ndarray] = {}

    def recorded(file: Any, name: str, *shape: int) -> np.ndarray:
        loaded[name] = load_vector(file, name, *shape)
        return loaded[name]

    monkeypatch.setattr(loader, "load_vector", recorded)
    build(read_config(file), file, open_device("cpu", 1), 64)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file.path).tensors}
    assert {tensors[name].tensor_type for name in loaded} - {T.F32} == {kind}
    for tensor, values in loaded.items():
        expected = dequantize(tensors[tensor].data, tensors[tensor].tensor_type)
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values.ravel(), expected.ravel(), tensor)


def test_router_of_deepseek4_as_converted() -> None:
    """The published routers are BF16, and llama.cpp's converter keeps that."""
    file = read_gguf(shared_path("cases", "deepseek4-bf16-router.gguf"))
    routers = [t for t in gguf.GGUFReader(file.path).tensors if t.name.endswith("ffn_gate_inp.weight")]
    assert routers
    for tensor in routers:
        assert tensor.tensor_type == T.BF16
        found = load_vector(file, tensor.name, *tensor.shape[::-1])
        np.testing.assert_array_equal(found, dequantize(tensor.data, T.BF16))


@pytest.mark.thorough
def test_router_of_another_type_gives_the_same_logits(tmp_path: Path) -> None:
    source = shared_path("cases", "deepseek4-bf16-router.gguf")
    paths = source, copy(source, tmp_path / "model.gguf", T.F32)
    logits = []
    for path in paths:
        with engine.load(path, n_ctx=128, device="cpu") as llm:
            logits.append(llm.logits([5, 6, 7, 8]))
    np.testing.assert_array_equal(logits[0], logits[1])


@pytest.mark.thorough
def test_a_model_lists_the_warnings_of_its_tokenizer(tmp_path: Path) -> None:
    source = write_gguf(CASES["smollm3"], tmp_path / "source.gguf")
    path = copy(source, tmp_path / "model.gguf", padding=32_000)
    with engine.load(source, n_ctx=64, device="cpu", n_threads=1) as llm:
        before = llm.warnings
    with engine.load(path, n_ctx=64, device="cpu", n_threads=1) as llm:
        said = [warning for warning in llm.warnings if warning not in before]
    assert said == [
        f"tokenizer.ggml.padding_token_id is 32000, outside the vocabulary of {llm.tokenizer.n_vocab} tokens: it is ignored."
    ]


MISTRAL4 = CASES["deepseek2-temperature"]
"""The one whose logits are compared with Mistral4ForCausalLM."""


def mistral4(path: Path, architecture: str = "mistral4", left_out: str = "") -> ModelConfig:
    """The configuration of a file of Mistral 4 of this architecture, without one of its keys."""
    assert isinstance(MISTRAL4, Family)
    metadata = {key: value for key, value in MISTRAL4.metadata.items() if key != left_out}
    case = replace(MISTRAL4, architecture=architecture, metadata=metadata)
    return read_config(read_gguf(case.write_gguf(path)))


def test_mistral4_is_deepseek2_by_another_name(tmp_path: Path) -> None:
    own, other = mistral4(tmp_path / "a.gguf"), mistral4(tmp_path / "b.gguf", "deepseek2")
    assert (own.architecture, other.architecture) == ("mistral4", "deepseek2")
    assert replace(own, architecture="deepseek2") == other
    mixer = own.layers[0].mixer
    assert isinstance(mixer, LatentConfig)
    # What llama.cpp's converters write for the model of the case (tests/oracle/families/deepseek2.py).
    assert mixer.temperature == (pytest.approx(0.3), 64, 0)
    assert mixer.rope is not None and mixer.rope.yarn_ctx == 64


def test_temperature_of_mistral4_without_a_length(tmp_path: Path) -> None:
    """transformers counts in lengths of the original context."""
    found = mistral4(tmp_path / "a.gguf", left_out="attention.temperature_length")
    assert found == mistral4(tmp_path / "b.gguf")
