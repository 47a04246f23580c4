"""Layers that draft in files of their own: the same drafts as in one file with the trunk, and what is refused.

The files are made as llama.cpp's conversion does it: with --no-mtp, a file has neither the layer nor its count, and
block_count is that of the trunk; with --mtp, it has the layer, what the trunk lends to it, and all keys.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import engine
from engine.errors import ModelError
from engine.gguf.file import GGUF, read_gguf
from engine.hub.resolve import resolve
from engine.models.registry import is_mtp, read_config, with_mtp
from tests.conftest import shared_path
from tests.families import FAMILIES, Packed, edited, quantized, rewritten
from tests.oracle.families.deepseek4 import DeepSeek4
from tests.oracle.models import CASES, write_gguf
from tests.speculative.test_deepseek import DRAFTED, agreeing, noted
from tests.tiers import few

LENT = ("token_embd.weight", "output.weight", "output_norm.weight")
BUNDLED = "pycoder-moe-mtp"
NAMES = ["glm4moe", "glm4moe-norms", "qwen35", "qwen35moe", "qwen3next", "deepseek2-glm", "step35-mtp"]
"""Small models of all families; ``tests/models/test_families.py`` compiles the kernels of the first one, too."""

OWN_HEAD = "glm4moe-norms"
"""The model whose layer has an embedding and an output of its own, with which random drafts are never right."""


def whole(name: str, folder: Path) -> Path:
    """The file of a model with its layer."""
    if name == BUNDLED:
        return resolve(name)
    source = write_gguf(CASES[name], folder / "whole.f32")
    norm = np.array(read_gguf(source).tensors["output_norm.weight"].data.view(np.float32))
    return rewritten(source, folder / "whole.gguf", lambda tensors: quantized(agreeing(tensors, norm), "Q8_0"))


def split(source: Path, folder: Path, lend: bool = True) -> tuple[Path, Path]:
    """The trunk and the layer of a file as two files; lend: the layer's file also has what is the trunk's."""
    metadata = read_gguf(source).metadata
    architecture = metadata["general.architecture"]
    end, count = (int(str(metadata[f"{architecture}.{key}"])) for key in ("block_count", "nextn_predict_layers"))
    n = end - count
    own = tuple(f"blk.{il}." for il in range(n, end))

    def trunk(tensors: Packed) -> Packed:
        return {name: tensor for name, tensor in tensors.items() if not name.startswith(own)}

    def layer(tensors: Packed) -> Packed:
        return {name: t for name, t in tensors.items() if name.startswith(own) or (lend and name in LENT)}

    keys = {f"{architecture}.block_count": n, f"{architecture}.nextn_predict_layers": None}
    return edited(source, folder / "trunk.gguf", keys, trunk), edited(source, folder / "layer.gguf", change=layer)


def drafts(monkeypatch: pytest.MonkeyPatch, path: Path, layer: Path | None = None) -> list[Any]:
    """Answers of a model, and all that its layer drafted for them."""
    found: list[Any] = []
    with engine.load(path, draft_model=layer, n_ctx=128, device="cpu", n_threads=1) as llm:
        assert llm.draft is not None and llm.draft.name == "mtp" and llm.warnings == []
        proposals = noted(llm, monkeypatch)
        for seed, length in enumerate((1, 30, 70)):
            prompt = np.random.default_rng(seed).integers(0, 200, length).tolist()
            given: dict[str, Any] = {"temperature": 0.8 * (seed % 2), "seed": seed, "ignore_eos": True}
            answer = llm.complete(prompt, max_tokens=24, speculation=DRAFTED, **given)
            assert answer.speculation is not None
            found.append((answer.ids, answer.speculation.drafted, answer.speculation.accepted))
        found.append([(known, tokens) for known, tokens, _ in proposals])
        found.append((llm.draft.cost, llm.cache.n_bytes, llm.n_ctx))
    return found


@pytest.mark.parametrize("name", few([*NAMES, BUNDLED]))
def test_two_files_are_as_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers, drafts and memory; also beside the layer of the trunk's own file, which is not used."""
    monkeypatch.setattr("engine.speculative.passes.MEASURED", 0)
    monkeypatch.setattr("engine.speculative.controller.FIRST_PAUSE", 0)
    source = whole(name, tmp_path)
    trunk, layer = split(source, tmp_path)
    expected = drafts(monkeypatch, source)
    assert sum(accepted for _, _, accepted in expected[:3]) > 0 or name == OWN_HEAD
    assert drafts(monkeypatch, trunk, layer) == expected
    n = read_config(read_gguf(trunk)).n_layer
    norm = f"blk.{n}.nextn.shared_head_norm.weight"

    def other(tensors: Packed) -> Packed:
        return tensors | {norm: (-tensors[norm][0], tensors[norm][1])}

    changed = [edited(path, tmp_path / f"{path.stem}.other", change=other) for path in (source, layer)]
    worse = drafts(monkeypatch, changed[0])
    assert worse[3] != expected[3]
    assert drafts(monkeypatch, source, changed[1]) == worse


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lend", [False, True])
def test_the_layer_is_that_of_the_whole_file(name: str, lend: bool, tmp_path: Path) -> None:
    source = write_gguf(CASES[name], tmp_path / "whole.gguf")
    trunk, layer = map(read_gguf, split(source, tmp_path, lend))
    expected, config = read_config(read_gguf(source)), read_config(trunk)
    assert is_mtp(layer) and not is_mtp(trunk) and not is_mtp(read_gguf(source))
    assert not config.mtp and config.mtp_problem == ""
    joined = with_mtp(config, trunk, layer)
    assert (joined.layers, joined.mtp, joined.ropes) == (expected.layers, expected.mtp, expected.ropes)


