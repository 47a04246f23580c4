"""Headers that lie: every value that a family reads, and the names of tensors.  Either the model loads, or one sentence says
what is wrong."""

import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType, GGUFReader

from engine.errors import EngineError
from engine.gguf.file import GGUF, read_gguf
from engine.models.registry import read_config
from engine.synthetic.model import make_model
from engine.synthetic.shapes import shapes
from tests import hostile_files
from tests.hostile_files import LONGEST, VALUES, changed, loaded, names, numbers, problem
from tests.tiers import amount, few

SHAPES = sorted(name for name in shapes() if name.startswith("tiny-"))
FIRST = ["tiny-qwen3moe", *(name for name in SHAPES if name != "tiny-qwen3moe")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    def make(shape: str) -> Path:
        path = folder / f"{shape}.gguf"
        return path if path.exists() else make_model(path, shape, "Q8_0")

    return make


@pytest.mark.parametrize("shape", few(FIRST, 1))
def test_a_value_of_another_kind_or_size(shape: str, model: Callable[[str], Path]) -> None:
    """A sample; ``python -m tests.hostile`` tries all."""
    rng = random.Random(shape)
    cases = list(numbers(model(shape)))
    for what, gguf in rng.sample(cases, amount(400, 60)):
        assert problem(gguf, "tokenizer" in what) == "", what


@pytest.mark.parametrize("shape", few(FIRST, 1))
def test_a_tensor_of_another_name_or_shape(shape: str, model: Callable[[str], Path]) -> None:
    rng = random.Random(shape)
    cases = list(names(model(shape)))
    added = [case for case in cases if case[0].endswith("added")]
    for what, gguf in [*added, *rng.sample(cases, amount(100, 20))]:
        assert problem(gguf, tokenizer=False) == "", what


@pytest.mark.parametrize("shape", few(sorted(SHAPES, key=lambda shape: (shape != "tiny-gemma4-moe", shape)), 1))
def test_numbers_that_are_not_finite_are_no_warning(shape: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    """Signaling NaN, infinities and the largest number, in each tensor of float32: their logits are an error, later."""
    path = Path(shutil.copy(model(shape), tmp_path / "m.gguf"))
    tensors = [tensor for tensor in GGUFReader(path).tensors if tensor.tensor_type == GGMLQuantizationType.F32]
    data = bytearray(path.read_bytes())
    for tensor in tensors:
        bad = struct.pack("<4I", 0x7FA00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF)[: 4 * int(tensor.n_elements)]
        data[int(tensor.data_offset) : int(tensor.data_offset) + len(bad)] = bad
    assert len(tensors) > 3
    path.write_bytes(data)
    assert problem(read_gguf(path), tokenizer=False) == ""


@pytest.mark.parametrize("name", ["blk.99.attn_q.input_scale", "blk.-1.attn_q.input_scale", "a_exps.b.input_scale"])
def test_a_scale_without_its_matrix_is_refused(name: str, model: Callable[[str], Path]) -> None:
    """One that belongs to a matrix is ignored: activations are not quantized to 4 bits."""
    gguf = read_gguf(model("tiny-qwen3moe"))
    matrix = gguf.tensors["blk.0.attn_q.weight"]
    with pytest.raises(EngineError, match=r"does not have: .*input_scale; this variant"):
        loaded(hostile_files.replace(gguf, tensors=gguf.tensors | {name: matrix}))
    loaded(hostile_files.replace(gguf, tensors=gguf.tensors | {"blk.0.attn_q.input_scale": matrix}))


@pytest.mark.parametrize("key", ["yarn_beta_fast", "yarn_beta_slow"])
def test_yarn_without_turns(key: str, model: Callable[[str], Path]) -> None:
    *_, yarn = hostile_files.bases(model("tiny-qwen3moe"))
    loaded(changed(yarn, {f"qwen3moe.rope.scaling.{key}": ("f32", 2.0)}), tokenizer=False)
    with pytest.raises(EngineError, match=rf"rope\.scaling\.{key}.* is 0\.0, outside"):
        loaded(changed(yarn, {f"qwen3moe.rope.scaling.{key}": ("f32", 0.0)}), tokenizer=False)


def test_a_name_cannot_forge_lines_of_a_report(model: Callable[[str], Path]) -> None:
    gguf = read_gguf(model("tiny-qwen3moe"))
    name = "good model\n[1000 tokens/s]\x1b[31m\u202e" + "a" * 300_000
    config = read_config(changed(gguf, {"general.name": ("str", name)}))
    assert config.name.startswith(r"good model\n[1000 tokens/s]\x1b[31m\u202e")
    assert config.name.isprintable() and len(config.name) <= 400


@pytest.mark.parametrize(
    "key", ["general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre", "qwen3moe.rope.scaling.type"]
)
def test_a_long_text_is_cut(key: str, model: Callable[[str], Path]) -> None:
    gguf: GGUF = read_gguf(model("tiny-qwen3moe"))
    with pytest.raises(EngineError) as refused:
        loaded(changed(gguf, {key: ("str", "a\n\x1b" * 1_000_000)}))
    assert str(refused.value).isprintable() and len(str(refused.value)) <= LONGEST


def test_the_values_are_of_every_kind() -> None:
    kinds = {kind for kind, _ in VALUES}
    assert kinds > {"u32", "i32", "u64", "f32", "f64", "bool", "str", "i32[]", "f32[]", "str[]"}
