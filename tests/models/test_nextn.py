"""Layers that draft and cannot be used: the trunk is that of the sound file, and a sentence says why it drafts nothing.

The files are the small models of ``tests/oracle`` with other counts of such layers, or without some of their tensors.  No
kernel is needed to load them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine.cache.types import F32
from engine.devices import open_device
from engine.gguf.file import read_gguf
from engine.models.base import Model
from engine.models.registry import build, read_config, without_mtp
from engine.models.traffic import weight_bytes_per_token
from tests.families import Packed, edited
from tests.oracle.families.deepseek4 import DeepSeek4
from tests.oracle.models import CASES, write_gguf

DRAFTING = {
    name: case
    for name, case in CASES.items()
    if case.n_mtp == 1 and not isinstance(case, DeepSeek4) and not case.target
}
"""Models that have one such layer in their file."""


def loaded(path: Path, mtp: bool = True) -> Model:
    """The model of a file on the CPU."""
    gguf = read_gguf(path)
    config = read_config(gguf)
    return build(config if mtp else without_mtp(config), gguf, open_device("cpu"), 64, F32)


class Damage:
    """What is wrong with a file: values of ``keys``, by their names without the architecture, and tensors.

    told: how the problem begins, with KEY for the name of the count and LAST for the number of the layer; change: what
    becomes of the tensors and that number; block_count: what is added to the number of layers.
    """

    def __init__(self, told: str, change: Callable[[int, Packed], Packed] | None = None, **keys: Any) -> None:
        self.told, self.change, self.keys = told, change, keys


def without(*parts: str) -> Callable[[int, Packed], Packed]:
    """Leave out the tensors of layer ``il`` whose names contain one of some ``parts``."""

    def change(il: int, tensors: Packed) -> Packed:
        lost = {name for name in tensors if name.startswith(f"blk.{il}.") and any(part in name for part in parts)}
        assert lost
        return {name: tensor for name, tensor in tensors.items() if name not in lost}

    return change


def three(il: int, tensors: Packed) -> Packed:
    """Two more layers like layer ``il``."""
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(f"blk.{il}.")}
    more = {name.replace(f"blk.{il}.", f"blk.{il + i}."): own[name] for i in (1, 2) for name in own}
    return tensors | more


DAMAGES = {
    "none counted": Damage("KEY is 0, and the file has 1 such layer", nextn_predict_layers=0),
    "no count": Damage("KEY is missing, and the file has 1 such layer", nextn_predict_layers=None),
    "no count, no layer": Damage(
        "KEY is missing, and the file has 1 such layer", nextn_predict_layers=None, block_count=-1
    ),
    "three counted": Damage("KEY is 3, and the file has 1 such layer", nextn_predict_layers=3),
    "more counted than there are layers": Damage("KEY is 99, and the file has 1 such layer", nextn_predict_layers=99),
    "three": Damage("KEY is 3, and drafts by one layer are supported", three, nextn_predict_layers=3, block_count=2),
    "one of three counted": Damage("KEY is 1, and the file has 3 such layers", three, block_count=2),
    "no tensors": Damage("KEY is 1, and the file has no tensors of a layer that drafts", without(".")),
    "no own tensors": Damage("KEY is 1, and the file has no tensors of a layer that drafts", without(".nextn.")),
    "no projection": Damage("tensor blk.LAST.nextn.eh_proj.weight is missing", without("nextn.eh_proj")),
    "no norm": Damage("tensor blk.LAST.attn_norm.weight is missing", without(".attn_norm")),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", DRAFTING)
def test_the_trunk_runs(name: str, damage: str, tmp_path: Path) -> None:
    """Its layers, tensors and memory are those of the sound file without drafts; also with mtp=False, in silence."""
    made, source = DAMAGES[damage], write_gguf(DRAFTING[name], tmp_path / "sound.gguf")
    sound = read_gguf(source)
    architecture, plain = sound.metadata["general.architecture"], loaded(source, mtp=False)
    assert loaded(source).config.mtp
    last = plain.config.n_layer
    keys = {f"{architecture}.{key}": value for key, value in made.keys.items()}
    if (more := made.keys.get("block_count")) is not None:
        keys[f"{architecture}.block_count"] = last + 1 + more
    path = edited(
        source, tmp_path / "m.gguf", keys, lambda tensors: made.change(last, tensors) if made.change else tensors
    )
    model = loaded(path)
    assert model.drafter is None and not model.config.mtp and model.config.layers == plain.config.layers
    told = made.told.replace("KEY", f"{architecture}.nextn_predict_layers").replace("LAST", str(last))
    assert model.config.mtp_problem.startswith(told)
    assert len(model.cache.layers) == len(plain.cache.layers) and model.cache.n_bytes == plain.cache.n_bytes
    assert weight_bytes_per_token(path) == weight_bytes_per_token(source)
    assert loaded(path, mtp=False).config.mtp_problem == ""


def test_each_tensor_of_the_layer(tmp_path: Path) -> None:
    """The model runs without drafts if one of the tensors is missing, but for those that not every such layer has."""
    source = write_gguf(DRAFTING["glm4moe-norms"], tmp_path / "sound.gguf")
    own = [name for name in read_gguf(source).tensors if name.startswith("blk.3.")]
    assert len(own) > 20
    for name in own:
        path = edited(source, tmp_path / "m.gguf", change=partial(without(name.removeprefix("blk.3")), 3))
        model = loaded(path)
        if any(part in name for part in ("embed_tokens", "shared_head", "exp_probs_b")):
            assert model.drafter is not None
        else:
            assert model.drafter is None and model.config.mtp_problem.startswith("tensor blk.3.")


def test_layers_of_deepseek4(tmp_path: Path) -> None:
    """A count without tensors is usual; a layer in the model's file cannot be used."""
    case = CASES["deepseek4"]
    assert isinstance(case, DeepSeek4)
    source, n = write_gguf(case, tmp_path / "sound.gguf"), case.config["num_hidden_layers"]
    counted = edited(source, tmp_path / "counted.gguf", {"deepseek4.nextn_predict_layers": 1})
    assert loaded(counted).config.mtp_problem == ""
    layer = read_gguf(case.write_layer(tmp_path / "layer.gguf", "llama.cpp"))
    own = {name: (np.array(t.data), t.type) for name, t in layer.tensors.items() if name.startswith(f"blk.{n}.")}
    keys = {"deepseek4.block_count": n + 1, "deepseek4.nextn_predict_layers": 1}
    joined = loaded(edited(source, tmp_path / "joined.gguf", keys, lambda tensors: tensors | own))
    assert joined.config.n_layer == n and "must have a file of its own" in joined.config.mtp_problem


@pytest.mark.thorough
@pytest.mark.parametrize("name", DRAFTING)
def test_answers_are_those_of_the_trunk(name: str, tmp_path: Path) -> None:
    source = write_gguf(DRAFTING[name], tmp_path / "sound.gguf")
    plain = engine.load(source, mtp=False, n_ctx=64, device="cpu")
    change = partial(without(".attn_norm"), plain.config.n_layer)
    path = edited(source, tmp_path / "m.gguf", change=change)
    found, bare = (engine.load(path, mtp=mtp, n_ctx=64, device="cpu") for mtp in (True, False))
    (warning,) = found.warnings
    assert warning.startswith(
        f"the model's own layer does not draft: tensor blk.{plain.config.n_layer}.attn_norm.weight"
    )
    assert found.draft is None and bare.warnings == plain.warnings == []
    assert np.array_equal(found.logits([1, 2, 3]), plain.logits([1, 2, 3]))
