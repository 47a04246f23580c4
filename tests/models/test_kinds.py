"""Files that are no models are named as what they are, before anything else is said about them."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFType, GGUFWriter
from gguf.constants import MODEL_ARCH_NAMES

from engine.errors import ModelError
from engine.gguf.file import read_gguf
from engine.models.kinds import NEAREST, OLLAMA, PARTS
from engine.models.registry import ARCHITECTURES, read_config
from tests.conftest import shared_path

SAID = {
    "mmproj": "is a projector (mmproj), ",
    "lora": "is an adapter (LoRA), ",
    "imatrix": "is an importance matrix (imatrix), ",
}


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_config(read_gguf(path))
    said = str(caught.value)
    assert said.startswith(f"{path} is a")
    assert ": give " in said
    assert said.endswith(".")
    assert "\n" not in said
    return said


def written(path: Path, architecture: str = "llama", kind: str = "", tensors: tuple[str, ...] = ()) -> Path:
    """A file with a vocabulary and these tensors."""
    writer = GGUFWriter(path, architecture)
    if kind:
        writer.add_type(kind)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a"])
    for name in tensors:
        writer.add_tensor(name, np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", SAID)
def test_files_that_converters_write(name: str) -> None:
    assert SAID[name] in refusal(shared_path("cases", f"{name}.gguf"))


@pytest.mark.parametrize(
    ("architecture", "kind", "tensors", "told"),
    [
        ("llama", "", (), "is a vocabulary without weights: give"),
        ("llama", "vocab", (), "is a vocabulary without weights: give"),
        ("llama", "mmproj", ("v.blk.0.ln1.weight",), SAID["mmproj"]),
        ("clip", "", ("v.blk.0.ln1.weight",), SAID["mmproj"]),
        ("falcon", "", ("blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"), SAID["lora"]),
        ("qwen3", "", ("blk.0.attn_q.weight.in_sum2", "blk.0.attn_q.weight.counts"), SAID["imatrix"]),
    ],
)
def test_keys_or_tensors_tell(
    architecture: str, kind: str, tensors: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    assert told in refusal(written(tmp_path / "model.gguf", architecture, kind, tensors))


def test_every_type_of_gguf_has_a_sentence() -> None:
    types = {value for name, value in vars(GGUFType).items() if not name.startswith("_")}
    assert types - {GGUFType.MODEL} <= PARTS.keys()


def test_relatives_are_architectures() -> None:
    known = {*MODEL_ARCH_NAMES.values()}
    assert NEAREST.keys() <= known - ARCHITECTURES.keys()
    assert set(NEAREST.values()) | set(OLLAMA.values()) <= ARCHITECTURES.keys()
    assert not OLLAMA.keys() & known
