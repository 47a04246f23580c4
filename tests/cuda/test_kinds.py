"""The list of a model's kernels, which is made of some of its layers: that of all of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import engine
from engine.cuda.target import Target
from engine.models.base import Model
from engine.synthetic.mamba import NemotronHShape
from engine.synthetic.model import make_model
from engine.synthetic.shape import Shape
from engine.synthetic.shapes import shapes
from tests.tiers import few

N_LAYER = 24


def deep(shape: Shape) -> Shape:
    """The shape with more layers."""
    if isinstance(shape, NemotronHShape):
        return replace(shape, n_layer=N_LAYER, pattern=(shape.pattern * N_LAYER)[:N_LAYER])
    return replace(shape, n_layer=N_LAYER)


DEEP = {
    name: deep(shape)
    for name, shape in shapes().items()
    if name.startswith("tiny-")
    and shape.architecture not in ("gemma4-assistant", "eagle3", "dflash", "deepseek4")
    and not (shape.gemma4 and shape.gemma4.n_shared)
}
"""Small models with more layers than they have kinds of layers; the quantization has two formats for a matrix."""


@pytest.mark.parametrize("name", few(list(DEEP), 4))
def test_kernels_of_some_layers_are_those_of_all(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "m.gguf", DEEP[name], "Q4_K_M")
    given: dict[str, Any] = {"device": Target("sm_90"), "n_ctx": 512, "batch_size": 256, "parallel": 3}
    found = set(engine.load(path, **given).model.jobs())
    computed: list[int] = []
    block = Model.block

    def noted(self: Model, il: int, *rest: Any) -> Any:
        computed.append(il)
        return block(self, il, *rest)

    monkeypatch.setattr(Model, "block", noted)
    llm = engine.load(path, **given)
    assert found == set(llm.model.jobs())
    assert set(computed) == set(llm.model._examples)
    assert len(llm.model._examples) < N_LAYER
    monkeypatch.setattr(Model, "_examples", range(N_LAYER))
    assert found == set(engine.load(path, **given).model.jobs())