def refused(model: GGUF, layer: GGUF) -> str:
    with pytest.raises(ModelError) as caught:
        with_mtp(read_config(model), model, layer)
    return str(caught.value)


def test_layers_of_other_models(tmp_path: Path) -> None:
    parts = {}
    for name in ("qwen35", "glm4moe", "glm4moe-norms"):
        (folder := tmp_path / name).mkdir()
        parts[name] = [read_gguf(p) for p in split(write_gguf(CASES[name], folder / "whole.gguf"), folder)]
    (model, layer), (glm, glm_layer), (norms, norms_layer) = parts.values()
    assert refused(glm, layer) == f"{layer.path} drafts for qwen35 models, and {glm.path} is glm4moe."
    assert refused(norms, glm_layer) == (
        f"{glm_layer.path} drafts for glm4moe models with embeddings of 72, and {norms.path} has 80."
    )
    keys = {"glm4moe.block_count": 9, "glm4moe.nextn_predict_layers": 1}

    def moved(tensors: Packed) -> Packed:
        return {name.replace("blk.3.", "blk.8."): tensor for name, tensor in tensors.items()}

    deeper = read_gguf(edited(norms_layer.path, tmp_path / "deeper.gguf", keys, moved))
    assert refused(norms, deeper) == f"{deeper.path} drafts for glm4moe models of 8 layers, and {norms.path} has 3."
    uncounted = edited(layer.path, tmp_path / "uncounted.gguf", {"qwen35.nextn_predict_layers": None})
    told = "qwen35.nextn_predict_layers is missing, and the file has 1 such layer"
    assert refused(model, read_gguf(uncounted)) == f"{uncounted} cannot draft: {told}."
    case = FAMILIES["deepseek4"]
    assert isinstance(case, DeepSeek4)
    for layout in ("llama.cpp", "ds4"):
        other = read_gguf(case.write_layer(tmp_path / f"{layout}.gguf", layout))
        assert refused(model, other) == f"{other.path} drafts for deepseek4 models, and {model.path} is qwen35."


def test_a_layer_is_no_model(tmp_path: Path) -> None:
    _, layer = split(write_gguf(CASES["qwen3next"], tmp_path / "whole.gguf"), tmp_path)
    with pytest.raises(
        ModelError,
        match=r"is a layer that only drafts for a qwen3next model; give it as the draft model \(draft_model=\.\.\.\).",
    ):
        read_config(read_gguf(layer))


def test_a_damaged_layer_is_refused(tmp_path: Path) -> None:
    """Whoever gives a layer wants its drafts."""
    trunk, layer = split(write_gguf(CASES["glm4moe"], tmp_path / "whole.gguf"), tmp_path)

    def less(tensors: Packed) -> Packed:
        return {name: tensor for name, tensor in tensors.items() if name != "blk.3.attn_k.weight"}

    def more(tensors: Packed) -> Packed:
        return tensors | {"blk.3.x.weight": (np.ones(8, np.float32), gguf.GGMLQuantizationType.F32)}

    for change, told in ((less, "tensor blk.3.attn_k.weight is missing"), (more, "does not have: blk.3.x.weight;")):
        damaged = edited(layer, tmp_path / "damaged.gguf", change=change)
        with pytest.raises(ModelError) as caught:
            engine.load(trunk, draft_model=damaged, n_ctx=64, device="cpu")
        assert str(caught.value).startswith(f"{damaged}: ") and told in str(caught.value)


def test_a_file_of_the_conversion() -> None:
    """Made by ``convert_hf_to_gguf.py --mtp``, then quantized."""
    layer = read_gguf(shared_path("cases", "qwen35-mtp-head-Q4_0.gguf"))
    assert is_mtp(layer)
    with pytest.raises(
        ModelError,
        match=r"is a layer that only drafts for a qwen35 model; give it as the draft model \(draft_model=\.\.\.\).",
    ):
        read_config(layer)
